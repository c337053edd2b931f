"""Pictures of the pages of caches and sequences, for Jupyter, as SVG that is seen on black and on white.

A square is a page. The colour of a square is its sequence, and the filled part holds tokens. A stripe runs through
pages that several sequences share; each row shows them in the colour of its own sequence.
"""

from __future__ import annotations

import colorsys
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from . import snapshot, stats
from .core.tables import RETIRED

if TYPE_CHECKING:
    from .cache import KVCache

WIDTH = 768
"""Pixels from left to right."""
CELL = 12
"""Pixels from one square to the next."""
SIZE = CELL - 2
"""Pixels of a square."""
LABEL = 18
"""Columns that the name of a row takes."""
MAX_PAGES = 1024
"""Squares drawn of physical pages; with more pages a square stands for several, as in rows that are too long."""
MAX_ROWS = 16
"""Rows that are drawn."""

STATES = {
    stats.SHARED_PAGE: ("shared by several sequences, whose rows have a stripe there", 'fill="currentColor"'),
    stats.KEPT_PAGE: ("kept for sequences that begin with what it holds", 'fill="#888"'),
    stats.SURPLUS_PAGE: ("surplus: mapped, to be adopted or reclaimed", 'fill="#888" fill-opacity=".5"'),
    stats.LOOKAHEAD_PAGE: ("lookahead: mapped for tokens to come", 'fill="#888" fill-opacity=".5" stroke="#888"'),
    stats.FREE_PAGE: ("free", 'fill="none" stroke="#888"'),
    stats.OTHERS_PAGE: ("another's, on the same pool", 'fill="#888" fill-opacity=".2" stroke="#888"'),
    stats.VACANT_PAGE: ("given back", 'fill="none" stroke="#888" stroke-dasharray="1 3"'),
}
"""Names and looks of pages that belong to no sequence, or to several."""


def colour(number: int) -> str:
    """The colour of a sequence by its number, `#rrggbb`: always the same, unlike its neighbours', seen on black and on
    white."""
    hue = number * 0.381966 % 1  # the golden angle: as far as can be from the numbers before
    red, green, blue = colorsys.hls_to_rgb(hue, (0.54, 0.4, 0.66)[number % 3], 0.75)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


class Drawing:
    """A drawing that grows downwards, below a title and a line; `y` is where it ends so far."""

    def __init__(self, title: str, line: str) -> None:
        self.parts: list[str] = []
        self.y = 0
        self.line(title, looks='font-weight="bold"')
        self.line(line)

    def line(self, text: str, looks: str = "") -> None:
        self.y += 20
        self.text(0, self.y - 5, text, looks)

    def text(self, x: int, y: int, text: str, looks: str = "") -> None:
        self.parts.append(f'<text x="{x}" y="{y}" fill="currentColor" {looks}>{escape(text)}</text>')

    def svg(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{self.y + 4}" '
            f'viewBox="0 0 {WIDTH} {self.y + 4}" style="max-width:100%;height:auto" font-family="sans-serif" '
            f'font-size="11">{"".join(self.parts)}</svg>'
        )


def box(x: float, y: float, looks: str, width: float = SIZE) -> str:
    """A rectangle, as high as a square, with SVG attributes for its looks."""
    return f'<rect x="{x:.4g}" y="{y:.6g}" width="{width:.4g}" height="{SIZE}" {looks}/>'


class Page(NamedTuple):
    """A page to be drawn: its number; its entry in the page map; the sequence of the row that shows it, or 0; and the
    part of it that holds tokens."""

    number: int
    state: int
    viewer: int = 0
    begin: float = 0.0
    end: float = 1.0

    def square(self, x: int, y: int) -> str:
        what, looks = STATES.get(self.state, (f"sequence {self.state}", ""))
        is_shared = self.state == stats.SHARED_PAGE and self.viewer > 0 and self.begin < self.end
        shapes = [f"<title>page {self.number}: {what}</title>"]
        if self.state >= 0 or is_shared:
            fill, part = colour(self.viewer if is_shared else self.state), self.end - self.begin
            shapes += [box(x, y, f'fill="none" stroke="{fill}"')] if part < 1 else []
            shapes += [box(x + SIZE * self.begin, y, f'fill="{fill}"', SIZE * part)]
            stripe = f'<path d="M{x} {y + SIZE // 2}h{SIZE}" stroke="currentColor" stroke-width="2"/>'
            shapes += [stripe] if is_shared else []
        else:
            shapes.append(box(x, y, looks))
        return f"<g>{''.join(shapes)}</g>"


def draw_cache(cache: KVCache) -> str:
    """Rows with their pages in the order of addresses, then all physical pages by number."""
    now, owners = cache.stats(), cache.page_map()
    live = np.flatnonzero(cache.owners[: cache.max_sequences]).tolist()
    drawing = Drawing(
        f"KVCache on {cache.device}: {_count(now.rows['live'], 'sequence')}, {_count(now.tokens, 'token')}",
        f"{_count(now.pages['used'], 'page')} of {cache.page_size >> 10:,} KiB in use, waste {now.waste:.1%}; "
        f"{now.physical_bytes / 2**20:,.0f} of {now.budget_bytes / 2**20:,.0f} MiB taken",
    )
    _draw_rows(drawing, cache, owners, [*dict.fromkeys([*live, *(row for row, _ in snapshot.mapped_rows(cache))])])
    step = -(-len(owners) // MAX_PAGES) or 1
    drawing.line(f"Physical pages, {len(owners):,} by number{_stands_for(step)}")
    pages = [Page(number, int(owners[number])) for number in range(0, len(owners), step)]
    _squares(drawing, "physical", pages, WIDTH // CELL)
    _legend(drawing, owners)
    return drawing.svg()


def draw_sequence(cache: KVCache, row: int) -> str:
    """The row of a live sequence."""
    owners, tokens = cache.page_map(), int(cache.lengths[row] - cache.starts[row])
    drawing = Drawing(
        f"Sequence {cache.owners[row]} in row {row}: {_count(tokens, 'token')} of {cache.max_seq_len:,}",
        f"room for {_count(max(int(cache.capacities[row]), 0), 'token')} without a driver call",
    )
    _draw_rows(drawing, cache, owners, [row])
    _legend(drawing, owners[[page.number for page in row_pages(cache, owners, row)]])
    return drawing.svg()


def row_pages(cache: KVCache, owners: npt.NDArray[np.int64], row: int) -> list[Page]:
    """A row's mapped pages in the order of addresses, range by range; `owners` is the page map."""
    pages, size = [], cache.page_size
    for part, bounds in enumerate(cache.ranges):
        begin, end = (int(words[row]) * int(bounds["record"]) / size for words in (cache.starts, cache.lengths))
        first, numbers = snapshot.pages_in(cache, row, part)
        for at, number in enumerate(numbers.tolist(), first):
            tokens = (min(max(bound - at, 0.0), 1.0) for bound in (begin, end))
            pages.append(Page(number, int(owners[number]), int(cache.owners[row]), *tokens))
    return pages


def _draw_rows(drawing: Drawing, cache: KVCache, owners: npt.NDArray[np.int64], rows: list[int]) -> None:
    columns, drawn = WIDTH // CELL - LABEL, {row: row_pages(cache, owners, row) for row in rows[:MAX_ROWS]}
    step = -(-max(map(len, drawn.values()), default=0) // columns) or 1
    if rows:
        drawing.line(f"Pages in the order of addresses{_stands_for(step)}")
    for row, pages in drawn.items():
        what = "retired" if cache.rows["list"][row] == RETIRED else "parked"
        if cache.owners[row]:
            what = f"sequence {cache.owners[row]}, {_count(int(cache.lengths[row] - cache.starts[row]), 'token')}"
        drawing.text(0, drawing.y + SIZE, f"{row}: {what}")
        _squares(drawing, "row", pages[::step], columns)
    if len(rows) > MAX_ROWS:
        drawing.line(f"and {_count(len(rows) - MAX_ROWS, 'more row')}")


def _squares(drawing: Drawing, name: str, pages: Sequence[Page], columns: int) -> None:
    """Adds pages in lines of so many columns, at the right."""
    left, top = WIDTH - columns * CELL + 1, drawing.y + 1
    squares = (
        page.square(left + index % columns * CELL, top + index // columns * CELL) for index, page in enumerate(pages)
    )
    drawing.parts.append(f'<g class="{name}">{"".join(squares)}</g>')
    drawing.y += max(-(-len(pages) // columns), 1) * CELL + 2


def _legend(drawing: Drawing, owners: npt.NDArray[np.int64]) -> None:
    counts = Counter(owners.tolist())
    for state, (name, looks) in STATES.items():
        if counts[state]:
            drawing.parts.append(box(1, drawing.y + 7, looks))
            drawing.y += 16
            drawing.text(CELL + 2, drawing.y, f"{counts[state]:,} {name}")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _stands_for(step: int) -> str:
    return f"; a square stands for {step:,} pages, and looks like the first of them" if step > 1 else ""
