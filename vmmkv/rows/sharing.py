"""Sharing: rows that begin with the same tokens lie on the same frames there.

    parent  |f0|f1|f2|p3|          f0 to f2 hold nothing but tokens that both have: the same frames, at the same pages,
    child   |f0|f1|f2|q3|          read-only in the child. What does not fill a frame is copied: q3 begins as p3 does.

What is shared is immutable, for it lies below the lengths of all who have it. A row that was truncated into it, and is
to grow, has it for its own first: alone where nobody else has it any more, otherwise as a copy.

A large frame is shared where it is full of tokens, and copied, as far as it holds some, where it is not: 32 MiB are
copied in the time of one driver call.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from ..errors import DriverError
from ..memory.calls import SET_ACCESS, SET_READ_ACCESS, VACANT
from ..memory.fence import Fence
from ..memory.pool import Account, FramePool
from ..space.arena import Arena
from ..space.change import Change
from ..space.page_table import Run
from .books import Books
from .growing import Growing
from .policy import Span
from .reclaiming import Reclaimer


class Sharing:
    """See above.

    Args:
        pool: where frames come from and go to.
        account: what the cache may have of it.
        books: what its rows hold.
        reclaimer: gives pages.
        growing: maps them.
    """

    def __init__(self, pool: FramePool, account: Account, books: Books, reclaimer: Reclaimer, growing: Growing) -> None:
        self._pool, self._account, self._books = pool, account, books
        self._reclaimer, self._growing = reclaimer, growing
        self._table, self._driver = books.table, pool.driver
        self.staging: Arena | None = None
        """Where a page is while it is copied to take another's place: of one row, made when it is needed."""

    # ------------------------------------------------------------------ having the same

    def fork(self, row: int, children: list[int], splits: list[Span] | None = None) -> None:
        """Gives rows without tokens all tokens of another. On them nothing is mapped, or what the other's first pages
        are, which stays.

        Args:
            splits: what to share; None: all that `splits` says.

        Raises:
            OutOfPagesError, DriverError, StreamCaptureError: see `Growing.make_room`; the children have no tokens then.
        """
        table, current = self._table, self._driver.current_stream()
        table.fence_after(self._driver, [row]).order(current)  # who copies, or reads, comes after who has written
        extent = table.start[row], table.length[row]
        splits = splits or self.splits(row)
        self._share(row, children, splits)
        try:
            self._growing.make_room(dict.fromkeys(children, extent), children)
            for child in children:
                for (arena, record), (_, split) in zip(self._books.ranges, splits):
                    begin = max(max(split, arena.table.own[child]) * self._books.page_size, extent[0] * record)
                    self.copy(arena, row, child, begin, extent[1] * record)
            table.fence(row, Fence.after(self._driver, [current]))
        except BaseException:
            for child in children:
                self._unshare(child)
            raise
        for child in children:
            table.extents[child] = extent
            self._books.retire_front(child)
            self._books.refresh(child)
        self._books.refresh(row)

    def splits(self, row: int) -> list[Span]:
        """Per arena the pages of a row that can be shared: from its first token on whole frames that are full."""
        size, (start, length) = self._books.page_size, self._table.extents[row].tolist()
        splits = []
        for arena, record in self._books.ranges:
            first = arena.table.frame_begin(row, start * record // size)
            splits.append((first, max(arena.table.frame_begin(row, length * record // size), first)))
        return splits

    def _share(self, row: int, children: list[int], splits: list[Span]) -> None:
        """Maps what can be shared.

        Raises:
            DriverError: a call failed. What was mapped before it is in the books.
        """
        books, change = self._books, Change(self._pool.calls, self._pool.frames)
        for (arena, _), (first, split) in zip(books.ranges, splits):
            if first < split:
                self._mark(arena, row, first, split)
                for child in children:
                    if not arena.table.pages(child):
                        arena.table.begin_at(child, first)
                    if (begin := arena.table.end[child]) < split:
                        if books.rules.zero_tail:
                            arena.make_way(child, split)
                        arena.table.own[child] = split
                        frames = arena.table.frames_in(row, begin, split)
                        self._pool.frames.share(frames)
                        change.place(arena.table, Run(child, begin, split), frames, split, kind=SET_READ_ACCESS)
        change.run()
        change.commit(self._pool)
        for (arena, _), (first, used_end) in zip(books.ranges, books.used(row)):
            for child in children:
                arena.table.own[child] = min(arena.table.own[child], arena.table.end[child])
                books.duplicates += arena.table.use(child, first, used_end)
        try:
            change.check()
        except DriverError:
            for child in children:
                self._unshare(child)
            raise

    def _mark(self, arena: Arena, row: int, first: int, split: int) -> None:
        """Writes down that pages of a live row, which uses those from `first` on, may lie in others from now on."""
        table = arena.table
        before = table.own[row]
        if split > before:
            table.own[row] = split
            self._books.duplicates += table.use(row, max(before, first), split)

    def copy(self, arena: Arena, row: int, child: int, begin: int, end: int) -> None:
        """Copies bytes `[begin, end)` of a row to another."""
        if begin < end:
            target, source = arena.table.address_of(child, 0), arena.table.address_of(row, 0)
            self._driver.copy(target + begin, source + begin, end - begin)

    def _unshare(self, child: int) -> None:
        """Takes back what a row was given that gets no tokens."""
        for arena, _ in self._books.ranges:
            table = arena.table
            self._books.duplicates -= table.leave(child, table.first[child], table.own[child])
            with suppress(DriverError):
                arena.unmap_back(child, 0)
        self._books.refresh(child)

    # ------------------------------------------------------------------ having it alone

    def make_own(self, rows: Iterable[int]) -> None:
        """Sees to it that rows may write behind their last tokens.

        Raises:
            OutOfPagesError, DriverError, StreamCaptureError: there is no page to copy to, or a call failed. All rows
                hold their tokens as before.
        """
        if not self._pool.frames.has_shared:
            return
        for row in rows:
            ends = [self._table.length[row] * record // self._books.page_size for record in self._books.records]
            places = zip(self._books.ranges, ends)
            self.make_own_from(row, [arena.table.frame_begin(row, page) for (arena, _), page in places])

    def make_own_from(self, row: int, pages: list[int]) -> None:
        """Sees to it that a row may write to all of its tokens from a page on, which lies between frames: per arena
        one. Raises what `make_own` raises."""
        for (arena, record), page, (first, used_end) in zip(self._books.ranges, pages, self._books.used(row)):
            if page < arena.table.own[row]:
                nbytes = self._table.length[row] * record - page * self._books.page_size
                self._make_own(arena, Run(row, page, max(used_end, page)), max(first, page), max(nbytes, 0))

    def _make_own(self, arena: Arena, part: Run, first: int, nbytes: int) -> None:
        """Has a row have what lies from a page on for its own: the part up to where it uses pages, which it does from
        page `first` on, and of which some bytes hold tokens. What it shares behind that is gone then."""
        table, row = arena.table, part.row
        if not self._pool.frames.shares[table.frames_in(row, part.begin, table.own[row])].any():
            run = Run(row, part.begin, table.own[row])
            self._pool.calls.run([SET_ACCESS, *table.range_of(run), VACANT]).check()
            self._books.duplicates -= table.leave(row, first, part.end)
            table.own[row] = part.begin
        else:
            fence = self._table.fences[row] | self._table.fence_after(self._driver, [row])
            copies = self._copies(arena, part, nbytes, fence) if part.begin < part.end else []
            fence.wait()
            self._replace(arena, part, first, copies)
        self._books.refresh(row)

    def _copies(self, arena: Arena, part: Run, nbytes: int, fence: Fence) -> list[int]:
        """New frames, mapped in the staging row, that begin with some bytes of a part. Waits for the copy."""
        staging = self._stage()
        pages = part.end - part.begin
        supply = self._reclaimer.supply(pages, 0)
        change = Change(self._pool.calls, self._pool.frames)
        change.map(staging.table, 0, pages, supply)
        change.run()
        change.commit(self._pool)
        try:
            change.check()
            current = self._driver.current_stream()
            fence.order(current)
            source = arena.table.address_of(part.row, part.begin)
            if self._books.rules.cleans:
                self._driver.fill(staging.address, pages * self._books.page_size, 0, current)
            if nbytes:
                self._driver.copy(staging.address, source, nbytes)
            self._driver.record(current).synchronize()
        except BaseException:
            with suppress(DriverError):
                staging.unmap_back(0, 0)
            raise
        staging.table.belong(0, 0, pages, self._table.tenant[part.row])
        return staging.table.frames_in(0, 0, pages)

    def _replace(self, arena: Arena, part: Run, first: int, copies: list[int]) -> None:
        """Puts frames, which may be mapped in the staging row, in the place of what a row has from a page on; it uses
        pages from `first` on."""
        table, frames, (row, page, used_end, _) = arena.table, self._pool.frames, part
        own, ready = max(table.own[row], used_end), table.ready[row]
        shared = table.frames_in(row, page, own)
        self._books.duplicates -= table.leave(row, first, used_end)
        frames.share([*shared, *copies])  # the one so that nothing is lost on the way, the others for the row
        change = Change(self._pool.calls, frames)
        if copies and self.staging:
            change.unmap(self.staging.table, Run(0, 0, len(copies)))
        change.unmap(table, Run(row, page, table.end[row]))
        if copies:
            change.place(table, Run(row, page, page + len(copies)), copies, page + len(copies))
        change.run()
        change.commit(self._pool)
        try:
            change.check()
        except DriverError:
            if table.frames_in(row, page, own) == shared:
                table.ready[row] = ready  # nothing has happened to it
            else:
                self._put_back(arena, part, shared, own)
            self._books.duplicates += table.use(row, first, used_end)
            self._books.refresh(row)
            if table.ready[row] < used_end:
                self.lose(row)
            raise
        finally:
            self._pool.give(self._account, shared)

    def _put_back(self, arena: Arena, part: Run, shared: list[int], own: int) -> None:
        """Has a row have again what it has given up, as far as that can be done."""
        table, row = arena.table, part.row
        with suppress(DriverError):
            arena.unmap_back(row, part.begin)
            self._pool.frames.share(shared)
            table.own[row] = own
            change = Change(self._pool.calls, self._pool.frames)
            change.place(table, Run(row, part.begin, own), shared, own, kind=SET_READ_ACCESS)
            change.run()
            change.commit(self._pool)
            table.own[row] = min(own, table.end[row])
            change.check()

    def lose(self, row: int) -> None:
        """Ends a sequence whose tokens could not be put back."""
        self._books.leave(row, self._books.leaving(row, 0, 0))
        self._books.vacate(row)

    def _stage(self) -> Arena:
        """The staging row, empty: with addresses for what any row may have."""
        self.clear()
        if self.staging is None:
            row_bytes = max(arena.row_bytes for arena, _ in self._books.ranges)
            self.staging = Arena(self._pool, self._account, 1, row_bytes)
        return self.staging

    def clear(self) -> None:
        """Gives back what a failure has left in the staging row."""
        if self.staging:
            self.staging.unmap_back(0, 0)
