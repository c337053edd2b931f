"""Who has which page: what caches and sequences show of themselves in Jupyter.

A square is a page, and squares that are joined are one large frame. Its colour is the sequence that it belongs to, and
the filled part holds tokens. A stripe runs through pages that several sequences share; each has them in its own colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from .memory.frames import LARGE
from .rows.rows import (
    FREE_PAGE,
    KEPT_PAGE,
    LOOKAHEAD_PAGE,
    OTHERS_PAGE,
    SHARED_PAGE,
    SURPLUS_PAGE,
    VACANT_PAGE,
    ZERO_PAGE,
    Rows,
)
from .stats import CacheStats
from .svg import WIDTH, Drawing, colour, named, rectangle, stripe

CELL = 12
"""Pixels from one square to the next; a sequence's are three times as wide."""
COLUMNS = WIDTH // CELL
LABEL = 18
"""Columns that the name of a row takes."""
MAX_PAGES = 1024
"""Squares drawn of physical pages, or of a sequence; with more pages a square stands for several."""
MAX_ROWS = 16
"""Rows of a cache, or ranges of a sequence, that are drawn."""
MAX_NAMED = 8
"""Sequences that are named of those that share a page."""

STATES = {
    SHARED_PAGE: ("shared by several sequences, whose rows have a stripe there", 'fill="currentColor"'),
    KEPT_PAGE: ("kept for sequences that begin with what it holds", 'fill="#888"'),
    SURPLUS_PAGE: ("surplus: mapped, to be adopted or reclaimed", 'fill="#888" fill-opacity=".5"'),
    LOOKAHEAD_PAGE: ("lookahead: mapped for tokens to come", 'fill="#888" fill-opacity=".5" stroke="#888"'),
    FREE_PAGE: ("free", 'fill="none" stroke="#888"'),
    OTHERS_PAGE: ("another's, on the same pool", 'fill="#888" fill-opacity=".2" stroke="#888"'),
    ZERO_PAGE: ("zeros, behind every row", 'fill="none" stroke="#888" stroke-width="2"'),
    VACANT_PAGE: ("given back", 'fill="none" stroke="#888" stroke-dasharray="1 3"'),
}
"""What a page is that belongs to no sequence, or to several, and how it looks."""


class Page(NamedTuple):
    """A page to be drawn: its number; whose it is, or else its entry in the page map; the first page of its frame if
    that is a large one; the sequences that share it; and which part of it holds tokens."""

    number: int
    owner: int
    frame: int | None
    sharers: Sequence[int] = ()
    begin: float = 0.0
    end: float = 1.0

    def is_followed_by(self, other: Page) -> bool:
        """Whether another is part of the same large frame."""
        return self.frame is not None and self.frame == other.frame

    def __str__(self) -> str:
        frame = "" if self.frame is None else f", in the large frame {self.frame} to {self.frame + LARGE - 1}"
        what = f"sequence {self.owner}" if self.owner >= 0 else STATES[self.owner][0]
        if self.sharers:
            more = len(self.sharers) - MAX_NAMED
            what = f"shared by sequences {', '.join(map(str, self.sharers[:MAX_NAMED]))}"
            what += f" and {more:,} more" if more > 0 else ""
        return f"page {self.number}{frame}: {what}"


class PageMap:
    """All pages of a cache's pool, by number, as they are to be drawn."""

    def __init__(self, rows: Rows) -> None:
        self._rows, self._owners = rows, rows.page_map()
        is_large = rows.pool.frames.is_large[: len(self)] & (self._owners != VACANT_PAGE)
        numbers = np.arange(len(self))
        self._frames = np.where(is_large, numbers - numbers % LARGE, -1)
        self.large = int(is_large.sum()) // LARGE
        """How many large frames there are."""
        self._sharers = self._find_sharers()

    def _find_sharers(self) -> dict[int, list[int]]:
        """By shared page: the numbers of the sequences that share it."""
        table = self._rows.table
        sharers: dict[int, list[int]] = {page: [] for page in np.flatnonzero(self._owners == SHARED_PAGE).tolist()}
        for row in sorted(table.live, key=table.owner.__getitem__) if sharers else ():
            for _, used in self._rows.pages(row):
                for page in sharers.keys() & used:
                    sharers[page].append(table.owner[row])
        return sharers

    def __len__(self) -> int:
        return len(self._owners)

    def page(self, number: int, begin: float = 0.0, end: float = 1.0, viewer: int = SHARED_PAGE) -> Page:
        """A page by its number, of which a part holds tokens; of those who share it, seen by one."""
        frame, sharers = int(self._frames[number]), self._sharers.get(number, ())
        owner = viewer if viewer in sharers else int(self._owners[number])
        return Page(number, owner, None if frame < 0 else frame, sharers, begin, end)

    def counts(self) -> dict[int, int]:
        """How many pages there are by state, of those that do not belong to one sequence."""
        return {state: int((self._owners == state).sum()) for state in STATES}

    def by_range(self, row: int) -> list[list[Page]]:
        """A row's mapped pages in the order of addresses, for each range."""
        by_range, viewer = [], self._rows.table.owner[row]
        for arena, record in self._rows.ranges:
            table, size = arena.table, arena.page_size
            first, last = (tokens * record / size for tokens in self._rows.table.extents[row].tolist())
            by_range.append(
                [
                    self.page(page, min(max(first - index, 0), 1), min(max(last - index, 0), 1), viewer)
                    for index, page in enumerate(table.pages_in(row).tolist(), table.first[row])
                ]
            )
        return by_range


def draw_cache(rows: Rows, stats: CacheStats) -> str:
    """Rows with their pages in the order of addresses, then all physical pages by number."""
    pages = PageMap(rows)
    size = rows.pool.driver.page_size
    drawing = Drawing()
    drawing.text(
        f"KVCache on {rows.pool.driver.device}: {_count(stats.rows['live'], 'sequence')}, "
        f"{_count(stats.tokens, 'token')}",
        bold=True,
    )
    drawing.text(
        f"{_count(stats.pages['used'], 'page')} of {size >> 10:,} KiB in use, waste {stats.waste:.1%}; "
        f"{stats.physical_bytes / 2**20:,.0f} of {stats.budget_bytes / 2**20:,.0f} MiB taken"
    )
    empty = set(rows.table.empty)
    order = sorted(range(rows.table.num_rows), key=lambda row: rows.table.owner[row] < 0)  # live ones first
    lines = [(row, list(chain(*pages.by_range(row)))) for row in order if row not in empty]
    if lines:
        columns = COLUMNS - LABEL
        step = -(-max(len(mapped) for _, mapped in lines[:MAX_ROWS]) // columns) or 1
        drawing.text(f"Virtual rows, {len(lines):,} with a sequence or pages{_stands_for(step)}")
        for row, mapped in lines[:MAX_ROWS]:
            _squares(drawing, mapped[::step], columns, label=f"{row}: {_holder(rows, row)}")
        _say_what_is_left(drawing, len(lines), "row")
    step = -(-len(pages) // MAX_PAGES) or 1
    joined = f", {pages.large * LARGE:,} of them joined: {_count(pages.large, 'large frame')}" if pages.large else ""
    drawing.text(f"Physical pages, {len(pages):,} by number{joined}{_stands_for(step)}")
    _squares(drawing, [pages.page(number) for number in range(0, len(pages), step)], COLUMNS)
    _legend(drawing, pages.counts())
    return drawing.svg()


def draw_sequence(rows: Rows, row: int) -> str:
    """The row of a live sequence: the physical page behind each stretch of its tokens, under which is its number."""
    start, length = rows.table.start[row], rows.table.length[row]
    by_range = PageMap(rows).by_range(row)
    mapped = list(chain(*by_range))
    used = [page for page in mapped if page.owner == rows.table.owner[row]]
    waste = 1 - sum(page.end - page.begin for page in used) / len(used) if used else 0.0
    drawing = Drawing()
    drawing.text(
        f"Sequence {rows.table.owner[row]} in row {row}: {_count(length - start, 'token')} of {rows.max_seq_len:,}",
        bold=True,
    )
    drawing.text(
        f"{_count(len(used), 'page')} of {rows.pool.driver.page_size >> 10:,} KiB in use, waste {waste:.1%}; "
        f"{_count(len(mapped), 'page')} mapped, room for {_count(max(rows.table.capacity[row], 0), 'token')} "
        "without a driver call"
    )
    step = -(-len(mapped) // MAX_PAGES) or 1
    drawing.text(f"Pages in the order of addresses, below each its number{_stands_for(step)}")
    for index, ((arena, record), pages) in enumerate(zip(rows.ranges[:MAX_ROWS], by_range)):
        token = arena.table.first[row] * arena.page_size // record
        name = f"range {index}, token {token:,}" if len(rows.ranges) > 1 else f"token {token:,}"
        _squares(drawing, pages[::step], (COLUMNS - LABEL) // 3, label=name, wide=True)
    _say_what_is_left(drawing, len(rows.ranges), "range")
    states = [SHARED_PAGE if page.sharers else page.owner for page in mapped]
    _legend(drawing, {state: states.count(state) for state in STATES})
    return drawing.svg()


def _squares(drawing: Drawing, pages: Sequence[Page], columns: int, label: str = "", wide: bool = False) -> None:
    """Pages in lines of so many columns, behind a label; wide ones with their numbers below."""
    width, height = (CELL * 3, CELL * 2) if wide else (CELL, CELL)
    left = LABEL * CELL if label else 0
    drawing.put(f'<g class="{"row" if label else "physical"}">')
    drawing.write(0, drawing.y + CELL - 2, label)
    for index, page in enumerate(pages):
        line, column = divmod(index, columns)
        x, y = left + column * width, drawing.y + line * height
        is_joined = column + 1 < columns and index + 1 < len(pages) and page.is_followed_by(pages[index + 1])
        drawing.put(named(str(page), _square(page, x + 1, y + 1, width if is_joined else width - 2)))
        if wide:
            number = str(page.number)
            drawing.write(x + width // 2 - 1, y + height - 3, number, 'text-anchor="middle" font-size="9"')
    drawing.put("</g>")
    drawing.y += max(-(-len(pages) // columns), 1) * height + 2


def _square(page: Page, x: int, y: int, width: int) -> str:
    height = CELL - 2
    if page.owner < 0:
        return rectangle(x, y, width, height, STATES[page.owner][1])
    fill, part = colour(page.owner), page.end - page.begin
    outline = rectangle(x, y, width, height, f'fill="none" stroke="{fill}"') if part < 1 else ""
    filled = rectangle(x + width * page.begin, y, width * part, height, f'fill="{fill}"')
    return outline + filled + (stripe(x, y, width, height) if page.sharers else "")


def _legend(drawing: Drawing, counts: dict[int, int]) -> None:
    """How the pages look that do not belong to one sequence, and how many there are."""
    drawing.legend((STATES[state][1], f"{count:,} {STATES[state][0]}") for state, count in counts.items() if count)


def _holder(rows: Rows, row: int) -> str:
    if rows.table.owner[row] >= 0:
        return f"sequence {rows.table.owner[row]}, {_count(rows.table.length[row] - rows.table.start[row], 'token')}"
    if row in rows.table.kept:
        return "kept"
    return "parked" if row in rows.table.parked else "retired"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _stands_for(step: int) -> str:
    return f"; a square stands for {step:,} pages, and looks like the first of them" if step > 1 else ""


def _say_what_is_left(drawing: Drawing, count: int, what: str) -> None:
    if count > MAX_ROWS:
        drawing.text(f"and {_count(count - MAX_ROWS, f'more {what}')}")
