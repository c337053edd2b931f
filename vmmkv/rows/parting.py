"""Parting: what it takes for rows to have for their own what they share, worked out before any of them has.

    row    |f0|f1|p2|        is to be written to from its second page on: where another has f1, too, both are copied,
    part      |f1|p2|        and then their old places are given up; where nobody has, they stay what they are

Nothing here maps, unmaps or touches memory. The books are changed while it is worked out, and are as before then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..space.arena import Arena
from ..space.page_table import Run
from .books import Books
from .policy import Span


class Part(NamedTuple):
    """What a row has in a range from a page on.

    Attributes:
        arena: the range.
        run: its pages that tokens lie in, from the beginning of a frame on.
        first: the first page of the row that tokens lie in, before the part or in it.
        used: pages of the row that are used in this range.
        nbytes: how many bytes of the part hold tokens.
    """

    arena: Arena
    run: Run
    first: int
    used: Span
    nbytes: int

    @property
    def left(self) -> Span:
        """Pages of the part that are used."""
        return max(self.used[0], self.run.begin), self.used[1]


def parts(books: Books, row: int, pages: list[int]) -> Iterator[Part]:
    """What a row has from a page on, in each range, where others may have it, too."""
    length = books.table.length[row]
    for (arena, record), page, (first, end), used in zip(books.ranges, pages, books.touched(row), books.used(row)):
        table, page = arena.table, max(page, arena.table.first[row])
        if page < table.own[row]:
            page = table.frame_begin(row, page)
            run = Run(row, page, max(end, page) if first < end else page)
            yield Part(arena, run, first, used, max(length * record - page * books.page_size, 0))


def pages_needed(books: Books, parting: list[Part], claims: dict[int, Span], more: int) -> int:
    """Pages that are kept at most, beside those that are now: while rows get parts for their own, one after another, or
    then.

    Args:
        claims: tokens that rows are to hold then.
        more: pages that others are to be given then.
    """
    before = books.kept_pages
    with _left(books, parting) as others:
        at_once, staying = _at_once(books, parting, others), dict[tuple[int, Arena], Span]()
        for part, count in zip(parting, others):
            is_new = count or part.run.begin == part.run.end
            staying[part.run.row, part.arena] = part.used[0], part.run.begin if is_new else part.used[1]
        rows = {part.run.row for part in parting}
        if books.rules.zero_tail:  # who is empty gives back what lies behind its claim
            rows.update(row for row in claims if not books.table.length[row])
        try:
            books.claims = claims
            alone = sum(_pages(books, row, staying) for row in rows)
            books.claims = claims | dict.fromkeys(rows, (0, 0))
            return max(at_once, alone + books.kept_pages - before + more)
        finally:
            books.claims = {}


@contextmanager
def _left(books: Books, parting: list[Part]) -> Iterator[list[int]]:
    """Has rows leave their parts, one after another; yields how many pages of each have others still."""
    others = [part.arena.table.leave(part.run.row, *part.left) for part in parting]
    books.duplicates -= sum(others)
    try:
        yield others
    finally:
        books.duplicates += sum([part.arena.table.use(part.run.row, *part.left) for part in parting])


def _at_once(books: Books, parting: list[Part], others: list[int]) -> int:
    """Pages that are kept at most, beside those that are now, while parts are copied of which others have pages."""
    held, there, most = _held(books) if books.rules.zero_tail else Counter[int](), 0, 0
    for (arena, run, first, used, _), count in zip(parting, others):
        pages, freed = run.end - run.begin, 0
        if books.rules.zero_tail:  # all frames are of one page, and what lies behind a part goes with it
            lying = arena.table.pages_in(run.row, run.begin).tolist()
            are_alone = [held[page] == 1 for page in lying]
            is_copied = not all(are_alone[:pages])
            freed = sum(are_alone[0 if is_copied else pages :])
            held.subtract(lying)
        elif is_copied := count > 0:  # who has some, and does not use it, gives it up
            freed = used[1] - max(used[0], run.begin) - count + max(first - run.begin, 0)
        there += pages if is_copied else 0
        most, there = max(most, there), there - freed
    return most


def _held(books: Books) -> Counter[int]:
    """How many rows with tokens have each page, used or behind that: they give up neither, with zero tails."""
    return Counter(
        page
        for row in books.table.live
        if books.extent(row)[1]
        for table, (first, _) in zip(books.tables, books.used(row))
        for page in table.pages_in(row, first).tolist()
    )


def _pages(books: Books, row: int, staying: dict[tuple[int, Arena], Span]) -> int:
    """Pages of a row that are kept then.

    Args:
        staying: by row and range, where it has its own from some page on then, the pages whose frames stay what they
            are; behind these nothing lies but frames of one page.
    """
    count = 0
    for (arena, _), (first, end), used in zip(books.ranges, books.touched(row), books.used(row)):
        stays = staying.get((row, arena))
        if stays is None:
            first, end = used
            if books.rules.zero_tail and books.table.length[row]:
                end = max(end, arena.table.end[row])
        elif first < stays[1]:
            first, end = min(first, stays[0]), max(end, stays[1])
        count += end - first
    return count
