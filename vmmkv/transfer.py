"""Sequences that go from one process to another, as messages of torch.distributed.

    sender      layout, first token and length, known token ids -->
    receiver    <-- the first token that it wants K and V of, or why it refuses the sequence
    sender      these tokens: a message for each range of the layout, and one for scales of the sequence -->

A row is contiguous, so a sequence's tokens in a range are one message, whatever pages lie under them. No K or V moves
before the receiver has memory for all of it. NCCL works in the order of the current stream; with gloo a call returns
when all is done. The host waits only for the first two messages.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from .arguments import Ids, check_tokens
from .core.sequence import suspended
from .driver.fence import Fence
from .errors import ArgumentError, DriverError, LayoutError, TransferError, TransferRefusedError, VmmkvError
from .events.naming import Name
from .layout import KVLayout

if TYPE_CHECKING:
    from . import cache as caches
    from . import sequence as sequences

MARK = b"vmmkv 4\n"
"""The first bytes of a letter; the number is the version of the messages. A letter is a literal of Python, which keeps
types apart and runs nothing, a line break, and token ids."""
FIRST = 4096
"""Bytes of a letter's first message: the mark, the letter's length, and as much of the letter as fits."""
BEGIN = len(MARK) + 8
MOST = 1 << 30
"""Bytes of a letter, at most: ids of 128 million tokens."""
NO_IDS = np.empty(0, np.int64)
Read = TypeVar("Read")


def send(sequence: sequences.Sequence, rank: int, group: dist.ProcessGroup | None) -> None:
    cache, peer = sequence.cache, Peer(rank, group, sequence.cache.device)
    if sequence.is_suspended:
        raise suspended()
    cache.order_behind(sequence)
    if stream := cache.pool.driver.current_stream():
        sequence.record_stream(stream)
    first = peer.ask(Head(geometry_of(cache.layout), sequence.start, sequence.length, *cache.known(sequence)))
    with cache.pool.nvtx("vmmkv: send"):
        peer.send(messages(sequence, first))


def receive(
    cache: caches.KVCache, rank: int, group: dist.ProcessGroup | None, expected_tokens: int, tenant: Name, reuse: bool
) -> sequences.Sequence:
    peer = Peer(rank, group, cache.device)
    Fence.after(cache.pool.driver, [cache.pool.driver.current_stream()])  # raises while a graph is captured
    head = peer.listen()
    with peer.told():
        head.check(cache.layout)
        how: dict[str, Any] = {"tokens": 0 if head.start else head.length, "tenant": tenant}
        if reuse and head.key:
            how |= {"tokens": 0, "token_ids": head.ids, "salt": head.key[0], "adapter": head.key[1]}
        expected = max(check_tokens(expected_tokens, "expected_tokens"), head.length)
        sequence = cache.sequence(**how, expected_tokens=expected)
    try:
        with peer.told():
            if missing := head.length - sequence.length:
                cache.extend([sequence], missing, starts=[head.start] if head.start else None)
        first = max(head.start, sequence.cached_tokens)
        peer.accept(first)
        with cache.pool.nvtx("vmmkv: receive"):
            peer.receive(messages(sequence, first))
        if cache.known(sequence)[0] is not None and len(head.ids):
            with suppress(DriverError):  # both sides have the sequence; only later sequences do not find its tokens
                sequence.commit(head.ids)
    except BaseException:
        with suppress(VmmkvError):  # else it is freed when it is collected
            sequence.free()
        raise
    return sequence


def messages(sequence: sequences.Sequence, first: int) -> list[torch.Tensor]:
    """The bytes of a sequence's tokens from one on: a flat view of each range, and of its scales if it has any."""
    cache, row, views = sequence.cache, sequence.row, []
    for number, part in enumerate(cache.ranges):
        base, record = row * int(part["row_pages"]) * cache.page_size, int(part["record"])
        views.append(cache.range(number).view(torch.uint8)[base + first * record : base + sequence.length * record])
    return [*views, cache.scales.rows[row].view(torch.uint8)] if cache.scales else views


class Head(NamedTuple):
    """What a receiver is told of a sequence: the geometry of its layout (see `geometry_of`), the first token that it
    keeps, its length, the salt and adapter that its tokens may be known under, or None, and the ids of known tokens."""

    geometry: dict[str, Any]
    start: int
    length: int
    key: tuple[Name, Name] | None
    ids: Ids

    @classmethod
    def read(cls, words: Any, ids: Ids) -> Head:
        """Checks what was received."""
        geometry, start, length, key = words
        is_key = key is None or (isinstance(key, tuple) and len(key) == 2)
        is_there = 0 <= index(start) <= index(length) >= len(ids) and not (start and len(ids))
        if not (is_key and is_there and isinstance(geometry, dict)):
            raise ValueError("there is no such sequence")
        return cls(geometry, start, length, key, ids)

    def check(self, layout: KVLayout) -> None:
        """Raises `LayoutError` where a cache of a layout cannot hold the sequence."""
        ours = geometry_of(layout)
        pairs = [(name, self.geometry.get(name), ours.get(name)) for name in ours | self.geometry]
        if wrong := [f"{name} {there} there, {here} here" for name, there, here in pairs if there != here]:
            raise LayoutError(
                f"asked to receive a sequence of another layout: {', '.join(wrong)}. Make both caches with the same "
                "KVLayout (pages may differ in size)"
            )


def geometry_of(layout: KVLayout) -> dict[str, Any]:
    """Names and values that two layouts agree on if their token records are the same."""
    facts: dict[str, Any] = {
        "dtype": str(layout.dtype).removeprefix("torch."),
        "num_layers": layout.num_layers,
        "layers_per_range": min(layout.layers_per_range or layout.num_layers, layout.num_layers),
        "scales": layout.scales,
    }
    for name, attribute in ("num_kv_heads", "num_kv_heads"), ("head_dim", "k_head_dim"), ("v_head_dim", "v_head_dim"):
        values = [getattr(layer, attribute) for layer in layout.layers]
        facts[name] = values[0] if len(set(values)) == 1 else values
    return facts


class Peer:
    """Another process of a group: messages to it, and from it. A method raises `TransferError` if that process is gone,
    or has sent something else.

    Args:
        rank: in the default group, as `torch.distributed.send` takes it.
        group: None is the default one.
        device: where messages are.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ArgumentError("there are no other processes: call torch.distributed.init_process_group() first")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ArgumentError(f"got group={group!r}; it must be a process group that this process is in")
        ranks, own = dist.get_process_group_ranks(group), dist.get_rank()
        if rank not in ranks or rank == own:
            raise ArgumentError(f"got rank={rank!r}; it must be another one than {own}, among {ranks}")
        self.rank, self._group, self._device = int(rank), group, device

    def ask(self, head: Head) -> int:
        """Offers a sequence. Returns the first token that the other process wants, or raises `TransferRefusedError`."""

        def read(words: Any, _: Ids) -> tuple[int, str, str]:
            token, reason, why = words
            if not isinstance(reason, str) or not (reason or head.start <= index(token) <= head.length):
                raise ValueError("this is no answer")
            return token, reason, why

        self._post(tuple(head[:4]), head.ids)
        first, reason, why = self._fetch(read)
        if reason:
            raise TransferRefusedError(f"rank {self.rank} refused {head.length} tokens: {reason}: {why}", reason)
        return first

    def listen(self) -> Head:
        """Waits for the head of a sequence; `accept` follows, or an error within `told`."""
        return self._fetch(Head.read)

    def accept(self, first: int) -> None:
        self._post((first, "", ""))

    @contextmanager
    def told(self) -> Iterator[None]:
        """Tells the other process, which waits, of an error within that refuses the sequence."""
        try:
            yield
        except BaseException as error:
            with suppress(TransferError):
                self._post((0, type(error).__name__, str(error)))
            raise

    def send(self, states: Sequence[torch.Tensor]) -> None:
        self._move(dist.send, "sent to", states)

    def receive(self, states: Sequence[torch.Tensor]) -> None:
        self._move(dist.recv, "received from", states)

    def _move(self, call: Any, what: str, states: Sequence[torch.Tensor]) -> None:
        try:
            for each in states:
                if each.numel():
                    call(each, self.rank, self._group)
        except (RuntimeError, ValueError) as error:
            raise TransferError(f"nothing could be {what} rank {self.rank}: {error}") from error

    def _post(self, words: object, ids: Ids = NO_IDS) -> None:
        """Sends a letter: one message, or two if it is long."""
        letter = f"{words!r}\n".encode() + ids.astype("<i8", copy=False).tobytes()
        whole = bytearray((MARK + len(letter).to_bytes(8, "little") + letter).ljust(FIRST))
        message = torch.frombuffer(whole, dtype=torch.uint8).to(self._device)
        self.send([message[:FIRST], message[FIRST:]])

    def _fetch(self, read: Callable[[Any, Ids], Read]) -> Read:
        """Waits for the letter that the other process posts, and reads it."""
        try:
            first = self._arrived(FIRST)
            length = int.from_bytes(first[len(MARK) : BEGIN], "little")
            if not first.startswith(MARK) or length > MOST:
                raise ValueError("this is no letter")
            letter = first[BEGIN : BEGIN + length] + self._arrived(max(length - FIRST + BEGIN, 0))
            words, ids = letter.split(b"\n", 1)
            return read(literal_eval(words.decode()), np.frombuffer(ids, "<i8"))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise TransferError(
                f"rank {self.rank} has sent something else than a sequence of this version of vmmkv"
            ) from error

    def _arrived(self, nbytes: int) -> bytes:
        try:
            message = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            raise TransferError(f"there is no memory for a message from rank {self.rank}: {error}") from error
        self.receive([message])
        return message.cpu().numpy().tobytes()
