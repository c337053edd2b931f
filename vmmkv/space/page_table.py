"""The page table of an arena: which page of which frame lies on which page of which row, in arrays.

    row 0                         row 1                         row 2
    |p|p|p|.|.|.|.|.|.|.|.|.|.|.| |.|.|p|p|p|.|.|.|.|.|.|.|.|.| |p|p|0|0|0|0|0|0|0|0|0|0|0|0|
                                       ^ pages in front were given back     ^ one page of zeros

Invariants:
 1. The mapped pages of a row are consecutive: `[first, end)` in pages from the row's address, and `memory[row, page]`
    is the number of what lies there. Only `[first, ready)` may be accessed; `ready` is `end` except after a failure
    that could not be undone. A large frame is mapped whole: all three lie between frames.
 2. Pages `[first, own)` of a row may lie in others, too, and are read-only there but in one at most: who is to write to
    one has to have it for its own. All others lie here alone, and so do those before `own` that nobody shares any
    more. Behind `guest` all can be written here. Both lie between frames.
 3. One shared page of zeros is mapped read-only from page `zeros` to the row's end. It may be read from
    `zeros_ready` on, which is `zeros` except after a failure that could not be undone.
 4. The arrays say what the driver has mapped, except for `doubt`: ranges that are just being mapped or unmapped. Who
    is interrupted then (Ctrl-C) cannot know how far it came: `settle` unmaps them, and so makes the table right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..driver.driver import Driver
from ..errors import DriverError
from ..memory.accounts import Account
from ..memory.frames import LARGE, Frames
from ..stats import MappedRange
from .places import Places

OF_A_FRAME = np.arange(LARGE)
"""Pages of a large frame, from its first one."""


@dataclass(eq=False, slots=True)  # made for each change: a named tuple takes three times as long
class Run:
    """Pages `[begin, end)` of a row: its back, or its front."""

    row: int
    begin: int
    end: int
    is_front: bool = False


class PageTable:
    """The arrays; see above.

    Args:
        driver: the memory system.
        frames: what is mapped, and how often it was used.
        account: whose that is.
        address: of the range, which is cut into rows.
        num_rows: rows.
        limit: pages of a row.
        stride: pages from one row to the next.
    """

    def __init__(
        self,
        driver: Driver,
        frames: Frames,
        account: Account,
        address: int,
        num_rows: int,
        limit: int,
        stride: int,
    ) -> None:
        self.driver = driver
        self._frames = frames
        self.account = account
        """Whose its frames are."""
        self.page_size = driver.page_size
        self.address, self.num_rows, self.limit, self._stride = address, num_rows, limit, stride
        self.memory: npt.NDArray[np.int32] = np.zeros((num_rows, limit), np.int32)  # addresses only, until written
        """By row and page, where something is mapped: the number of the page of physical memory."""
        self._flat = self.memory.reshape(-1).data
        self._places: Places | None = None
        """Of frames, in rows: since somebody has asked for one."""
        columns = np.zeros((7, num_rows), np.int64)
        columns[4:6] = limit
        self.first, self.end, self.ready, self.own, self.zeros, self.zeros_ready, self.guest = (
            column.data for column in columns
        )
        self.firsts, self.ends, self.owns = columns[0], columns[1], columns[3]
        """`first`, `end` and `own`, for many rows at once."""
        self.doubt: list[Run] = []
        self.zero_frames: list[int] = []
        """The one of the zeros behind rows, where there are any."""
        self._left: dict[int, dict[tuple[int, int], int]] = {}
        """By row: pages that sequences have left, how often, and whose frames are still to be told."""

    def address_of(self, row: int, page: int) -> int:
        """Where a page lies."""
        return self.address + (row * self._stride + page) * self.page_size

    def range_of(self, run: Run) -> tuple[int, int]:
        """Address and bytes of pages."""
        return self.address_of(run.row, run.begin), (run.end - run.begin) * self.page_size

    def pages(self, row: int) -> int:
        """How many pages of a row are mapped."""
        return self.end[row] - self.first[row]

    def reaches(self, row: int, page: int) -> bool:
        """Whether what is mapped begins at a page, or before, and leads up to it."""
        return self.first[row] <= page <= self.end[row]

    def is_shared(self, row: int) -> bool:
        """Whether pages of a row may lie in others, too."""
        return self.own[row] > self.first[row]

    def lend(self, row: int, end: int) -> None:
        """Writes down that pages of a row up to `end` are about to be mapped there, read-only, which lie in others."""
        self._frames.expect_shares()
        self.own[row] = self.guest[row] = end

    def mark(self, row: int, end: int) -> None:
        """Writes down that pages of a row up to `end` may lie in others from now on."""
        self._frames.expect_shares()
        self.own[row] = end

    def have_alone(self, row: int) -> bool:
        """Writes down that no page of a row lies in others, if none does and all can be written; returns whether."""
        first, own = self.first[row], self.own[row]
        if own > first and (self.guest[row] > first or self._frames.shares[self.pages_in(row, first, own)].any()):
            return False
        self.own[row] = 0
        return True

    def has_hole(self, row: int) -> bool:
        """Whether there are pages from `first` to the row's end that may not be read."""
        return self.ready[row] < self.end[row] or self.end[row] < self.zeros_ready[row]

    def pages_in(self, row: int, begin: int = 0, end: int | None = None) -> npt.NDArray[np.int32]:
        """What lies on pages `[begin, end)` of a row, as far as there is anything."""
        begin, end = max(begin, self.first[row]), min(self.limit if end is None else end, self.end[row])
        return self.memory[row, begin : max(begin, end)]

    @property
    def places(self) -> Places:
        """In which rows each frame lies. Who asks first has all rows looked at, and nobody after that."""
        if self._places is None:
            places = Places()
            for row in np.flatnonzero(self.ends).tolist():
                places.add(row, self.frames_in(row, self.first[row], self.end[row]))
            self._places = places
        return self._places

    def rows_with(self, page: int, number: int) -> Iterator[int]:
        """The rows that have physical page `number` on their page `page`."""
        for row in self.places.rows(self._frames.frame_of(number)):
            if self.first[row] <= page < self.end[row] and self.memory[row, page] == number:
                yield row

    def row_with(self, page: int, number: int) -> int | None:
        """One of them, where it can be read; None: there is no such."""
        for row in self.rows_with(page, number):
            if self.ready[row] > page and not self.is_changing(row):
                return row
        return None

    def frame_begin(self, row: int, page: int) -> int:
        """Where the frame begins that reaches over the place before a page; the page, where one begins there."""
        return page - self._inside(row, page) if self._frames.has_large else page

    def is_changing(self, row: int) -> bool:
        """Whether something is just being mapped there, or unmapped."""
        return any(run.row == row for run in self.doubt)

    def frame_end(self, row: int, page: int) -> int:
        """Where it ends."""
        inside = self._inside(row, page)
        return page - inside + LARGE if inside else page

    def large_beyond(self, row: int, page: int) -> int:
        """Where the first large frame begins that reaches beyond a page; where the row's pages end, if none does."""
        if not self._frames.has_large or page >= self.end[row]:
            return self.end[row]
        begin = self.frame_begin(row, page)
        large = np.flatnonzero(self._frames.is_large[self.pages_in(row, begin)])
        return begin + int(large[0]) if len(large) else self.end[row]

    def _inside(self, row: int, page: int) -> int:
        """Pages of the frame on a page that lie in front of it."""
        if not self._frames.has_large or not self.first[row] < page < self.end[row]:
            return 0
        memory = self.memory[row, page]
        return int(memory) % LARGE if self._frames.is_large[memory] else 0

    def ragged_pages(self, rows: npt.NDArray[np.int64], pages: npt.NDArray[np.int64], before: bool) -> int:
        """How many pages large frames reach in all beyond a page of each of many rows, or before it."""
        if not self._frames.has_large:
            return 0
        known = np.minimum(pages, self.limit - 1)
        memory = self.memory[rows, known]
        ragged = (self._frames.is_large[memory]) & (known < self.ends[rows]) & (known > self.firsts[rows])
        inside = memory[ragged & (known == pages)] % LARGE
        return int((inside if before else -inside % LARGE).sum())

    def unclean(self, row: int, begin: int, end: int, tenant: int) -> list[tuple[int, int]]:
        """Addresses and bytes of pages `[begin, end)` that may hold bytes of another than `tenant`."""
        begin = max(begin, self.first[row])
        clean = self._frames.is_readable(self.pages_in(row, begin, end), tenant)
        edges = np.flatnonzero(np.diff(np.concatenate([[True], clean, [True]]))).reshape(-1, 2) + begin
        return [self.range_of(Run(row, first, last)) for first, last in edges.tolist()]

    def belong(self, row: int, begin: int, end: int, tenant: int) -> None:
        """Writes down that pages hold nothing but what `tenant` may read."""
        self._frames.tenants[self.pages_in(row, begin, end)] = tenant

    def mapped_pages(self) -> list[int]:
        """The pages of all frames on rows, and behind them."""
        rows = np.flatnonzero(self.ends).tolist()
        return self.zero_frames + [page for row in rows for page in self.pages_in(row).tolist()]

    def mapped_range(self, row: int, used: int, end: int, owner: int) -> MappedRange:
        """The pages of a row, of which an `owner` uses bytes `[used, end)`."""
        start, nbytes = self.range_of(Run(row, self.first[row], self.end[row]))
        return MappedRange(start, nbytes, self.address_of(row, 0) + used, end - used, row, owner)

    def count_use(self, row: int, begin: int, end: int) -> None:
        """Counts that a sequence has left pages. Their frames are told when they leave the row, or when somebody asks,
        so that this costs the same for many pages as for few."""
        left, span = self._left.setdefault(row, {}), (begin, end)
        left[span] = left.get(span, 0) + 1
        if len(left) == 100:
            self.tell_uses(row)

    def tell_uses(self, row: int | None = None) -> None:
        """Tells the frames of a row, or of all, how often they were used."""
        uses, one_by_one = self._frames.uses, self._frames.uses.data
        for each in [row] if row is not None else list(self._left):
            for (begin, end), times in self._left.pop(each, {}).items():
                pages = self.pages_in(each, begin, end)
                if len(pages) > LARGE:
                    uses[pages] += times  # each lies on a row once
                else:  # for few, numpy takes several times as long
                    for page in pages.tolist():
                        one_by_one[page] += times

    def frames_in(self, row: int, begin: int, end: int) -> list[int]:
        """The frames on pages `[begin, end)` of a row, which lie between frames."""
        return self._frames.of_pages(self.pages_in(row, begin, end))

    def use(self, row: int, begin: int, end: int) -> int:
        """Counts a sequence among the users of those of its pages that may be shared; returns how many had some."""
        return self._add_users(row, begin, end, 1)

    def leave(self, row: int, begin: int, end: int) -> int:
        """Counts it among them no more; returns how many pages have others still."""
        return self._add_users(row, begin, end, -1)

    def _add_users(self, row: int, begin: int, end: int, more: int) -> int:
        """Counts so many users more, or less, of pages that may be shared; returns how many pages have others."""
        pages, alone = self.pages_in(row, begin, min(end, self.own[row])), max(more, 0)
        if len(pages) > LARGE:
            pages = pages.astype(np.intp)  # which numpy would do each time
            counts = self._frames.users[pages] + more
            self._frames.users[pages] = counts
            return int(np.count_nonzero(counts > alone))
        users, shared = self._frames.users.data, 0
        for page in pages.tolist():  # for few, numpy takes several times as long
            users[page] += more
            shared += users[page] > alone
        return shared

    def put(self, run: Run, frames: list[int]) -> int:
        """Writes down that frames lie behind what a row has, all of a run or its first ones; returns their pages."""
        row, begin = run.row, run.begin
        if self.first[row] == self.end[row]:  # whoever had it may have left it meanwhile: see `begin_at`
            self.first[row] = self.ready[row] = begin
        pages: list[int] | npt.NDArray[np.int64] = frames
        if len(frames) < run.end - begin:
            is_large = self._frames.is_large.data
            are_large = len(frames) > 1 and all(map(is_large.__getitem__, frames))
            pages = np.add.outer(frames, OF_A_FRAME).ravel() if are_large else self._frames.in_pages(frames)
        if len(pages) > LARGE:
            self.memory[row, begin : begin + len(pages)] = pages
        else:  # for few, numpy takes several times as long
            for place, page in enumerate(pages, row * self.limit + begin):
                self._flat[place] = page
        self.end[row] = begin + len(pages)
        if self._places is not None:
            self._places.add(row, frames)
        return len(pages)

    def take_off(self, run: Run) -> list[int]:
        """Writes down that the front or the back of a row is mapped no more; returns its frames."""
        row, begin, end = run.row, run.begin, run.end
        if row in self._left:
            self.tell_uses(row)
        frames = self.frames_in(row, begin, end)
        if self._places is not None:
            self._places.remove(row, frames)
        if run.is_front:
            self.first[row] = max(end, self.first[row])
        else:
            self.end[row] = max(min(begin, self.end[row]), self.first[row])
            self.own[row] = min(self.own[row], self.end[row])
            self.guest[row] = min(self.guest[row], self.end[row])
        self.ready[row] = max(min(self.ready[row], self.end[row]), self.first[row])
        return frames

    def begin_at(self, row: int, page: int) -> None:
        """Makes a row without pages begin at a page."""
        self.first[row] = self.end[row] = self.ready[row] = page
        self.own[row] = self.guest[row] = 0

    def settle(self) -> None:
        """Makes the table right after an interruption.

        Raises:
            DriverError: the doubt remains.
        """
        while self.doubt:
            run = max(self.doubt, key=lambda run: run.end - run.begin)  # frames before what takes a part of their place
            if run.begin < run.end:  # what was mapped, and was to be made accessible, is not in doubt
                self.driver.unmap(*self.range_of(run))
            row = run.row
            if run.end > self.end[row] and not run.is_front:
                self.zeros[row] = max(self.zeros[row], run.end)
                self.zeros_ready[row] = max(self.zeros[row], self.zeros_ready[row])
            self.take_off(run)
            self.doubt.remove(run)
        np.minimum(self.owns, self.ends, out=self.owns)  # pages that were to be shared, and are not there
        self._places = None  # nobody knows how far it is right

    def unmap_all(self) -> list[int]:
        """Unmaps everything, in whatever state the driver is; returns the frames that are free now."""
        frames = []
        for run in self._everything():
            with suppress(DriverError):
                self.driver.unmap(*self.range_of(run))
                frames += self.take_off(run)
        are_gone = True
        for row in np.flatnonzero(np.asarray(self.zeros) < self.limit).tolist():
            try:
                self.driver.unmap(*self.range_of(Run(row, self.zeros[row], self.limit)))
                self.zeros[row] = self.limit
            except DriverError:
                are_gone = False
        self.doubt.clear()
        zero_frames = self.zero_frames if are_gone else []
        self.zero_frames = [] if are_gone else self.zero_frames
        return frames + zero_frames

    def _everything(self) -> Iterator[Run]:
        doubt = {run.row: (run.begin, run.end) for run in self.doubt}
        for row in dict.fromkeys([*np.flatnonzero(self.ends).tolist(), *doubt]):
            first, end = doubt.get(row, (self.first[row], self.end[row]))
            run = Run(row, min(first, self.first[row]), max(end, self.end[row]))
            if run.begin < run.end:
                yield run
