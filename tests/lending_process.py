"""Processes that share a budget, for `test_lending.py`: each runs random sequences on a cache of its own."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random

import torch

import vmmkv
from vmmkv.core import entries
from vmmkv.ledger import Book, Ledger, device_name, path_of

entries.adopt  # noqa: B018 - so that machine code is loaded once, before processes are forked
PAGE, LIMIT = 4096, 200
LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)
"""8 tokens of it fill a page."""


def make_cache(name: str, reserved: int, large: bool = False) -> vmmkv.KVCache:
    """A cache on a pool of its own with a shared budget of `LIMIT` pages."""
    pool = vmmkv.FramePool(LIMIT * PAGE, device="cpu", page_size=PAGE, shared=name, reserved=reserved * PAGE)
    return vmmkv.KVCache(LAYOUT, 16, 8 * LIMIT, pool=pool, lookahead=0, large_frames=large)


def visitor(name: str) -> Ledger:
    """The ledger, without a line."""
    return Ledger(path_of(name, device_name(torch.device("cpu"))))


def change(cache: vmmkv.KVCache, random: Random) -> None:
    """Grows and frees sequences at random while its parent lives; what they hold is read again before they end."""
    live: dict[vmmkv.Sequence, float] = {}
    parent = os.getppid()
    while os.getppid() == parent:
        with suppress(vmmkv.OutOfPagesError, vmmkv.OutOfRowsError):
            if not live or random.random() < 0.4:
                sequence = cache.sequence(random.randint(1, 400))
                live[sequence] = random.random()
                sequence.k(0).fill_(live[sequence])
            else:
                sequence = random.choice([*live])
                if random.random() < 0.5:
                    sequence.extend(random.randint(1, 200))
                    sequence.k(0).fill_(live[sequence])
                else:
                    value = torch.tensor(live.pop(sequence))
                    assert (sequence.k(0) == value).all(), "another sequence's numbers"
                    sequence.free()
        if random.random() < 0.05:
            cache.pool.lender.ledger.change(partial(check, cache.pool))  # type: ignore[union-attr]
            time.sleep(0.01)


def check(pool: vmmkv.FramePool, book: Book) -> None:
    assert book.mine["granted"] >= pool.word("created") * PAGE, "it has memory that is not granted"


def start(name: str, reserved: int, work: Callable[[vmmkv.KVCache, Random], None] = change) -> int:
    """Forks a process, which works until it is killed; returns its number once it has a cache."""
    inside, outside = os.pipe()
    if child := os.fork():
        os.close(outside)
        assert os.read(inside, 1) == b"x", "the process could not begin"
        os.close(inside)
        return child
    try:
        try:
            cache = make_cache(name, reserved, large=os.getpid() % 2 == 0)
        except vmmkv.BudgetError:  # live tokens of others hold too much
            cache = make_cache(name, 0)
        os.write(outside, b"x")
        work(cache, Random())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
