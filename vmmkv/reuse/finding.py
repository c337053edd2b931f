"""Finding: what a new sequence of given tokens can begin with, of all that is known. Changes nothing.

It is, in this order:
 1. A row that nobody has any more, adopted: if it holds as much of these tokens as anything does, and either nothing
    else, or less than it would cost to map the pages elsewhere.
 2. Pages that the tree knows, laid on a row: whole frames are mapped there, pieces of frames are copied, and so are
    whole frames where they are few of many pages that the sequence is to have: then any row will do.
 3. Behind these a copy of the tail of another row, kept or live, as far as it lies in one page more of each range.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from ..driver.fence import Fence
from ..errors import StreamCaptureError
from ..rows.laying import Piece, pieces
from .known import Known
from .node import Ids, Node
from .tree import Match

COPIED = 8
"""Of so many pages that a sequence is to have one is copied rather than shared, and a page of each range in any case.
That takes its memory twice, and spares the calls that map it, and those that unmap what a row has, and map the rest of
its pages anew."""


class Hit(NamedTuple):
    """What a new sequence can begin with: so many tokens, on a kept row, or laid on one without pages.

    Attributes:
        tokens: how many.
        row: the kept one; None where there is none.
        node: with `locked` tokens on its path, which are not to be evicted meanwhile.
        laid: by range the pieces of whole pages.
        partial: by range the page that holds the rest.
        source: the row whose tail that is; None where the tree knows it.
    """

    tokens: int
    row: int | None
    node: Node
    locked: int
    laid: Sequence[list[Piece]] = ()
    partial: Sequence[int | None] = ()
    source: int | None = None

    @property
    def calls(self) -> int:
        """How many frames are mapped for it, where it is laid. To compute a token takes about as long as to map one."""
        return sum(len(piece.frames) for of in self.laid for piece in of)

    @property
    def is_copied(self) -> bool:
        """Whether all of it is copied, if there is any, as any row can begin with that has its pages for its own."""
        return not self.tokens or not any(piece.frames for of in self.laid for piece in of)

    def given_up(self) -> Hit:
        """Nothing, instead."""
        return self._replace(tokens=0, source=None)


class Longer(NamedTuple):
    """A row whose tail goes on where a match ends.

    Attributes:
        row: which.
        tokens: how many of those that were asked for it holds.
        begin: where its tail begins.
    """

    row: int
    tokens: int
    begin: int


class Finder:
    """See above.

    Args:
        known: what is known of rows.
    """

    def __init__(self, known: Known) -> None:
        self._known, self._books, self._table, self._pool = known, known.books, known.books.table, known.books.pool

    def find(self, key: Hashable, ids: Ids, expected: int = 0) -> Hit:
        """What a sequence of these ids can begin with, which expects to have so many tokens: at most all of its tokens
        but the last, which has to be computed for what comes after it."""
        expected = max(expected, len(ids))
        match = self._known.tree.match(key, ids[:-1])
        kept, live = self._longest(match, key, ids)
        hit = None
        longest = max(match.tokens, live.tokens if live else 0)
        if kept and kept.tokens >= longest and self._may_adopt(kept.row, kept.tokens):
            others = len(self._known.chains[kept.row].ids) - kept.tokens
            hit = self._laid(match, expected) if others else None
            if hit is None or others <= hit.calls:
                return Hit(kept.tokens, kept.row, match.node, match.tokens)
        hit = hit or self._laid(match, expected)
        for tail in sorted(filter(None, (kept, live)), key=lambda each: -each.tokens):
            if hit.tokens == match.tokens < tail.tokens and not self._is_captured(tail.row):
                return self._with_tail(hit, match, tail)
        return hit

    def _longest(self, match: Match, key: Hashable, ids: Ids) -> tuple[Longer | None, Longer | None]:
        """The tails of a kept row and of a live one that go on longest where a match ends."""
        size, record, geometry = self._books.page_size, self._books.records[0], self._known.tree.geometry
        pages, behind = match.pages[0], match.partial[0]
        longest: list[Longer | None] = [None, None]
        for count in range(len(pages) + (behind is not None), geometry.known_pages(match.tokens)[0] - 1, -1):
            begin = -(-count * size // record)
            place = key if not count else behind if count > len(pages) else pages[count - 1]
            between = slice(match.tokens, begin)  # of a token that lies in two pages
            asked = ids[begin:-1]
            for which, is_kept in enumerate((True, False)):
                found = None if longest[which] else self._known.tails.longest(place, asked, is_kept)
                if found and self._known.chains[found.tail.row].ids[between].tobytes() == ids[:-1][between].tobytes():
                    longest[which] = Longer(found.tail.row, begin + found.tokens, begin)
        kept, live = longest
        return kept, live

    def _is_captured(self, row: int) -> bool:
        """Whether a row's stream, which is to come behind a copy, is being captured in a graph."""
        try:
            Fence.after(self._pool.driver, [self._table.own_streams[row] or self._pool.driver.current_stream()])
        except StreamCaptureError:
            return True
        return False

    def _with_tail(self, hit: Hit, match: Match, tail: Longer) -> Hit:
        """A hit that goes on with a tail, as far as that lies in one page more of each range."""
        size, ranges, laid = self._books.page_size, self._books.ranges, list(hit.laid)
        counts = self._known.tree.geometry.pages(hit.tokens)
        for index, ((arena, record), known) in enumerate(zip(ranges, match.partial)):
            is_whole = (counts[index] + 1) * size <= tail.tokens * record
            if known is not None and is_whole and arena.table.memory[tail.row, counts[index]] == known:
                counts[index] += 1  # a token before the tail lies in that page and in the next one
                laid[index] = pieces([*match.pages[index], known], self._pool.frames)
        tokens = min(tail.tokens, *((count + 1) * size // record for count, (_, record) in zip(counts, ranges)))
        if tokens <= hit.tokens or [sum(piece.pages for piece in of) for of in laid] != counts:
            return hit
        partial = [
            arena.table.memory.item(tail.row, count) if tokens * record > count * size else None
            for (arena, record), count in zip(ranges, counts)
        ]
        return Hit(tokens, None, hit.node, max(hit.locked, tail.begin), laid, partial, tail.row)

    def _laid(self, match: Match, expected: int) -> Hit:
        """What of a match can be laid on a row that is to have so many tokens."""
        geometry, frames, tokens = self._known.tree.geometry, self._pool.frames, match.tokens
        few = max(sum(geometry.pages(expected)) // COPIED, len(geometry.records))
        are_few = sum(geometry.pages(tokens)) <= few
        while True:
            wholes = geometry.pages(tokens)
            laid = [pieces(numbers[:whole], frames, are_few) for numbers, whole in zip(match.pages, wholes)]
            counts = [sum(piece.pages for piece in of) for of in laid]
            if counts == wholes:
                break
            # It is in too many pieces. With less of it a large frame may end behind it, and be one more.
            tokens = min(count * geometry.page_size // record for count, record in zip(counts, geometry.records))
        partial = [
            [*numbers, behind][whole] if tokens * record % geometry.page_size else None
            for numbers, behind, whole, record in zip(match.pages, match.partial, wholes, geometry.records)
        ]
        return Hit(tokens, None, match.node, tokens, laid, partial)

    def _may_adopt(self, row: int, tokens: int) -> bool:
        """Whether a kept row holds nothing behind so many tokens that a new sequence must not see, or write to."""
        return all(
            arena.table.own[row] <= tokens * record // self._books.page_size for arena, record in self._books.ranges
        )
