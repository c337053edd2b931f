"""Prefixes on the host: what the prefix tree has given up, and would have to be computed anew.

    evicted leaf   --copied, with the path to it-->   pages of the host, known to a tree of their own
    new sequence   <--copied, behind what it has of the device's tree--   as many tokens as are known here

The two trees know nothing of each other: what lies here may lie on the device as well, and whoever begins with it has
it in pages of its own, as if it had computed it. So the device's tree finds what it would find without a host.

Copies run on a stream of their own: out behind all that has written what is known, and before the rows that they read
give it to others; in behind all that has used the row's pages, and before what its sequence does next.

Whatever fails here leaves less on the host, or finds less there. An interruption has all of it forgotten.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import chain
from math import inf
from typing import Any, NamedTuple

import numpy as np

from ..driver.fence import Fence, wait_for_device
from ..errors import DriverError, InvariantError, OutOfHostMemoryError, StreamCaptureError, VmmkvError
from ..events import EventLog
from ..memory.frames import LARGE
from ..rows.rows import Rows
from ..space.arena import Arena
from .host_pages import HostPages, Place
from .node import Ids, Node
from .retention import DEFAULT_PRIORITY, MAX_PRIORITY, Retention
from .telling import Key
from .tree import PrefixTree

BATCH = 4 * LARGE
"""Pages on no row that are mapped at a time, to be copied."""
FAILURES = DriverError, StreamCaptureError, OutOfHostMemoryError
"""What is not to be had on the host, or from there, is computed anew."""


class Found(NamedTuple):
    """So many first tokens of a sequence, and by range where the pages are that they lie in."""

    tokens: int
    places: list[list[Place]]


NOTHING = Found(0, [])
"""Of what is not here."""


class HostPrefixes:
    """See above.

    Args:
        rows: the rows of the cache.
        limit: the most bytes that they, and suspended sequences, may take.
        priority: the lowest that is worth to be kept; None: none is.
        log: what is told of them to routers, if anything is.
    """

    def __init__(self, rows: Rows, limit: int, priority: int | None, log: EventLog | None) -> None:
        self._rows: Rows = weakref.proxy(rows)  # whose keeper holds this
        self._limit, self._priority, self._log = limit, priority, log
        self._driver, self._books, self._table = rows.pool.driver, rows.books, rows.table
        self._pages = HostPages(self._books.page_size, self._driver.device.type == "cuda")
        self._tree = self._new_tree()
        self.is_copying = False
        """Whether copies may be under way that no fence knows."""

    def _new_tree(self) -> PrefixTree:
        return PrefixTree(self._books.page_size, self._books.records, log=self._log, tier="host")

    @property
    def pages(self) -> int:
        """How many are known."""
        return self._tree.pages

    @property
    def nbytes(self) -> int:
        """What they take, and what copies still use."""
        return self._pages.nbytes

    @property
    def _left(self) -> int:
        """Bytes that can be had."""
        return self._limit - self._pages.nbytes - self._table.suspended_bytes

    def make_room(self, nbytes: int, priority: int = MAX_PRIORITY, wait: bool = False) -> bool:
        """Gives up what is least needed, until there is room for so many bytes; returns whether there is.

        Args:
            priority: of what needs room; what has a higher one stays.
            wait: for copies.

        Raises:
            DriverError: they could not be waited for.
        """
        pages = self._pages
        if nbytes > self._limit - self._table.suspended_bytes:
            return False
        pages.collect()
        while self._left + pages.leaving_bytes < nbytes and any(gone := self._tree.evict(1, priority)):
            pages.drop(chain.from_iterable(gone))
        if self._left < nbytes and wait:
            pages.collect(wait=True)
        return self._left >= nbytes

    # ------------------------------------------------------------------ out

    def keep(self, key: Hashable, leaf: Node, written: Fence) -> None:
        """Copies what the path to a leaf of the device's tree has in whole pages, and is not here yet, if it is worth
        it, and there is room.

        Args:
            written: passes when all that is known has been written.
        """
        priority = leaf.priority_at(self._tree.now())
        if self._priority is not None and priority >= self._priority:
            with suppress(*FAILURES):
                self._keep(key, leaf, priority, written)

    def _keep(self, key: Hashable, leaf: Node, priority: int, written: Fence) -> None:
        path = list(leaf.path())[::-1]
        ids = np.concatenate([node.ids for node in path])
        numbers = leaf.path_pages()
        match = self._tree.match(key, ids)
        begins = [len(of) for of in match.pages]
        if match.tokens < self._tree.geometry.readable(len(ids)):
            count = sum(len(of) - begin for of, begin in zip(numbers, begins))
            held = self._tree.lock(match.node, match.tokens)
            try:
                has_room = self.make_room(count * self._books.page_size, priority)
            finally:
                self._tree.unlock(held)
            if not has_room:
                return
            new = self._copy_out(numbers, begins, written)
        else:
            new = [[] for _ in numbers]
            ids = ids[: match.tokens]
        known = [of + its for of, its in zip(match.pages, new)]
        counts = self._tree.geometry.pages(len(ids))
        self._tree.insert(key, ids, [of[:count] for of, count in zip(known, counts)], self._retention(path))
        for of, its in zip(new, self._tree.numbers):
            self._pages.drop([page for page in of if page not in its])

    def _retention(self, path: list[Node]) -> list[Retention]:
        """How long the nodes of a path are to be kept."""
        now = self._tree.now()
        return [
            Retention(node.begin, node.end, node.priority, None if node.expires == inf else node.expires - now)
            for node in path
            if node.priority_at(now) != DEFAULT_PRIORITY
        ]

    def _copy_out(self, numbers: list[list[int]], begins: list[int], written: Fence) -> list[list[int]]:
        """Copies pages of a path, by range from one on; returns where, by their numbers here."""
        Fence.after(
            self._driver, [self._driver.current_stream()]
        )  # fails in a graph capture, before it can disturb that
        new: list[list[int]] = []
        try:
            for of, begin in zip(numbers, begins):
                new.append(self._pages.add(len(of) - begin))
            written.order(self._stream)
            targets = [self._pages.places(its) for its in new]
            with self._copying([place for of in targets for place in of]):
                for (arena, _), of, begin, target in zip(self._books.ranges, numbers, begins, targets):
                    self._copy_range(arena, of, begin, target)
        except FAILURES:
            for each in new:
                self._pages.drop(each)
            raise
        return new

    def _copy_range(self, arena: Arena, numbers: list[int], begin: int, targets: list[Place]) -> None:
        """Copies pages of a path in one range, from `begin` on."""
        nowhere: list[int] = []
        for first, end, row in _places(arena, numbers, begin):
            if row is None:
                nowhere += range(first, end)
                continue
            address, size = arena.table.address_of(row, first), self._books.page_size
            for run in self._pages.runs(targets[first - begin : end - begin]):
                self._copy(run.address, address + run.begin * size, (run.end - run.begin) * size)
            self._table.fence(row, Fence.after(self._driver, [self._stream]))
        nowhere.sort()
        while nowhere:
            count = self._showable([numbers[page] for page in nowhere])
            pages, nowhere = nowhere[:count], nowhere[count:]
            self._copy_from_nowhere([numbers[page] for page in pages], [targets[page - begin] for page in pages])

    def _showable(self, numbers: list[int]) -> int:
        """How many of these pages, of whatever frames, can be mapped at a time."""
        frames, shown = self._rows.pool.frames, dict[int, None]()
        for at, page in enumerate(numbers):
            shown[frames.frame_of(page)] = None
            if at and len(frames.in_pages(shown)) > BATCH:
                return at
        return len(numbers)

    def _copy_from_nowhere(self, numbers: list[int], targets: list[Place]) -> None:
        """Copies pages that lie on no row, from where they are mapped for it."""
        frames, size = self._rows.pool.frames, self._books.page_size
        owners = [frames.frame_of(page) for page in numbers]
        addresses = self._rows.sharing.show(list(dict.fromkeys(owners)))
        sources = [addresses[frame] + (page - frame) * size for page, frame in zip(numbers, owners)]
        for run in self._pages.runs(targets):
            begin = run.begin
            for at in range(run.begin + 1, run.end + 1):
                if at == run.end or sources[at] != sources[at - 1] + size:
                    target = run.address + (begin - run.begin) * size
                    self._copy(target, sources[begin], (at - begin) * size)
                    begin = at
        self._rows.sharing.staged |= Fence.after(self._driver, [self._stream])

    # ------------------------------------------------------------------ in

    @contextmanager
    def found(self, key: Hashable, ids: Ids, cached: int) -> Iterator[Found]:
        """What is here of a sequence's beginning, if it is more than so many tokens. It can be loaded meanwhile, also
        where it has to make way."""
        match = self._tree.match(key, ids)
        if match.tokens <= cached:
            yield NOTHING
            return
        self._tree.unlock(self._tree.lock(match.node, match.tokens))  # it is used now
        places = [
            self._pages.places([*of, *([last] if last is not None else [])])
            for of, last in zip(match.pages, match.partial)
        ]
        for of in places:
            self._pages.hold(of)
        try:
            yield Found(match.tokens, places)
        finally:
            for of in places:
                self._pages.release(of)

    def load(self, row: int, found: Found, cached: int) -> int:
        """Copies tokens that were found to a live row, on the current stream, that has room for them.

        Args:
            cached: how many the row has already, the first ones.

        Returns:
            How many it has then.
        """
        if found.tokens <= cached:
            return cached
        try:
            self._copy_in(row, found, cached)
        except FAILURES:
            return cached
        return found.tokens

    def _copy_in(self, row: int, found: Found, cached: int) -> None:
        """Copies the tokens that were found, from one on.

        Raises:
            VmmkvError: a call failed; nothing is under way.
        """
        size, current, side = self._books.page_size, self._driver.current_stream(), self._stream
        before = Fence.after(self._driver, [current])  # fails in a graph capture, of which no copy can be a part
        if self._books.rules.cleans or self._rows.pool.tenants:
            before.order(side)  # it is being filled
        self._table.fences[row].order(side)  # who had the row may still use it
        with self._copying([place for of in found.places for place in of], current):
            for (arena, record), of in zip(self._books.ranges, found.places):
                base, begin, end = arena.table.address_of(row, 0), cached * record, found.tokens * record
                first = begin // size
                for run in self._pages.runs(of[first:]):
                    at = (first + run.begin) * size
                    low, high = max(at, begin), min((first + run.end) * size, end)
                    self._copy(base + low, run.address + low - at, high - low)

    # ------------------------------------------------------------------ copies

    @cached_property
    def _stream(self) -> Any:
        """The stream of copies."""
        return self._driver.new_stream()

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        self._driver.copy(target, source, nbytes, self._stream)

    @contextmanager
    def _copying(self, places: Sequence[Place], then: Any = None) -> Iterator[None]:
        """Around copies from these pages, or to them.

        Args:
            then: a stream whose work from now on comes after them.

        Raises:
            VmmkvError: a call failed, and none of the copies is under way any more.
        """
        self.is_copying = True
        self._pages.use(places, None)
        try:
            with self._rows.pool.nvtx.host_copies:
                yield
            fence = Fence.after(self._driver, [self._stream])
            if then is not None:
                fence.order(then)
        except VmmkvError:
            with suppress(VmmkvError):
                wait_for_device(self._driver)
                self._pages.use(places, Fence())
            self.is_copying = False
            raise
        self._pages.use(places, fence)
        self.is_copying = False

    # ------------------------------------------------------------------ the end

    def known_tenants(self) -> set[int]:
        """Numbers of tenants of whom there is something."""
        return {key.number for key in self._tree.roots if isinstance(key, Key)}

    def reset(self) -> None:
        """Forgets all. If copies were under way that no fence knows, somebody has waited for the device."""
        self._tree = self._new_tree()
        self._pages.clear(finished=self.is_copying)
        self.is_copying = False

    def check(self) -> None:
        """Checks the books; raises `InvariantError` where they are wrong."""
        self._tree.check()
        if len(self._pages) != self._tree.pages:
            raise InvariantError("a page of the host is known and not there, or there and not known")
        if self._left < 0:
            raise InvariantError(f"the host tier has {-self._left} bytes too many")


def _places(arena: Arena, numbers: list[int], begin: int) -> Iterator[tuple[int, int, int | None]]:
    """Where pages of a path lie, from `begin` on: runs of pages, and the row on which they are readable, at the places
    that they have in the path; None, where there is none. The last ones first."""
    table, wanted, end = arena.table, np.array(numbers, np.int32), len(numbers)
    while end > begin:
        first = page = end - 1
        row = table.row_with(page, numbers[page])
        if row is not None:
            first = max(begin, table.first[row])
            differs = np.flatnonzero(table.memory[row, first:end] != wanted[first:end])
            first += int(differs[-1]) + 1 if len(differs) else 0
        yield first, end, row
        end = first
