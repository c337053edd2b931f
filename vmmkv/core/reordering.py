"""Reordering: sequences that come to hold what other sequences held, as beams do. Rows and addresses stay.

Pages that are the same frame in both rows stay as they are. Behind them a row gets pages that it has alone, and copies;
a sequence without tokens becomes a fork. Rows are copied to once no other row is to be copied from them; in a circle
one row's bytes are kept aside, some pages at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
import torch

from ..driver.fence import wait_for_device
from ..errors import DriverOutOfMemoryError, UnsupportedError, VmmkvError
from . import entries
from .cache import Cache
from .pool import FRESH, LARGE, ROW_AT, Ask
from .sequence import Sequence
from .unsharing import part_from

ASIDE = -1
"""Stands for the row of which a part is kept aside."""


def reorder(cache: Cache, sequences: Iterable[Sequence], indices: Iterable[int]) -> None:
    """Gives sequence i the tokens of sequence `indices[i]`: see `KVCache.reorder`. `sequences` are live ones of the
    cache, each once, with one index for each."""
    batch, chosen = list(sequences), list(indices)
    rows = [each.record_index() for each in batch]
    moves = {row: rows[index] for row, index in zip(rows, chosen) if row != rows[index]}
    if moves:
        used = {*moves, *moves.values()}
        Reordering(cache, {row: each for row, each in zip(rows, batch) if row in used}).run(moves)


class Reordering:
    """A reordering of these sequences, by row. `moves` has by row the row whose tokens it is to hold."""

    def __init__(self, cache: Cache, sequences: dict[int, Sequence]) -> None:
        self.cache, self.sequences, self.size = cache, sequences, cache.pool.driver.page_size
        self.parts = [(int(part["address"]), int(part["record"]), int(part["row_pages"])) for part in cache.ranges]
        self.tickets = {row: each.ticket for row, each in sequences.items()}
        self.held = {row: (int(cache.starts[row]), int(cache.lengths[row])) for row in sequences}
        """The start and the length of each, as before."""

    def run(self, moves: dict[int, int]) -> None:
        """Makes room for all moves, which can be refused; then makes them in one call."""
        cache, held = self.cache, self.held
        self.check(moves)
        handle = cache.pool.current_handle()
        self.copy([*held], [], {}, handle)
        buffer = self.buffer(moves)
        try:
            for row, ticket in self.tickets.items():
                cache.repair(ticket)
                if row in moves and held[row][1] == 0 < held[moves[row]][1]:
                    cache.share_into(ticket, self.tickets[moves[row]], held[moves[row]][1])
            moves = {row: source for row, source in moves.items() if held[row][1]}
            pages = self.part(moves)
            more = [max(held[source][1] - held[row][1], 0) for row, source in moves.items()]
            cache.extend([self.sequences[row] for row in moves], more)
            copies = self.copies(moves, pages, buffer.data_ptr())
            self.copy([*moves, *{*moves.values()} - {*moves}], copies, {row: held[moves[row]] for row in moves}, handle)
        except BaseException:
            longer = {row: was for row, was in held.items() if cache.lengths[row] > was[1]}
            with suppress(VmmkvError):  # without a stream: nothing was written to their new pages
                self.copy([*longer], [], longer, 0)
            raise

    def check(self, moves: dict[int, int]) -> None:
        """Raises `UnsupportedError` for moves that are not possible."""
        keys, is_scrubbed = self.cache.rows["key"], self.cache.state[0]["key_of_sequence"]
        for row, source in moves.items():
            begins = [self.held[source][0] * record // self.size for _, record, _ in self.parts]
            if keys[row] != keys[source] and not is_scrubbed:
                raise UnsupportedError("asked for tokens of a sequence with another key; reorder those of a key alone")
            is_in_front = any(begin < self.used(row, part)[0] for part, begin in enumerate(begins))
            if self.held[row][1] and is_in_front:
                raise UnsupportedError(
                    "asked for tokens in front of those that a sequence still has (release_before); fork the other "
                    "sequence, and free this one"
                )

    def buffer(self, moves: dict[int, int]) -> torch.Tensor:
        """Memory for what is kept aside. Raises `DriverOutOfMemoryError` where there is none."""
        is_circle = any(to == ASIDE for to, _, _ in in_order(moves))
        longest = max(length for _, length in self.held.values()) * max(record for _, record, _ in self.parts)
        nbytes = min(longest, LARGE * self.size) if is_circle else 0
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.cache.pool.driver.device)
        except (MemoryError, RuntimeError) as error:  # torch raises either
            detail = f"{nbytes} bytes beside the cache, to reorder sequences in a circle"
            raise DriverOutOfMemoryError("torch.empty", type(error).__name__, detail) from error

    def used(self, row: int, part: int) -> tuple[int, int]:
        """The first page that a row uses in a range, and their end."""
        extent = self.cache.extents[row * len(self.parts) + part]
        return int(extent["use_first"]), int(extent["use_end"])

    def part(self, moves: dict[int, int]) -> dict[int, list[int]]:
        """Has rows that are to change have pages of their own; returns the first of these in each range. Pages in
        front of it are those of the other row. To part rows can end that others have the same pages."""
        pages, last = {row: self.common(row, source) for row, source in moves.items()}, None
        while pages != last:
            for row, begins in pages.items():
                part_from(self.cache, self.tickets[row], begins, 0)
            last, pages = pages, {row: self.common(row, source) for row, source in moves.items()}
        return pages

    def common(self, row: int, source: int) -> list[int]:
        """By range, the page up to which a row has the frames of another, from the other's first token on; not those
        that the row will grow into."""
        (start, length), before, pages = self.held[source], self.held[row][1], []
        for part, (_, record, _) in enumerate(self.parts):
            first, end = start * record // self.size, min(self.used(source, part)[1], self.used(row, part)[1])
            end = max(first, min(end, before * record // self.size) if before < length else end)
            table = self.cache.tables[part]
            others = np.flatnonzero(table[row, first:end] != table[source, first:end])
            pages.append(first + int(others[0]) if len(others) else end)
        return pages

    def copies(self, moves: dict[int, int], pages: dict[int, list[int]], aside: int) -> list[int]:
        """Copies that make all moves: of each a destination, a source, and bytes. They go piece by piece."""
        words, step, order = [], LARGE * self.size, in_order(moves)
        for part, (address, record, row_pages) in enumerate(self.parts):
            for lowest in range(0, max(length for _, length in self.held.values()) * record, step):
                for to, source, row in order:
                    start, length = self.held[moves[row]]
                    begin = max(pages[row][part] * self.size, start * record, lowest)
                    end = min(length * record, lowest + step)
                    for each in (to, source) if begin < end else ():
                        words.append(aside if each == ASIDE else address + each * row_pages * self.size + begin)
                    words += [end - begin] if begin < end else []
        return words

    def copy(self, rows: list[int], words: list[int], after: dict[int, tuple[int, int]], handle: int) -> None:
        """Makes copies between rows, the first of which hold something else then: see `copy_rows`."""
        cache, driver, ask = self.cache, self.cache.pool.driver, Ask()
        tickets, copies = array("q", [self.tickets[row] for row in rows]), array("q", words)
        held = array("q", [word for extent in after.values() for word in extent])
        if not rows:
            return
        code = entries.copy_rows(
            cache.address, tickets.buffer_info()[0], len(rows), copies.buffer_info()[0], len(words) // 3,
            held.buffer_info()[0], len(after), handle, ask.address,
        )  # fmt: skip
        if ask.words[FRESH]:
            driver.slot_streams[ask.words[FRESH] - 1] = driver.current_stream()
        if ask.words[ROW_AT]:
            with suppress(VmmkvError):
                wait_for_device(driver)
                cache.free([self.sequences[row] for row in after])
        if code < 0:
            raise cache.error(code, ask)


def in_order(moves: dict[int, int]) -> list[tuple[int, int, int]]:
    """Moves in an order in which each row changes behind all that read it: to what, from what, and the row that gets
    the tokens. Of a circle one row is kept aside."""
    left, order = dict(moves), []
    while left:
        if unread := left.keys() - left.values():
            order += [(row, left.pop(row), row) for row in unread]
        else:
            first = next(iter(left))
            row = next(row for row, source in left.items() if source == first)
            order.append((ASIDE, first, row))
            left[row] = ASIDE
    return order
