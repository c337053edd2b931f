"""Pictures of the pages of caches and sequences, for Jupyter.

A square is a page. The colour of a square is its sequence, and the filled part holds tokens. A stripe runs through
pages that several sequences share; each row shows them in the colour of its own sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from . import snapshot
from .core.tables import RETIRED
from .stats import (
    FREE_PAGE,
    KEPT_PAGE,
    LOOKAHEAD_PAGE,
    OTHERS_PAGE,
    SHARED_PAGE,
    SURPLUS_PAGE,
    VACANT_PAGE,
)
from .svg import WIDTH, Drawing, colour, rectangle, stripe

if TYPE_CHECKING:
    from .cache import KVCache

CELL = 12
"""Pixels from one square to the next."""
LABEL = 18
"""Columns that the name of a row takes."""
MAX_PAGES = 1024
"""Squares drawn of physical pages; with more pages a square stands for several, as in rows that are too long."""
MAX_ROWS = 16
"""Rows that are drawn."""

STATES = {
    SHARED_PAGE: ("shared by several sequences, whose rows have a stripe there", 'fill="currentColor"'),
    KEPT_PAGE: ("kept for sequences that begin with what it holds", 'fill="#888"'),
    SURPLUS_PAGE: ("surplus: mapped, to be adopted or reclaimed", 'fill="#888" fill-opacity=".5"'),
    LOOKAHEAD_PAGE: ("lookahead: mapped for tokens to come", 'fill="#888" fill-opacity=".5" stroke="#888"'),
    FREE_PAGE: ("free", 'fill="none" stroke="#888"'),
    OTHERS_PAGE: ("another's, on the same pool", 'fill="#888" fill-opacity=".2" stroke="#888"'),
    VACANT_PAGE: ("given back", 'fill="none" stroke="#888" stroke-dasharray="1 3"'),
}
"""Names and looks of pages that belong to no sequence, or to several."""


class Page(NamedTuple):
    """A page to be drawn: its number; its entry in the page map; the sequence of the row that shows it, or 0; and the
    part of it that holds tokens."""

    number: int
    state: int
    viewer: int = 0
    begin: float = 0.0
    end: float = 1.0

    def __str__(self) -> str:
        what = f"sequence {self.state}" if self.state >= 0 else STATES[self.state][0]
        return f"page {self.number}: {what}"

    def square(self, x: int, y: int) -> str:
        """How it looks."""
        is_shared, size = self.state == SHARED_PAGE and self.viewer > 0 and self.begin < self.end, CELL - 2
        if self.state < 0 and not is_shared:
            return rectangle(x, y, size, size, STATES[self.state][1])
        fill, part = colour(self.viewer if is_shared else self.state), self.end - self.begin
        outline = rectangle(x, y, size, size, f'fill="none" stroke="{fill}"') if part < 1 else ""
        filled = rectangle(x + size * self.begin, y, size * part, size, f'fill="{fill}"')
        return outline + filled + (stripe(x, y, size, size) if is_shared else "")


def draw_cache(cache: KVCache) -> str:
    """Rows with their pages in the order of addresses, then all physical pages by number."""
    stats, owners = cache.stats(), cache.page_map()
    live = np.flatnonzero(cache.owners[: cache.max_sequences]).tolist()
    drawing = Drawing(
        f"KVCache on {cache.device}: {_count(stats.rows['live'], 'sequence')}, {_count(stats.tokens, 'token')}",
        f"{_count(stats.pages['used'], 'page')} of {cache.page_size >> 10:,} KiB in use, waste {stats.waste:.1%}; "
        f"{stats.physical_bytes / 2**20:,.0f} of {stats.budget_bytes / 2**20:,.0f} MiB taken",
    )
    _draw_rows(drawing, cache, owners, [*dict.fromkeys([*live, *(row for row, _ in snapshot.mapped_rows(cache))])])
    step = -(-len(owners) // MAX_PAGES) or 1
    drawing.text(f"Physical pages, {len(owners):,} by number{_stands_for(step)}")
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
        drawing.text(f"Pages in the order of addresses{_stands_for(step)}")
    for row, pages in drawn.items():
        what = "retired" if cache.rows["list"][row] == RETIRED else "parked"
        if cache.owners[row]:
            what = f"sequence {cache.owners[row]}, {_count(int(cache.lengths[row] - cache.starts[row]), 'token')}"
        drawing.write(0, drawing.y + CELL - 2, f"{row}: {what}")
        _squares(drawing, "row", pages[::step], columns)
    if len(rows) > MAX_ROWS:
        drawing.text(f"and {_count(len(rows) - MAX_ROWS, 'more row')}")


def _squares(drawing: Drawing, name: str, pages: Sequence[Page], columns: int) -> None:
    """Pages in lines of so many columns, at the right."""
    drawing.put(f'<g class="{name}">')
    for index, page in enumerate(pages):
        line, column = divmod(index, columns)
        x, y = WIDTH - (columns - column) * CELL + 1, drawing.y + line * CELL + 1
        drawing.put(f"<g><title>{page}</title>{page.square(x, y)}</g>")
    drawing.put("</g>")
    drawing.y += max(-(-len(pages) // columns), 1) * CELL + 2


def _legend(drawing: Drawing, owners: npt.NDArray[np.int64]) -> None:
    """Adds the looks and numbers of pages that do not belong to one sequence."""
    counts = Counter(owners.tolist())
    drawing.legend((looks, f"{counts[state]:,} {name}") for state, (name, looks) in STATES.items() if counts[state])


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _stands_for(step: int) -> str:
    return f"; a square stands for {step:,} pages, and looks like the first of them" if step > 1 else ""
