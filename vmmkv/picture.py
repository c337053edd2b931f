"""Who has which page, as SVG: what caches and sequences show of themselves in Jupyter.

A square is a page. Its colour is the sequence that it belongs to, and the filled part holds tokens.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from html import escape
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .rows.rows import FREE_PAGE, OTHERS_PAGE, SURPLUS_PAGE, VACANT_PAGE, ZERO_PAGE, Rows
from .stats import CacheStats

CELL = 12
"""Pixels from one square to the next; a sequence's are three times as wide."""
COLUMNS = 64
LABEL = 18
"""Columns that the name of a row takes."""
MAX_PAGES = 1024
"""Squares drawn of physical pages, or of a sequence; with more pages a square stands for several."""
MAX_ROWS = 16
"""Rows of a cache, or ranges of a sequence, that are drawn."""

STATES = {
    SURPLUS_PAGE: ("surplus: mapped, to be adopted or reclaimed", 'fill="#888" fill-opacity=".5"'),
    FREE_PAGE: ("free", 'fill="none" stroke="#888"'),
    OTHERS_PAGE: ("another's, on the same pool", 'fill="#888" fill-opacity=".2" stroke="#888"'),
    ZERO_PAGE: ("zeros, behind every row", 'fill="none" stroke="#888" stroke-width="2"'),
    VACANT_PAGE: ("given back", 'fill="none" stroke="#888" stroke-dasharray="1 3"'),
}
"""What a page is that belongs to no sequence, and how it looks."""


def colour(number: int) -> str:
    """The colour of a sequence by its number, `#rrggbb`: always the same, unlike its neighbours', seen on black and
    on white."""
    hue = number * 0.381966 % 1  # the golden angle: as far as can be from the numbers before
    red, green, blue = colorsys.hls_to_rgb(hue, (0.54, 0.4, 0.66)[number % 3], 0.75)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


class Page(NamedTuple):
    """A page to be drawn: its number, its entry in the page map, and which part of it holds tokens."""

    number: int
    owner: int
    begin: float = 0.0
    end: float = 1.0


def draw_cache(rows: Rows, stats: CacheStats) -> str:
    """Rows with their pages in the order of addresses, then all physical pages by number."""
    owners = rows.page_map()
    size = rows.pool.driver.page_size
    drawing = _Drawing()
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
    lines = [(row, list(chain(*_pages_by_range(rows, row, owners)))) for row in order if row not in empty]
    if lines:
        columns = COLUMNS - LABEL
        step = -(-max(len(pages) for _, pages in lines[:MAX_ROWS]) // columns) or 1
        drawing.text(f"Virtual rows, {len(lines):,} with a sequence or pages{_stands_for(step)}")
        for row, pages in lines[:MAX_ROWS]:
            drawing.squares(pages[::step], columns, label=f"{row}: {_holder(rows, row)}")
        _say_what_is_left(drawing, len(lines), "row")
    step = -(-len(owners) // MAX_PAGES) or 1
    drawing.text(f"Physical pages, {len(owners):,} by number{_stands_for(step)}")
    drawing.squares([Page(page, int(owners[page])) for page in range(0, len(owners), step)], COLUMNS)
    drawing.legend({state: int((owners == state).sum()) for state in STATES})
    return drawing.svg()


def draw_sequence(rows: Rows, row: int) -> str:
    """The row of a live sequence: the physical page behind each stretch of its tokens, under which is its number."""
    owners = rows.page_map()
    start, length = rows.table.start[row], rows.table.length[row]
    by_range = _pages_by_range(rows, row, owners)
    mapped = sum(map(len, by_range))
    used = [page for pages in by_range for page in pages if page.owner >= 0]
    waste = 1 - sum(page.end - page.begin for page in used) / len(used) if used else 0.0
    drawing = _Drawing()
    drawing.text(
        f"Sequence {rows.table.owner[row]} in row {row}: {_count(length - start, 'token')} of {rows.max_seq_len:,}",
        bold=True,
    )
    drawing.text(
        f"{_count(len(used), 'page')} of {rows.pool.driver.page_size >> 10:,} KiB in use, waste {waste:.1%}; "
        f"{_count(mapped, 'page')} mapped, room for {_count(rows.table.capacity[row], 'token')} without a driver call"
    )
    step = -(-mapped // MAX_PAGES) or 1
    drawing.text(f"Pages in the order of addresses, below each its number{_stands_for(step)}")
    for index, ((arena, record), pages) in enumerate(zip(rows.ranges[:MAX_ROWS], by_range)):
        token = arena.table.first[row] * arena.page_size // record
        name = f"range {index}, token {token:,}" if len(rows.ranges) > 1 else f"token {token:,}"
        drawing.squares(pages[::step], (COLUMNS - LABEL) // 3, label=name, wide=True)
    _say_what_is_left(drawing, len(rows.ranges), "range")
    drawing.legend({SURPLUS_PAGE: mapped - len(used)})
    return drawing.svg()


def _pages_by_range(rows: Rows, row: int, owners: npt.NDArray[np.int64]) -> list[list[Page]]:
    """A row's mapped pages in the order of addresses, for each range."""
    by_range = []
    for arena, record in rows.ranges:
        table, size = arena.table, arena.page_size
        first, last = rows.table.start[row] * record / size, rows.table.length[row] * record / size
        by_range.append(
            [
                Page(page, int(owners[page]), min(max(first - index, 0), 1), min(max(last - index, 0), 1))
                for index, page in enumerate(table.frames_in(row), table.first[row])
            ]
        )
    return by_range


def _holder(rows: Rows, row: int) -> str:
    if rows.table.owner[row] >= 0:
        return f"sequence {rows.table.owner[row]}, {_count(rows.table.length[row] - rows.table.start[row], 'token')}"
    return "parked" if row in rows.table.parked else "retired"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _stands_for(step: int) -> str:
    return f"; a square stands for {step:,} pages, and looks like the first of them" if step > 1 else ""


def _say_what_is_left(drawing: _Drawing, count: int, what: str) -> None:
    if count > MAX_ROWS:
        drawing.text(f"and {_count(count - MAX_ROWS, f'more {what}')}")


class _Drawing:
    """An SVG picture, from top to bottom."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._y = 0

    def text(self, text: str, bold: bool = False) -> None:
        """A line of text."""
        self._y += 20
        self._write(0, self._y - 5, text, 'font-weight="bold"' if bold else "")

    def squares(self, pages: Sequence[Page], columns: int, label: str = "", wide: bool = False) -> None:
        """Pages in lines of so many columns, behind a label; wide ones with their numbers below."""
        width, height = (CELL * 3, CELL * 2) if wide else (CELL, CELL)
        left = LABEL * CELL if label else 0
        self._parts.append(f'<g class="{"row" if label else "physical"}">')
        self._write(0, self._y + CELL - 2, label)
        for index, page in enumerate(pages):
            line, column = divmod(index, columns)
            x, y = left + column * width, self._y + line * height
            self._square(page, x, y, width - 2)
            if wide:
                self._write(x + width // 2 - 1, y + height - 3, str(page.number), 'text-anchor="middle" font-size="9"')
        self._parts.append("</g>")
        self._y += max(-(-len(pages) // columns), 1) * height + 2

    def legend(self, counts: dict[int, int]) -> None:
        """How the pages look that belong to no sequence, and how many there are."""
        x = 0
        self._y += 8
        for state, count in counts.items():
            if not count:
                continue
            text = f"{count:,} {STATES[state][0]}"
            self._parts.append(f"<rect {_box(x, self._y, CELL - 2)} {STATES[state][1]}/>")
            self._write(x + CELL + 2, self._y + CELL - 2, text)
            x += 7 * len(text) + 3 * CELL
        self._y += CELL + 4

    def svg(self) -> str:
        width = COLUMNS * CELL
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{self._y}" '
            f'viewBox="0 0 {width} {self._y}" style="max-width:100%;height:auto" font-family="sans-serif" '
            f'font-size="11">{"".join(self._parts)}</svg>'
        )

    def _square(self, page: Page, x: int, y: int, width: int) -> None:
        if page.owner < 0:
            what, looks = STATES[page.owner]
            shape = f"<rect {_box(x, y, width)} {looks}/>"
        else:
            what, fill = f"sequence {page.owner}", colour(page.owner)
            shape = f'<rect {_box(x, y, width)} fill="none" stroke="{fill}"/>' if page.end - page.begin < 1 else ""
            shape += f'<rect {_box(x + width * page.begin, y, width * (page.end - page.begin))} fill="{fill}"/>'
        self._parts.append(f"<g><title>page {page.number}: {what}</title>{shape}</g>")

    def _write(self, x: float, y: float, text: str, how: str = "") -> None:
        if text:
            self._parts.append(f'<text x="{x:g}" y="{y:g}" fill="currentColor" {how}>{escape(text)}</text>')


def _box(x: float, y: float, width: float) -> str:
    return f'x="{x + 1:.4g}" y="{y + 1:.6g}" width="{width:.3g}" height="{CELL - 2}"'
