"""Sequences that go to another process, and come from one: see `vmmkv.transfer` for the messages."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from .arguments import check_tokens
from .core.sequence import suspended
from .driver.fence import Fence
from .errors import DriverError, VmmkvError
from .events.naming import Name
from .transfer import Head, Peer, geometry_of

if TYPE_CHECKING:
    from .cache import KVCache
    from .sequence import Sequence


def send(sequence: Sequence, rank: int, group: dist.ProcessGroup | None) -> None:
    """Sends a sequence: see `Sequence.send`."""
    cache, peer = sequence.cache, Peer(rank, group, sequence.cache.device)
    if sequence.is_suspended:
        raise suspended()
    cache.order_behind(sequence)
    if stream := cache.pool.driver.current_stream():
        sequence.record_stream(stream)
    first = peer.ask(Head(geometry_of(cache.layout), sequence.start, sequence.length, *cache.known(sequence)))
    with cache.pool.nvtx.send:
        peer.send(messages(sequence, first))


def receive(
    cache: KVCache, rank: int, group: dist.ProcessGroup | None, expected_tokens: int, tenant: Name, reuse: bool
) -> Sequence:
    """Receives a sequence: see `KVCache.receive`."""
    driver = cache.pool.driver
    peer = Peer(rank, group, cache.device)
    Fence.after(driver, [driver.current_stream()])  # raises while a graph is captured
    head = peer.listen()
    with peer.told():
        head.check(cache.layout)
        sequence = room_for(cache, head, expected_tokens, tenant, reuse)
    first = max(head.start, sequence.cached_tokens)
    try:
        peer.accept(first)
        with cache.pool.nvtx.receive:
            peer.receive(messages(sequence, first))
        if cache.known(sequence)[0] is not None and len(head.ids):
            with suppress(DriverError):  # the sequence is there, and the sender knows; only others do not find it
                sequence.commit(head.ids)
    except BaseException:
        with suppress(VmmkvError):  # else it is freed when it is collected
            sequence.free()
        raise
    return sequence


def room_for(cache: KVCache, head: Head, expected_tokens: int, tenant: Name, reuse: bool) -> Sequence:
    """A sequence with room for another process's, which begins with what is cached here of its tokens."""
    expected = max(check_tokens(expected_tokens, "expected_tokens"), head.length)
    if reuse and head.key:
        salt, adapter = head.key
        sequence = cache.sequence(
            token_ids=head.ids, salt=salt, adapter=adapter, expected_tokens=expected, tenant=tenant
        )
    else:
        sequence = cache.sequence(0 if head.start else head.length, expected_tokens=expected, tenant=tenant)
    if missing := head.length - sequence.length:
        try:
            cache.extend([sequence], missing, starts=[head.start] if head.start else None)
        except BaseException:
            with suppress(VmmkvError):
                sequence.free()
            raise
    return sequence


def messages(sequence: Sequence, first: int) -> list[torch.Tensor]:
    """What is sent of a sequence's tokens from one on: a flat view of each range, and its scales if it has any."""
    cache, row = sequence.cache, sequence.row
    views = []
    for number, part in enumerate(cache.ranges):
        flat, record = cache.range(number), int(part["record"])
        base = row * int(part["row_pages"]) * cache.page_size
        begin, end = (base + token * record for token in (first, sequence.length))
        views.append(flat[begin // flat.itemsize : end // flat.itemsize])
    return [*views, cache.scales.rows[row]] if cache.scales else views


NO_IDS = np.empty(0, np.int64)
"""The committed ids of a sequence without any."""
