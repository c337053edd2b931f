"""Evicted prefixes in host memory: the way there, and back."""

from __future__ import annotations

import threading
from array import array
from contextlib import suppress
from sys import is_finalizing
from typing import Any

import numpy as np

from ..core.pool import Ask, at
from ..core.sequence import Sequence
from ..errors import VmmkvError
from ..tier.host_tier import HostTier
from ..tier.prefixes import Page
from . import entries
from .tables import MOVED, ON_HOST

MOVES = 1024
"""Pages that go to the host at a time."""


class Offload:
    """What connects a prefix tree and a host tier.

    Args:
        tree: the tree's state.
        tier: where its evicted frames go first. Its `lowest_priority` is a number.
    """

    def __init__(self, tree: Any, tier: HostTier) -> None:
        self.tree, self.address, self.tier = tree, at(tree), tier
        self.nodes: dict[int, int] = {}
        """By handle the node that was stored."""
        self.handles: dict[int, int] = {}
        """By node its handle."""
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
            self._settle([])
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
        serials, items = np.unique(-moved["serial"], return_inverse=True)
        words = zip(items.tolist(), *(moved[name].tolist() for name in ("part", "page", "frame", "offset")))
        priorities = np.zeros(len(serials), np.int64)
        priorities[items] = moved["priority"]
        handles = self.tier.store([Page(*each) for each in words], priorities.tolist())
        is_stored = np.array([handle is not None for handle in handles])[items]
        self._settle([handles[item] or 0 for item in items])
        with suppress(VmmkvError):
            self.tier.finish(int(is_stored.sum()))
            return int(moved["gain"].sum())
        return int(moved["gain"][~is_stored].sum())

    def _settle(self, handles: list[int]) -> None:
        """Notes by page the handles of what is listed; without any, that there are no copies. Ends the list."""
        nodes: list[int] = self._listed()["node"].tolist()
        for node, handle in dict(zip(nodes, handles)).items():
            if (old := self.handles.pop(node, None)) is not None:
                self.nodes.pop(old, None)
                self.tier.drop(old)
            if handle:
                self.nodes[handle], self.handles[node] = node, handle
        words = array("q", handles or [0] * len(nodes))
        entries.settle_moved(self.address, at(self.moved), words.buffer_info()[0])

    def _forget(self) -> None:
        """Has the tree forget what has left the host."""
        while self.tier.gone:
            handle = self.tier.gone.popleft()
            node = self.nodes.pop(handle, None)
            if node is not None:
                self.handles.pop(node, None)
                entries.settle(self.address, node, handle, 0)

    # ------------------------------------------------------------------ back

    def load(self, sequence: Sequence, words: tuple[int, ...], cached: int) -> int:
        """Copies first tokens that lie only on the host to a new sequence, and commits them.

        Args:
            sequence: it begins with `cached` tokens, and may have room for more.
            words: the number of its key, and the token ids: address, count, and whether they have 64 bits.
            cached: how many of its first tokens hold K and V.

        Returns:
            How many do then. If something fails, no others do.
        """
        if not self.nodes:
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
            end, pages = self._pages(words, cached)  # fewer may be left
            is_loaded = end > cached and self.tier.load(pages, sequence.ticket, cached, end - cached)
        cached = end if is_loaded else cached
        if sequence.length > max(length, cached):
            sequence.truncate(max(length, cached))
        if is_loaded:
            (key, place, _, wide), ask = words, Ask()
            entries.commit(self.address, sequence.ticket, key, place, end, wide, 0, 0, ask.address)
        return cached

    def _pages(self, words: tuple[int, ...], cached: int) -> tuple[int, list[tuple[int, int, int]]]:
        """How many first tokens can be had, and the pages of those that come from the host."""
        cache = self.tier.cache
        size = self.tier.driver.page_size
        most = sum(-(-words[2] * record // size) for record in cache.records)
        found = np.zeros(most, ON_HOST)
        end = entries.look_up_host(self.address, *words, cached, at(found), most)
        pages: Any = found.tolist()
        return end, [each for each in pages if each[0]]

    def close(self) -> None:
        """Forgets all copies. The tree is empty."""
        with self.lock:
            self._settle([])
            for handle in self.nodes:
                self.tier.drop(handle)
            self.nodes.clear()
            self.handles.clear()
