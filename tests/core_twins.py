"""The plain model of `core_parity`: sequences as bytes, and which of their pages are the same piece of memory."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from core_houses import SIZE

import vmmkv


@dataclass(eq=False)
class Twin:
    """A sequence of both houses, and what it should be.

    Attributes:
        of: by house.
        places: by house, its row, and the address of that in each range.
        pages: by range and page, a number that stands for a piece of memory.
        past: bytes that it, or those that it was forked from, have written.
    """

    index: int
    of: list[Any]
    places: list[tuple[int, list[int]]]
    key: int
    tokens: list[int] = field(default_factory=list)
    start: int = 0
    pages: dict[tuple[int, int], int] = field(default_factory=dict)
    past: set[int] = field(default_factory=lambda: {0})


class Twins:
    """Sequences, and the pages that they use. See `core_parity.Parity`."""

    layouts: list[vmmkv.KVLayout]
    options: list[dict[str, Any]]
    budget: int

    def __init__(self) -> None:
        self.twins: list[Twin] = []
        self.numbers = itertools.count()

    def span(self, index: int, part: int, start: int, length: int) -> range:
        """The pages that tokens lie on, and what may be read behind them."""
        record, overread = self.layouts[index].record_bytes[part], self.options[index]["overread"]
        end = -(-(length + overread) * record // SIZE) if length else 0
        return range(min(start * record // SIZE, end), end)

    def all_pages(self, index: int, start: int, length: int) -> set[tuple[int, int]]:
        parts = range(len(self.layouts[index].record_bytes))
        return {(part, page) for part in parts for page in self.span(index, part, start, length)}

    def lay(self, twin: Twin, start: int, length: int, pages: dict[tuple[int, int], int] | None = None) -> None:
        """Has a sequence use the pages of such tokens: those of others that are given, its own, else new ones."""
        known = twin.pages | (pages or {})
        wanted = self.all_pages(twin.index, start, length)
        twin.pages = {page: known[page] if page in known else next(self.numbers) for page in wanted}

    def part(self, twin: Twin, token: int) -> None:
        """Gives a sequence pages of its own from a token on."""
        uses = Counter(page for each in self.of(twin.index) for page in each.pages.values())
        for (part, page), number in twin.pages.items():
            if page >= token * self.layouts[twin.index].record_bytes[part] // SIZE and uses[number] > 1:
                twin.pages[part, page] = next(self.numbers)

    def of(self, index: int) -> list[Twin]:
        return [twin for twin in self.twins if twin.index == index]

    def used(self, index: int) -> int:
        return len({page for twin in self.of(index) for page in twin.pages.values()})

    def committed(self, index: int) -> int:
        return max(self.used(index), int(self.options[index]["reserved"]))

    def fits(self) -> bool:
        """Whether what the model uses may be used."""
        limits = [each["limit"] or self.budget for each in self.options]
        within = all(self.used(index) <= limit for index, limit in enumerate(limits))
        return within and sum(map(self.committed, range(len(self.options)))) <= self.budget

    def ends_on_common_page(self, twin: Twin, source: Twin) -> bool:
        """Whether a sequence will grow from a page on that it shares with the other one."""
        ends = [
            (part, len(twin.tokens) * record // SIZE)
            for part, record in enumerate(self.layouts[twin.index].record_bytes)
        ]
        shares = any(end in twin.pages and twin.pages[end] == source.pages.get(end) for end in ends)
        return shares and len(source.tokens) > len(twin.tokens)

    def is_in_front(self, twin: Twin, source: Twin) -> bool:
        """Whether a sequence has given back the page on which another begins."""
        parts = range(len(self.layouts[twin.index].record_bytes))
        firsts = [
            [self.span(each.index, part, each.start, len(each.tokens)).start for part in parts]
            for each in (twin, source)
        ]
        return source.start < len(source.tokens) and any(one > other for one, other in zip(*firsts))

    def common(self, moves: dict[Twin, Twin]) -> dict[Twin, set[tuple[int, int]]]:
        """Pages in front of sequences that are to change which stay those of the others."""
        pages = {twin: dict(twin.pages) for twin in {*moves, *moves.values()}}
        found: dict[Twin, set[tuple[int, int]]] = {}
        last = None
        while found != last:
            last = dict(found)
            for twin, source in moves.items():
                same = set()
                for part, record in enumerate(self.layouts[twin.index].record_bytes):
                    grows = len(source.tokens) > len(twin.tokens)
                    for page in self.span(twin.index, part, source.start, len(source.tokens)):
                        number = pages[twin].get((part, page))
                        is_behind = grows and page >= len(twin.tokens) * record // SIZE
                        if number is None or number != pages[source].get((part, page)) or is_behind:
                            break
                        same.add((part, page))
                found[twin] = same
            for twin, same in found.items():
                pages[twin] = {
                    page: number for page, number in pages[twin].items() if page in same or page not in twin.pages
                }
        return found
