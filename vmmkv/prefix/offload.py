"""Evicted prefixes in host memory: the way there, and back."""

from __future__ import annotations

import threading
from contextlib import suppress
from sys import is_finalizing
from typing import Any

import numpy as np

from ..core.pool import Ask, at
from ..core.sequence import Sequence
from ..errors import VmmkvError
from ..tier.host_tier import HostTier
from . import entries
from .tables import MOVED, ON_HOST

MOVES = 1024
"""Pages that go to the host at a time."""


class Offload:
    """What connects a prefix tree and a host tier.

    Args:
        tree: the tree's state.
        tier: the host tier, which gets evicted frames first. Its `lowest_priority` is a number.
    """

    def __init__(self, tree: Any, tier: HostTier) -> None:
        self.tree, self.address, self.tier = tree, at(tree), tier
        self.moved = np.zeros(max(MOVES, 2 * int(tree[0]["width"] * tree[0]["large"])), MOVED)
        self.lock: Any = threading.RLock()

    # ------------------------------------------------------------------ to the host

    def evict(self, pages: int, now: int) -> int:
        """Drops frames that have a copy in host memory, or get one first where that is possible. Returns the number of
        pages that are free then, or can be reclaimed."""
        locks = self.lock, self.tier.lock, self.tier.pool.lock
        if is_finalizing() or any(lock._is_owned() for lock in locks):
            return int(entries.evict(self.address, pages, now, 0, 0, 0))
        with self.lock:
            given, last = int(self._listed()["gain"].sum()), -1  # what an interruption has left
            self._settle()
            self._forget()
            while last < given < pages:
                last = given
                arguments = pages - given, now, self.tier.lowest_priority, at(self.moved), len(self.moved)
                found = int(entries.evict(self.address, *arguments))
                given += found - int(self._listed()["gain"].sum()) + self._store()
        return given

    def _listed(self) -> Any:
        """The pages that an eviction has listed."""
        return self.moved[: int(self.tree[0]["moved"])]

    def _store(self) -> int:
        """Copies what is listed, and waits for that. Returns the number of pages that the device has gained."""
        moved = self._listed().copy()
        if not len(moved):
            return 0
        is_stored = np.zeros(len(moved), np.int64)
        with suppress(VmmkvError), self.tier.alone():
            self.tier.sweep()
            is_stored = self.tier.prefixes.store(moved)
        self._settle(is_stored)
        with suppress(VmmkvError):
            self.tier.finish(int(is_stored.sum()))
            return int(moved["gain"].sum())
        return int(moved["gain"][is_stored == 0].sum())

    def _settle(self, is_stored: Any = None) -> None:
        """Notes which of the listed pages were stored; by default none. Ends the list."""
        moved = self._listed()
        if any(olds := {*moved["old"].tolist()}):
            with self.tier.alone():
                for old in olds:
                    self.tier.prefixes.drop(old)
        is_stored = np.zeros(len(moved), np.int64) if is_stored is None else is_stored
        entries.settle_moved(self.address, at(self.moved), at(is_stored))

    def _forget(self) -> None:
        """Has the tree forget what has left the host."""
        gone = self.tier.prefixes.gone
        while gone:
            entries.settle_copy(self.address, *gone.popleft(), 0)

    # ------------------------------------------------------------------ back

    def load(self, sequence: Sequence, words: tuple[int, int, int], cached: int) -> int:
        """Copies first tokens that lie only on the host to a new sequence, and commits them. It begins with `cached`
        tokens that hold K and V, and may have room for more; `words` are the number of its key, and the token ids:
        address and count. Returns how many tokens hold K and V then: `cached` if something fails."""
        if not self.tier.prefixes.stored:
            return cached
        with self.lock:
            self._forget()
        length, end = sequence.length, entries.look_up_host(self.address, *words, cached, 0, 0)
        if end <= cached:
            return cached
        is_loaded = False
        with suppress(VmmkvError):
            if end > length:
                sequence.extend(end - length)
            end, pages = self._pages((*words[:2], end), cached)  # fewer may be left, and more may have come
            with self.tier.alone():
                is_loaded = end > cached and self.tier.prefixes.load(pages, sequence.ticket, cached, end - cached)
        cached = end if is_loaded else cached
        if sequence.length > max(length, cached):
            sequence.truncate(max(length, cached))
        if is_loaded:
            (key, place, _), ask = words, Ask()
            entries.commit(self.address, sequence.ticket, key, place, end, 0, 0, ask.address)
        return cached

    def _pages(self, words: tuple[int, int, int], cached: int) -> tuple[int, list[tuple[int, int, int]]]:
        """How many first tokens can be had, and the pages of those that come from the host."""
        size, records = self.tier.driver.page_size, self.tier.cache.records
        found = np.zeros(sum(-(-words[2] * record // size) for record in records), ON_HOST)
        end = entries.look_up_host(self.address, *words, cached, at(found), len(found))
        return end, found[found["serial"] > 0].tolist()

    def close(self) -> None:
        """Forgets all copies. The tree is empty."""
        with self.lock:
            self._settle()
            with self.tier.alone():
                for serial in [*self.tier.prefixes.stored]:
                    self.tier.prefixes.drop(serial)
