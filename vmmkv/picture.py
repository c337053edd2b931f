"""Pictures of the pages of caches and sequences, for Jupyter.

A square is a page, and joined squares are one large frame. The colour of a square is its sequence, and the filled part
holds tokens. A stripe runs through pages that several sequences share; each sequence shows them in its own colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from . import snapshot
from .core.pool import LARGE
from .core.tables import RETIRED
from .stats import (
    FREE_PAGE,
    KEPT_PAGE,
    LOOKAHEAD_PAGE,
    OTHERS_PAGE,
    SHARED_PAGE,
    SURPLUS_PAGE,
    VACANT_PAGE,
    CacheStats,
)
from .svg import WIDTH, Drawing, colour, named, rectangle, stripe

if TYPE_CHECKING:
    from .cache import KVCache

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
    VACANT_PAGE: ("given back", 'fill="none" stroke="#888" stroke-dasharray="1 3"'),
}
"""Names and looks of pages that belong to no sequence, or to several."""


class Page(NamedTuple):
    """A page to be drawn: its number; its sequence, or else its entry in the page map; the first page of its frame if
    that is a large frame; the sequences that share it; and the part of it that holds tokens."""

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

    def __init__(self, cache: KVCache) -> None:
        frames = cache.pool.frames[: cache.pool.word("fresh")]
        self._cache, self._owners = cache, cache.page_map()
        is_large = np.repeat((frames["pages"] > 1) & (frames["handle"] != -1), frames["pages"])
        self._frames = np.where(is_large, np.repeat(snapshot.first_pages(cache), frames["pages"]), -1)
        self.large = int(is_large.sum()) // LARGE
        """How many large frames there are."""
        self._sharers = self._find_sharers()

    def _find_sharers(self) -> dict[int, list[int]]:
        """By shared page: the numbers of the sequences that share it."""
        sharers: dict[int, list[int]] = {page: [] for page in np.flatnonzero(self._owners == SHARED_PAGE).tolist()}
        owners = self._cache.owners[: self._cache.max_sequences]
        for row in np.argsort(owners, kind="stable").tolist() if sharers else ():
            if owners[row] > 0:
                for part in range(len(self._cache.ranges)):
                    for page in sharers.keys() & set(snapshot.pages_in(self._cache, row, part, "use")[1].tolist()):
                        sharers[page].append(int(owners[row]))
        return sharers

    def __len__(self) -> int:
        return len(self._owners)

    def page(self, number: int, begin: float = 0.0, end: float = 1.0, viewer: int = SHARED_PAGE) -> Page:
        """A page by its number, of which a part holds tokens; a shared page is drawn as the viewer's."""
        frame, sharers = int(self._frames[number]), self._sharers.get(number, ())
        owner = viewer if viewer in sharers else int(self._owners[number])
        return Page(number, owner, None if frame < 0 else frame, sharers, begin, end)

    def counts(self) -> dict[int, int]:
        """How many pages there are by state, of those that do not belong to one sequence."""
        return {state: int((self._owners == state).sum()) for state in STATES}

    def by_range(self, row: int) -> list[list[Page]]:
        """A row's mapped pages in the order of addresses, for each range."""
        cache, by_range = self._cache, []
        for part, bounds in enumerate(cache.ranges):
            tokens, viewer = (cache.starts[row], cache.lengths[row]), int(cache.owners[row]) or SHARED_PAGE
            first, last = (int(count) * int(bounds["record"]) / cache.page_size for count in tokens)
            begin, numbers = snapshot.pages_in(cache, row, part)
            by_range.append(
                [
                    self.page(number, min(max(first - at, 0), 1), min(max(last - at, 0), 1), viewer)
                    for at, number in enumerate(numbers.tolist(), begin)
                ]
            )
        return by_range


def draw_cache(cache: KVCache, stats: CacheStats) -> str:
    """Rows with their pages in the order of addresses, then all physical pages by number."""
    pages, size = PageMap(cache), cache.page_size
    drawing = Drawing()
    drawing.text(
        f"KVCache on {cache.device}: {_count(stats.rows['live'], 'sequence')}, {_count(stats.tokens, 'token')}",
        bold=True,
    )
    drawing.text(
        f"{_count(stats.pages['used'], 'page')} of {size >> 10:,} KiB in use, waste {stats.waste:.1%}; "
        f"{stats.physical_bytes / 2**20:,.0f} of {stats.budget_bytes / 2**20:,.0f} MiB taken"
    )
    drawn = {row for row, _ in snapshot.mapped_rows(cache)} | set(
        np.flatnonzero(cache.owners[: cache.max_sequences]).tolist()
    )
    order = sorted(drawn, key=lambda row: (cache.owners[row] == 0, row))  # live ones first
    if order:
        lines = [(row, list(chain(*pages.by_range(row)))) for row in order[:MAX_ROWS]]
        columns = COLUMNS - LABEL
        step = -(-max(len(mapped) for _, mapped in lines) // columns) or 1
        drawing.text(f"Virtual rows, {len(order):,} with a sequence or pages{_stands_for(step)}")
        for row, mapped in lines:
            _squares(drawing, mapped[::step], columns, label=f"{row}: {_holder(cache, row)}")
        _say_what_is_left(drawing, len(order), "row")
    step = -(-len(pages) // MAX_PAGES) or 1
    joined = f", {pages.large * LARGE:,} of them joined: {_count(pages.large, 'large frame')}" if pages.large else ""
    drawing.text(f"Physical pages, {len(pages):,} by number{joined}{_stands_for(step)}")
    _squares(drawing, [pages.page(number) for number in range(0, len(pages), step)], COLUMNS)
    _legend(drawing, pages.counts())
    return drawing.svg()


def draw_sequence(cache: KVCache, row: int) -> str:
    """The row of a live sequence: the physical page behind each stretch of its tokens, under which is its number."""
    start, length, owner = (int(words[row]) for words in (cache.starts, cache.lengths, cache.owners))
    by_range = PageMap(cache).by_range(row)
    mapped = list(chain(*by_range))
    used = [page for page in mapped if page.owner == owner]
    waste = 1 - sum(page.end - page.begin for page in used) / len(used) if used else 0.0
    drawing = Drawing()
    drawing.text(
        f"Sequence {owner} in row {row}: {_count(length - start, 'token')} of {cache.max_seq_len:,}",
        bold=True,
    )
    drawing.text(
        f"{_count(len(used), 'page')} of {cache.page_size >> 10:,} KiB in use, waste {waste:.1%}; "
        f"{_count(len(mapped), 'page')} mapped, room for {_count(max(int(cache.capacities[row]), 0), 'token')} "
        "without a driver call"
    )
    step = -(-len(mapped) // MAX_PAGES) or 1
    drawing.text(f"Pages in the order of addresses, below each its number{_stands_for(step)}")
    for index, pages in enumerate(by_range[:MAX_ROWS]):
        first, _ = snapshot.frames_in(cache, row, index)
        token = first * cache.page_size // int(cache.ranges[index]["record"])
        name = f"range {index}, token {token:,}" if len(by_range) > 1 else f"token {token:,}"
        _squares(drawing, pages[::step], (COLUMNS - LABEL) // 3, label=name, wide=True)
    _say_what_is_left(drawing, len(by_range), "range")
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
    """Adds the looks and numbers of pages that do not belong to one sequence."""
    drawing.legend((STATES[state][1], f"{count:,} {STATES[state][0]}") for state, count in counts.items() if count)


def _holder(cache: KVCache, row: int) -> str:
    """Names the sequence of a row and its tokens, or says that the row has none."""
    if cache.owners[row] > 0:
        return f"sequence {cache.owners[row]}, {_count(int(cache.lengths[row] - cache.starts[row]), 'token')}"
    return "retired" if cache.rows["list"][row] == RETIRED else "parked"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _stands_for(step: int) -> str:
    return f"; a square stands for {step:,} pages, and looks like the first of them" if step > 1 else ""


def _say_what_is_left(drawing: Drawing, count: int, what: str) -> None:
    if count > MAX_ROWS:
        drawing.text(f"and {_count(count - MAX_ROWS, f'more {what}')}")
