"""Which pages of a row are whole after how many tokens: pure arithmetic, no memory.

Page `p` of a row whose tokens take `record` bytes each is *whole* after `ceil((p + 1) * page_size / record)` tokens:
those, and no others, determine its bytes. Records need not divide pages, so a token may lie in several of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import LayoutError
from ..layout import whole_number


class Geometry:
    """Rows of the same tokens in several arenas.

    Args:
        page_size: bytes of a page.
        records: bytes of a token, by arena.

    Raises:
        LayoutError: one of them is no whole number of at least 1, or there is no arena.
    """

    def __init__(self, page_size: int, records: Sequence[int]) -> None:
        self.page_size = whole_number("page_size", page_size)
        self.records = tuple(whole_number("records", record) for record in records)
        if min(self.page_size, *self.records, len(self.records)) < 1:
            raise LayoutError(f"asked for {page_size=}, {records=}; there is an arena at least, of a byte at least")

    def pages(self, tokens: int) -> list[int]:
        """By arena, how many pages are whole after so many tokens."""
        return [tokens * record // self.page_size for record in self.records]

    def last_whole(self, tokens: int) -> int:
        """The last number of tokens, up to this one, with which a page became whole; 0 if none did."""
        size = self.page_size
        return max([-(-(tokens * record // size * size) // record) for record in self.records])

    def readable(self, tokens: int) -> int:
        """How many of these tokens lie in whole pages, in all arenas."""
        size = self.page_size
        return min([tokens * record // size * size // record for record in self.records])

    def whole_after(self, tokens: int) -> int:
        """After how many tokens all pages are whole that these tokens lie in."""
        size = self.page_size
        return max([-(-tokens * record // size * size // record) for record in self.records])

    def known(self, tokens: int) -> int:
        """How many of these tokens a prefix tree knows: up to the page that is whole last of those that can be read."""
        return self.whole_after(self.readable(tokens))

    def known_pages(self, tokens: int) -> list[int]:
        """By arena, how many pages a prefix tree knows of these tokens."""
        return self.pages(self.known(tokens))
