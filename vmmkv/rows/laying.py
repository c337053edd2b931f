"""Laying: a new row begins with pages that are kept, of whatever rows they were.

    kept     |a0 a1 a2 ... a15|b0 b1|c2 c3 ... c15|d0 d1          numbers of pages, in the order of tokens
    new row  |a0 ......... a15|b0 b1|c2'... c15'  |d0 d1'         whole frames are mapped, pieces of frames are copied

A large frame can only be mapped whole, at the place that it had. Where the last of its pages is wanted all of them are:
whoever wrote it wrote the same tokens there.

Beside what is mapped, pieces are copied to single pages, and known there from then on: who begins so next has these
mapped. So a prefix that ends within a large frame takes its memory once, and not again in each row.

Copies are made from a row that has the page at the same place, for which nothing is mapped; what lies on no row is
mapped in the staging row first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..driver.fence import Fence, finished_on_error
from ..driver.table import SET_READ_ACCESS
from ..memory.frames import LARGE, SEVERAL, Frames
from ..memory.monitor import at_once
from ..space.change import Change
from ..space.page_table import Run
from ..space.undo import Undo
from .books import Books
from .growing import Growing
from .reclaiming import Reclaimer
from .sharing import MAX_COPIES, Sharing


@dataclass
class Piece:
    """Pages of a row that follow each other: on `frames` that are mapped there, or, where there are none, copied from
    page `page` and those behind it in the same frame."""

    pages: int
    frames: list[int] = field(default_factory=list)
    page: int = -1


Copy = tuple[int, int, Piece]
"""What is copied: in which range, to which page of a row on, and what."""


def copied_pieces(numbers: list[int], frames: Frames) -> list[Piece]:
    """Pages, by number, as pieces that are all copied."""
    found: list[Piece] = []
    for page in numbers:
        if found and frames.is_large[page] and page % LARGE and page == found[-1].page + found[-1].pages:
            found[-1].pages += 1
        else:
            found.append(Piece(1, page=page))
    return found


def pieces(numbers: list[int], frames: Frames, are_few: bool = False) -> list[Piece]:
    """The pieces that pages, by number, are to be laid in: of all of them, or of the first ones, where more would have
    to be copied than is worth it. Few are all copied, if they are in as few pieces."""
    if are_few and len(all_copied := copied_pieces(numbers, frames)) <= MAX_COPIES:
        return all_copied
    if not frames.has_large:
        return [Piece(len(numbers), numbers)] if numbers else []
    found: list[Piece] = []
    shared = Piece(0)
    at = copies = 0
    is_large, end = frames.is_large.data, len(numbers)
    while at < end:
        page = numbers[at]
        last = numbers[at + LARGE - 1] if at + LARGE <= end else 0
        if is_large[last] and last % LARGE == LARGE - 1:
            page, count = last - LARGE + 1, LARGE
        elif not is_large[page]:
            count = 1
        elif copies < MAX_COPIES:
            count = 1
            while (page + count) % LARGE and numbers[at + count : at + count + 1] == [page + count]:
                count += 1
            found.append(Piece(count, page=page))
            shared = Piece(0)
            copies, at = copies + 1, at + count
            continue
        else:
            break
        if not shared.frames:
            found.append(shared)
        shared.pages += count
        shared.frames.append(page)
        at += count
    return found


def copies_of(laid: Sequence[list[Piece]], partial: Sequence[int | None]) -> Iterator[Copy]:
    """What is copied of pieces, and of the pages behind them that are not full."""
    for index, (of, last) in enumerate(zip(laid, partial)):
        at = 0
        for piece in [*of, Piece(1, page=last)] if last is not None else of:
            if not piece.frames:
                yield index, at, piece
            at += piece.pages


class Laying:
    """See above.

    Args:
        books: what its rows hold.
        reclaimer: gives pages.
        growing: maps them.
        sharing: what has several rows lie on the same.
    """

    def __init__(self, books: Books, reclaimer: Reclaimer, growing: Growing, sharing: Sharing) -> None:
        self._pool, self._account, self._books = books.pool, books.account, books
        self._reclaimer, self._growing, self._sharing = reclaimer, growing, sharing

    def is_at_hand(self, laid: Sequence[list[Piece]], partial: Sequence[int | None]) -> bool:
        """Whether a row that has pages of its own can begin so without a call that maps: all of it is copied, from
        rows."""
        if any(piece.frames for of in laid for piece in of):
            return False
        return all(self._source(copy) is not None for copy in copies_of(laid, partial))

    def lay(
        self, row: int, tokens: int, length: int, laid: Sequence[list[Piece]], partial: Sequence[int | None]
    ) -> tuple[Fence, list[Copy]]:
        """Gives a row its first tokens, from pages that are kept, and room for all of its tokens. It has no pages, or
        nothing is to be laid there but copies. Returns what passes when all is copied, and what is to be known by its
        copy from then on.

        Args:
            tokens: so many are there.
            length: so many there is to be room for.
            laid: by range the pieces of whole pages that they lie in.
            partial: by range the number of the page that holds the rest of them; None where there is no rest.

        Raises:
            OutOfPagesError, DriverError, StreamCaptureError: see `Growing.make_room`; the row has no tokens then.
        """
        frames = self._pool.frames
        copies = list(copies_of(laid, partial))
        sources = list(dict.fromkeys(frames.frame_of(piece.page) for *_, piece in copies))
        frames.share(sources)  # until they are copied: what holds a partial page is nobody's, and might go to this row
        try:
            with Undo() as undo:
                self._map(row, length, laid, undo)
                self._afford(row, length, undo)
                self._make_room(row, length)
                copied, nowhere = self._copy(row, tokens, copies)
        finally:
            self._pool.give(self._account, sources)
        for arena, _ in self._books.ranges:
            arena.table.belong(row, 0, arena.table.end[row], self._books.table.tenant[row])
        self._books.table.length[row] = length
        self._books.refresh(row)
        return copied, [copy for copy in copies if self._is_better(row, copy, laid[copy[0]], copy in nowhere)]

    def _is_better(self, row: int, copy: Copy, laid: list[Piece], was_nowhere: bool) -> bool:
        """Whether what a row has copied is better known by its copy.

        What lies on no row takes memory, and would have to be mapped for each copy. A piece of a large frame would be
        copied for each row, where single pages are shared. But where all is copied, and lies on single pages then, the
        large frame stays known: it is copied in fewer pieces than these would be.
        """
        index, at, piece = copy
        is_large, (arena, _) = self._pool.frames.is_large, self._books.ranges[index]
        if not is_large[piece.page]:
            return was_nowhere
        if any(each.frames for each in laid):
            return True
        return was_nowhere and bool(is_large[arena.table.pages_in(row, at, at + piece.pages)].all())

    def _source(self, copy: Copy) -> int | None:
        """The row that it can be copied from, if there is one."""
        index, at, piece = copy
        arena, _ = self._books.ranges[index]
        return arena.table.row_with(at, piece.page)

    def _map(self, row: int, length: int, laid: Sequence[list[Piece]], undo: Undo) -> None:
        """Maps the pieces, and single pages for the copies among them, in ranges where any are shared, of a row that is
        to have so many tokens.

        Raises:
            OutOfPagesError, DriverError: that could not be done; the row has no pages that anybody uses then.
        """
        pool = self._pool
        kept = [of if any(piece.frames for piece in of) else [] for of in laid]  # the others lie on what grows there
        if not any(kept):
            return
        new = sum(piece.pages for of in kept for piece in of if not piece.frames)
        shared = [frame for of in kept for piece in of for frame in piece.frames]
        pool.frames.share(shared)  # before there is room for the copies: what is known of them may become others
        with Undo() as without_room:
            without_room.push(pool.give, self._account, shared)
            if new:
                self._check_allowed(length, shared)
            supply = self._reclaimer.supply(new, 0) if new else None
        change, splits = Change(pool), []
        for (arena, _), of in zip(self._books.ranges, kept):
            end = 0
            arena.table.begin_at(row, 0)
            arena.table.lend(row, sum(piece.pages for piece in of))
            for piece in of:
                run = Run(row, end, end + piece.pages)
                end = run.end
                if piece.frames:
                    change.place(arena.table, run, piece.frames, end, kind=SET_READ_ACCESS, since=run.begin)
                elif supply:
                    change.place(arena.table, run, supply.pop(piece.pages, 0), end, since=run.begin)
            splits.append(end)
        self._sharing.run_shared(change, [row], [(0, split) for split in splits], undo)

    def _check_allowed(self, length: int, shared: list[int]) -> None:
        """Raises `OutOfPagesError`, before anything gives way to copies, where a row cannot have so many tokens, of
        which some lie on these frames."""
        frames = self._pool.frames
        used = int(np.count_nonzero(frames.users[frames.in_pages(shared)]))
        self._reclaimer.check_coming(sum(end for _, end in self._books.spans(0, length)) - used)

    def _afford(self, row: int, length: int, undo: Undo) -> None:
        """Sees to it that a row may have so many tokens beside what others are guaranteed, also where no page is
        missing: what is laid there was only lent.

        Raises:
            OutOfPagesError: it may not.
        """
        if not self._pool.accounts.has_guarantees:
            return
        self._books.claims = {row: (0, length)}
        undo.push(self._books.claims.clear)
        self._reclaimer.afford(sum(end for _, end in self._books.used(row)))

    def _make_room(self, row: int, length: int) -> None:
        """Maps what a row lacks that is to have so many tokens. Raises what `Growing.make_room` raises."""
        room = self._room(row, length)
        at_once(self._growing.make_room({row: (0, room)}, [row]))
        if room > length:
            self._growing.fence_fills([row])

    def _room(self, row: int, length: int) -> int:
        """Up to which token a row that is to have so many is mapped: the end of a large frame, where more are expected,
        and as much is idle. That takes a call, and single pages would take one each."""
        books, expected = self._books, self._books.table.expected[row]
        if not books.rules.large or expected <= length:
            return length
        ends = [arena.table.end[row] for arena, _ in books.ranges]
        needed = [max(last - end, 0) for end, (_, last) in zip(ends, books.spans(0, length))]
        wanted = [end - (-pages // LARGE) * LARGE for end, pages in zip(ends, needed)]
        tokens = min(end * books.page_size // record for end, record in zip(wanted, books.records))
        tokens -= books.rules.overread
        new = sum(wanted) - sum(ends)
        accounts = self._pool.accounts
        if not length < tokens <= expected or new > accounts.idle(self._account):
            return length
        return length if accounts.has_guarantees and new > accounts.headroom(self._account) else tokens

    def _copy(self, row: int, tokens: int, copies: list[Copy]) -> tuple[Fence, list[Copy]]:
        """Copies what is not shared, up to so many tokens. Returns what passes when that is done, and what lay on no
        row."""
        size, driver, frames = self._books.page_size, self._pool.driver, self._pool.frames
        if not copies:
            return Fence(), []
        rows = list(map(self._source, copies))
        nowhere = [copy for copy, source in zip(copies, rows) if source is None]
        shown = self._sharing.show(list(dict.fromkeys(frames.frame_of(piece.page) for *_, piece in nowhere)))
        runs: list[tuple[int, int, int, int]] = []  # range, page, pages, and from which address on
        for (index, at, piece), source in zip(copies, rows):
            table, frame = self._books.tables[index], frames.frame_of(piece.page)
            begin = shown[frame] + (piece.page - frame) * size if source is None else table.address_of(source, at)
            last, first, pages, address = runs[-1] if runs else (-1, 0, 0, 0)
            if (index, at, begin) == (last, first + pages, address + pages * size):  # one call for both
                runs[-1] = index, first, pages + piece.pages, address
            else:
                runs.append((index, at, piece.pages, begin))
        with finished_on_error(driver):
            for index, at, pages, begin in runs:
                arena, record = self._books.ranges[index]
                arena.table.belong(row, at, at + pages, SEVERAL)  # until all is there: a copy may fail
                driver.copy(arena.table.address_of(row, at), begin, min(pages * size, tokens * record - at * size))
            copied = Fence.after(driver, [driver.current_stream()])
            if nowhere:
                self._sharing.staged |= copied
            for source in {each for each in rows if each is not None}:
                self._books.table.fence(source, copied)
        return copied, nowhere
