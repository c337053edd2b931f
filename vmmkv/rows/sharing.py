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
from itertools import accumulate

from ..driver.fence import Fence, finished_on_error
from ..driver.table import SET_READ_ACCESS
from ..errors import DriverError, OutOfPagesError, VmmkvError
from ..memory.frames import LARGE, SEVERAL
from ..memory.monitor import at_once, is_own
from ..space.arena import Arena
from ..space.change import Change
from ..space.page_table import Run
from ..space.undo import Undo
from .books import Books
from .growing import Growing
from .keeping import Keeping
from .parting import Part, pages_needed, parts
from .policy import Span
from .reclaiming import Reclaimer

MAX_COPIES = 3
"""Pieces of large frames that a row may begin with as copies, in each range, where what is kept is of several rows."""


class Sharing:
    """See above.

    Args:
        books: what its rows hold.
        keeping: who is told of rows whose pages are others now.
        reclaimer: gives pages.
        growing: maps them.
    """

    def __init__(self, books: Books, keeping: Keeping, reclaimer: Reclaimer, growing: Growing) -> None:
        self._pool, self._account, self._books = books.pool, books.account, books
        self._keeping, self._reclaimer, self._growing = keeping, reclaimer, growing
        self._table, self._driver = books.table, books.pool.driver
        self.staging: Arena | None = None
        """Where frames are that are copied to, or from, and lie on no row then: of one row, made when it is needed."""
        self.staged = Fence()
        """Passes when all has been copied from there."""
        self._copied: tuple[Arena, Run] | None = None
        """Whose place what is there is to take."""

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
        spans = [(first, end) for (first, _), (_, end) in zip(splits, self._books.used(row))]
        with Undo() as undo:
            self._share(row, children, splits, spans, undo)
            at_once(self._growing.make_room(dict.fromkeys(children, extent), children))
            with finished_on_error(self._driver):
                has_copied = False
                for child in children:
                    for (arena, record), (_, split) in zip(self._books.ranges, splits):
                        begin = max(max(split, arena.table.own[child]) * self._books.page_size, extent[0] * record)
                        has_copied |= self.copy(arena, row, child, begin, extent[1] * record)
                    has_copied |= self.copy_scales(row, child)
                copied = Fence.after(self._driver, [current] if has_copied else [])
                table.fence(row, copied)
            copied.order(table.own_streams[row])  # what is written there next must not be copied
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

    def _share(self, row: int, children: list[int], splits: list[Span], spans: list[Span], undo: Undo) -> None:
        """Maps what can be shared of the pages that are to be used.

        Raises:
            DriverError: a call failed. What was mapped before it is in the books.
        """
        books, change = self._books, Change(self._pool)
        shared = [(arena, *span) for (arena, _), span in zip(books.ranges, splits) if span[0] < span[1]]
        for arena, _, split in shared if books.rules.zero_tail else ():  # all of this can fail, and plans nothing
            for child in children:
                arena.make_way(child, split)
        for arena, first, split in shared:
            table = arena.table
            self.mark(arena, row, first, split)
            for child in children:
                if not table.pages(child):
                    table.begin_at(child, first)
                if (begin := table.end[child]) < split:
                    table.lend(child, split)
                    frames = table.frames_in(row, begin, split)
                    self._pool.frames.share(frames)
                    change.place(table, Run(child, begin, split), frames, split, kind=SET_READ_ACCESS)
        self.run_shared(change, children, spans, undo)

    def run_shared(self, change: Change, rows: list[int], spans: list[Span], undo: Undo) -> None:
        """Runs a change that maps what rows share of the pages that they are to use in each range.

        Raises:
            DriverError: a call failed.
        """
        change.run()
        change.commit()
        for row in rows:
            for (arena, _), span in zip(self._books.ranges, spans):
                arena.table.own[row] = min(arena.table.own[row], arena.table.end[row])
                self._books.duplicates += arena.table.use(row, *span)
            undo.push(self._unshare, row, spans)
        change.check()

    def mark(self, arena: Arena, row: int, first: int, split: int) -> None:
        """Writes down that pages of a live row, which uses those from `first` on, may lie in others from now on."""
        table = arena.table
        before = table.own[row]
        if split > before:
            table.mark(row, split)
            self._books.duplicates += table.use(row, max(before, first), split)

    def copy(self, arena: Arena, row: int, child: int, begin: int, end: int) -> bool:
        """Copies bytes `[begin, end)` of a row to another; returns whether there are any."""
        if begin < end:
            target, source = arena.table.address_of(child, 0), arena.table.address_of(row, 0)
            self._driver.copy(target + begin, source + begin, end - begin)
        return begin < end

    def copy_scales(self, row: int, child: int) -> bool:
        """Gives a row the scales of another; returns whether rows have any."""
        if self._books.scales:
            self._books.scales.copy(row, child)
        return self._books.scales is not None

    def _unshare(self, child: int, spans: list[Span]) -> None:
        """Writes down that a row gets no tokens, which was to use pages in each range. They stay until what may be
        queued there is done."""
        for (arena, _), span in zip(self._books.ranges, spans):
            self._books.duplicates -= arena.table.leave(child, *span)
        self._books.refresh(child)

    # ------------------------------------------------------------------ having it alone

    def make_own(self, rows: Iterable[int], claims: dict[int, Span]) -> None:
        """Sees to it that rows may write behind their last tokens.

        Args:
            claims: what rows are to hold then, as in `Growing.make_room`.

        Raises:
            OutOfPagesError, DriverError, StreamCaptureError: see `check_parts` and `make_own_from`.
        """
        if not self._pool.frames.has_shared:
            return
        wanted = {}
        for row in rows:
            length, size = self._table.length[row], self._books.page_size
            pages = [length * record // size for record in self._books.records]
            if any(page < table.own[row] for table, page in zip(self._books.tables, pages)):
                wanted[row] = pages
        if wanted:
            self.check_parts(wanted, claims)
            with Undo() as undo:
                for row, pages in wanted.items():
                    self.make_own_from(row, pages, undo)

    def check_parts(self, wanted: dict[int, list[int]], claims: dict[int, Span], more: int = 0) -> set[int]:
        """Checks, before anything is copied, that the budget allows what rows want for their own; returns those that
        share some of it. What nobody uses is taken for what gives way.

        Args:
            wanted: by row the page in each range from which on it is to have its own, as for `make_own_from`.
            claims: what rows are to hold then.
            more: pages that are needed beside that.

        Raises:
            OutOfPagesError: it does not. Nothing has changed.
        """
        parting = [part for row, pages in wanted.items() for part in parts(self._books, row, pages)]
        if parting:
            self._reclaimer.check_coming(pages_needed(self._books, parting, claims, more))
        return {part.run.row for part in parting}

    def make_own_from(self, row: int, pages: list[int], undo: Undo) -> None:
        """Sees to it that a row may write from a page on, in each range; to grow puts the zeros back that were behind
        it, and so does `undo`.

        Raises:
            OutOfPagesError, DriverError, StreamCaptureError: there is no page to copy to, for reasons that
                `check_parts` does not know, or a call failed. All rows hold their tokens as before, some perhaps on
                pages of their own.
        """
        undo.push(self._growing.look_again, [row])
        for part in parts(self._books, row, pages):
            try:
                self._make_own(part)
            except OutOfPagesError:
                if self._is_elsewhere(part.arena, part.run):
                    raise
                self._make_own(part)  # those who had it, too, have given it up to make room

    def _make_own(self, part: Part) -> None:
        """Has a row have a part for its own. What it shares behind that is gone then."""
        arena, run, left, nbytes = part.arena, part.run, part.left, part.nbytes
        books, table, row = self._books, arena.table, run.row
        books.duplicates -= table.leave(row, *left)  # what is to be had for it is no less for what it leaves
        try:
            fence = self._table.fences[row] | self._table.fence_after(self._driver, [row])
            if self._is_elsewhere(arena, run):
                self._copy_out(arena, run, nbytes, fence)
            else:
                run = self._lift(arena, run)
            fence.wait()
            self._table.fences[row].wait()  # for who has begun to read there since: copies to the host of what gave way
            self._replace(arena, run)
            self.clear()
        except VmmkvError as error:
            books.duplicates += table.use(row, *left)
            if is_own(error) and table.ready[row] < run.end:
                error.add_note(f"Sequence {self._table.owner[row]} has ended: the driver did not map its tokens again")
                self.lose(row)
            raise
        finally:
            books.retire_front(row)
            books.refresh(row)
            # Now: what it has left can give way to what other ranges, and other rows, need.
            self._keeping.keeper.inherit({row: row})

    def _frames_of(self, arena: Arena, part: Run) -> list[int]:
        """The frames that a part begins with, and lies on."""
        return arena.table.frames_in(part.row, part.begin, arena.table.frame_end(part.row, part.end))

    def _is_elsewhere(self, arena: Arena, part: Run) -> bool:
        """Whether any of what a part lies on is in others, too."""
        return bool(self._pool.frames.shares[self._frames_of(arena, part)].any())

    def _lift(self, arena: Arena, part: Run) -> Run:
        """Maps what a row alone has in the staging row, too: a part, with what else is on its frames, which it returns.

        To make it writable where it is would be a call less, but what becomes so while it is mapped cannot be mapped
        in another place again: `cuMemMap` fails with CUDA_ERROR_UNKNOWN (driver 580, where threads take turns).
        """
        frames = self._frames_of(arena, part)
        self.clear()
        self.show(frames)
        return Run(part.row, part.begin, part.begin + len(self._pool.frames.in_pages(frames)))

    def _copy_out(self, arena: Arena, part: Run, nbytes: int, fence: Fence) -> None:
        """Maps new frames in the staging row, which begin with some bytes of a part. Waits for the copy."""
        pages = part.end - part.begin
        self.clear()
        self._reclaimer.afford(pages)
        supply = self._reclaimer.supply(pages, 0)
        with Undo() as undo:
            undo.push(self._pool.give, self._account, supply.large + supply.single)
            self.clear()  # what had to be evicted for it may have been copied from there
            staging = self._stage(pages)
        change = Change(self._pool)
        change.map(staging.table, 0, pages, supply)
        change.make()
        current = self._driver.current_stream()
        fence.order(current)
        staging.table.belong(0, 0, pages, SEVERAL)  # until all is there: a call may fail
        with finished_on_error(self._driver):
            if self._books.rules.cleans or self._pool.tenants:
                self._driver.fill(staging.address, pages * self._books.page_size, 0, current)
            if nbytes:
                self._driver.copy(staging.address, arena.table.address_of(part.row, part.begin), nbytes)
            Fence.after(self._driver, [current]).wait()
        staging.table.belong(0, 0, pages, self._table.tenant[part.row])

    def _replace(self, arena: Arena, part: Run) -> None:
        """Puts what is in the staging row in the place of all that a row has from a part's begin on."""
        table, row, page = arena.table, part.row, part.begin
        ready, before = table.ready[row], table.pages_in(row, page).tolist()
        self._copied = arena, part
        try:
            self._put(arena, part)
        except DriverError:
            is_as_before = table.pages_in(row, page).tolist() == before
            if is_as_before and table.own[row] > page:  # not unmapped, and the same ones mapped anew
                table.ready[row] = ready
            with suppress(DriverError):
                self.restore()
            raise

    def restore(self) -> None:
        """Puts copies where they belong if, after a failure or an interruption, neither they nor what they are copies
        of are there."""
        if self._copied:
            arena, part = self._copied
            if arena.table.ready[part.row] < part.end:
                self._put(arena, part)

    def _put(self, arena: Arena, part: Run) -> None:
        table, change = arena.table, Change(self._pool)
        arena.plan_back(change, part.row, part.begin)
        if part.begin < part.end and self.staging:
            copies = self.staging.table.frames_in(0, 0, part.end - part.begin)
            self._pool.frames.share(copies)  # until the staging row is cleared
            change.place(table, part, copies, part.end)
        change.make()

    def lose(self, row: int) -> None:
        """Ends a sequence whose tokens could not be put back."""
        self._books.leave(row, self._books.leaving(row, 0, 0))
        self._books.vacate(row)
        self._keeping.keeper.forget(row)

    def _stage(self, pages: int) -> Arena:
        """The staging row, with room for so many pages behind what is there: as long as all that may have to be there
        at once. It is waited for only where there is no more room, since who begins a sequence must not wait for the
        copies of the one before."""
        if self.staging is None:
            size, overread = self._books.page_size, self._books.rules.overread * max(self._books.records)
            most = (MAX_COPIES + 2) * LARGE * len(self._books.ranges) + 2 + overread // size
            row_bytes = max(arena.row_bytes for arena, _ in self._books.ranges)  # what a row has for its own
            self.staging = Arena(self._pool, self._account, 1, max(most * size, row_bytes))
        table = self.staging.table
        if table.end[0] + pages > table.limit or table.ready[0] < table.end[0]:
            self.clear()
        return self.staging

    def show(self, frames: list[int]) -> dict[int, int]:
        """Maps frames in the staging row, read-only, but for those that are there already; returns by frame the
        address. Who copies from there adds to `staged` when that is done.

        Raises:
            DriverError: a call failed.
        """
        if not frames:
            return {}
        shown = self._shown()
        if all(frame in shown for frame in frames):
            return shown
        staging = self._stage(len(self._pool.frames.in_pages(frames)))
        shown = self._shown()  # less, where there was no room
        new, change = [frame for frame in frames if frame not in shown], Change(self._pool)
        begin = staging.table.end[0]
        end = begin + len(self._pool.frames.in_pages(new))
        self._pool.frames.share(new)
        change.place(staging.table, Run(0, begin, end), new, end, kind=SET_READ_ACCESS)
        change.make()
        return self._shown()

    def _shown(self) -> dict[int, int]:
        """By frame in the staging row, which can be read there, the address."""
        if not self.staging:
            return {}
        table = self.staging.table
        frames = table.frames_in(0, 0, table.ready[0])
        pages = accumulate([LARGE if self._pool.frames.is_large[frame] else 1 for frame in frames], initial=0)
        return {frame: self.staging.address + page * self._books.page_size for frame, page in zip(frames, pages)}

    @property
    def may_be_staged(self) -> bool:
        """Whether there may be anything to `clear`."""
        return self.staging is not None or self._copied is not None

    def clear(self, wait: bool = True) -> None:
        """Gives back what is in the staging row; if it is not to wait, only where nobody copies from there any more."""
        if self.staging and self.staging.table.end[0]:
            if wait:
                self.staged.wait()
            if not self.staged.passed():
                return
            self.staging.unmap_back(0, 0)
        self._copied = None
