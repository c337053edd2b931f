"""Sequences on rows: arguments, errors and lengths over the compiled books."""

from __future__ import annotations

import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from sys import is_finalizing
from typing import Any

import numpy as np

from ..driver.driver import handle_of
from ..driver.fence import check_stream, wait_for_device
from ..errors import (
    ArgumentError, BusyError, DeviceLostError, OutOfRangeError, OutOfRowsError, UseAfterFreeError, VmmkvError,
)  # fmt: skip
from . import codes, entries, unsharing
from .addresses import Addresses, Views
from .mapper import Mapper
from .pool import ASKED, AVAILABLE, LARGE, NO_LIMIT_PAGES, ROW_AT, TRIMMED, Ask, Pool, at, record, zeros  # fmt: skip
from .sequence import Batch, Sequence, Watch, check_tokens, gone, no_token, suspended, too_long
from .tables import CACHE, EXTENT, LISTS, RANGE, ROW, ROW_BITS, ROW_MASK

KEYS = 1 << 62
"""Keys are below this."""


class Cache:
    """Rows of virtual memory on a pool.

    Args:
        pool: the physical memory.
        records: bytes of a token in each range.
        max_sequences: rows.
        max_seq_len: tokens of a row.
        limit: the most pages that it may use; None is all of the pool.
        reserved: pages that it can have at any time.
        lookahead: tokens behind each sequence for which the mapper maps pages.
        overread: tokens behind each length for which pages are mapped.
        large: whether prompts go on large frames.
        scrub: whether memory is filled before another sequence can read it.
    """

    kind: type[Sequence] = Sequence
    """Of its sequences."""
    views: Callable[[], Views | None] = staticmethod(lambda: None)
    """The object that tensors over the ranges hold, if there are any."""

    def __init__(
        self, pool: Pool, records: tuple[int, ...], max_sequences: int, max_seq_len: int, *, limit: int | None = None,
        reserved: int = 0, lookahead: int = 0, overread: int = 0, large: bool = True, scrub: bool = False,
    ) -> None:  # fmt: skip
        if not (0 < max_sequences <= ROW_MASK and max_seq_len > 0 and lookahead >= 0 and overread >= 0):
            raise ArgumentError(
                f"got max_sequences={max_sequences}, max_seq_len={max_seq_len}, lookahead={lookahead}, "
                f"overread={overread}; there may be up to {ROW_MASK} rows, of a token at least"
            )
        self.pool, self.records, self.max_sequences, self.max_seq_len = pool, records, max_sequences, max_seq_len
        size = pool.driver.page_size
        self.addresses: list[Addresses] = []
        """Those of the ranges."""
        self.is_closed = False
        self.tables: list[np.ndarray[Any, np.dtype[np.int32]]] = []
        """The page table of each range: by row and page a frame + 1."""
        self.ranges = zeros(len(records), RANGE)
        for part, nbytes in zip(self.ranges, records):
            row_pages = -(-(max_seq_len + overread) * nbytes // size)
            row_pages = -(-row_pages // LARGE) * LARGE if row_pages >= LARGE and large else row_pages
            pages = max_sequences * row_pages
            part["record"], part["row_pages"] = nbytes, row_pages
            self.addresses.append(Addresses(pool.driver, pages * size))
            self.tables.append(zeros(pages, np.dtype(np.int32)).reshape(max_sequences, row_pages))
            part["address"], part["pages_at"] = self.addresses[-1].start, at(self.tables[-1])
        self.rows = zeros(max_sequences + LISTS, ROW)
        self.extents = zeros(max_sequences * len(records), EXTENT)
        self.state = record(
            CACHE, pool=pool.address, num_rows=max_sequences, ranges=len(records),
            ranges_at=at(self.ranges), rows_at=at(self.rows), extents_at=at(self.extents), max_tokens=max_seq_len,
            overread=overread, lookahead=lookahead, large=int(large), key_of_sequence=int(scrub),
            queue_at=at(zeros(max_sequences, np.dtype(np.int64))),
        )  # fmt: skip
        self.address = at(self.state)
        count, heads = max_sequences, np.arange(max_sequences, max_sequences + LISTS)
        rows, numbers = self.rows, np.arange(max_sequences)  # all on the list of those without pages
        rows["next"][count:] = rows["prev"][count:] = rows["older"][count:] = rows["younger"][count:] = heads
        rows["next"][:count], rows["prev"][:count] = numbers + 1, numbers - 1
        rows["prev"][0], rows["next"][count], rows["prev"][count] = count, 0, count - 1
        rows["list"][count:] = -1
        self.owners, self.lengths = self.rows["owner"], self.rows["length"]
        self.starts, self.capacities = self.rows["start"], self.rows["capacity"]
        self.aways, self.away_starts = self.rows["away"], self.rows["away_start"]
        self.dead: deque[Watch] = deque()
        """Watches of sequences that were collected, and are to be freed: see `sweep`."""
        self.watches: set[Watch] = set()
        """Those of all sequences."""
        pool.opened(entries.open_cache, self.address, NO_LIMIT_PAGES if limit is None else limit, reserved)
        pool.members.add(self)
        for each in self.addresses:
            each.is_empty = False
        if lookahead and pool.mapper is None:
            pool.mapper = Mapper(pool)

    @property
    def account(self) -> int:
        """The number of its account on the pool."""
        return int(self.state[0]["account"])

    # ------------------------------------------------------------------ sequences

    def start(
        self, tokens: int = 0, *, expected: int = 0, key: int = 0, row: int | None = None, avoid: int = -1
    ) -> Sequence:
        """Starts a sequence of so many tokens: on a row, or on any row but `avoid`."""
        if self.dead:
            self.sweep()
        most = self.max_seq_len
        if not (0 <= tokens <= most and 0 <= expected <= most):
            check_tokens(tokens, most)
            check_tokens(expected, most)
        if not (row is None or 0 <= row < self.max_sequences) or not 0 <= key < KEYS:
            raise OutOfRangeError(f"asked for row {row} of {self.max_sequences}, and for key {key}")
        sequence, ask, wanted = self.kind(self), Ask(), -2 - avoid if row is None else row
        cell, handle = sequence.cell.buffer_info()[0], self.pool.current_handle()
        code = entries.adopt(self.address, tokens, expected, key, wanted, handle, cell, ask.address)
        while code == codes.NEEDS:
            if self.pool.change(Ask(), entries.plan_empty, self.address, wanted) < 0:
                code = codes.NO_ROWS
                break
            code = entries.adopt(self.address, tokens, expected, key, wanted, handle, cell, ask.address)
        self._started(sequence, code, ask, wanted)
        if ask.words[ASKED] < tokens:
            try:
                self.grow(cell, 1, tokens)
            except BaseException:
                if ask.words[AVAILABLE]:
                    self.state[0]["adopted"] -= 1
                with suppress(VmmkvError):  # else it is freed when it is collected
                    self.free((sequence,))
                raise
        return sequence

    def _started(self, sequence: Sequence, code: int, ask: Ask, row: int) -> None:
        """Notes the ticket of a sequence that was started, or raises the error of its start."""
        if code < 0:
            if code == codes.GONE:
                raise UseAfterFreeError("the cache was closed; make a new one")
            if code not in (codes.NO_ROWS, codes.TAKEN):
                raise self.pool.error(code, ask)
            if row >= 0 and self.owners[row]:
                raise OutOfRowsError(
                    f"row {row} belongs to sequence {self.owners[row]}; free that, or take another row"
                )
            raise OutOfRowsError(f"all rows of max_sequences={self.max_sequences} belong to live sequences; free some")
        sequence.ticket = sequence.cell[0]
        self.pool.keep_stream(ask)
        if code == codes.RING:
            self.pool.ring()

    def _end(self, tickets: array[int]) -> Exception | None:
        """Ends sequences. Returns the error of a call that has ended none."""
        ask, (address, count) = Ask(), tickets.buffer_info()
        code = entries.free(self.address, address, count, self.pool.current_handle(), ask.address)
        return self.pool.error(code, ask) if code < 0 else None

    def sweep(self) -> None:
        """Ends sequences that were collected."""
        for watch in list(self.dead):
            if self._end(watch.cell):  # a graph is being captured: later
                return
            with suppress(ValueError):  # another thread has been first
                self.dead.remove(watch)
            self.watches.discard(watch)

    def free(self, sequences: Iterable[Sequence]) -> None:
        """Ends sequences, with one fence for all; none while a graph is captured on one of their streams."""
        batch = list(sequences)
        self.check_own(batch)
        if error := self._end(array("q", [each.ticket for each in batch])):
            raise error

    def check_own(self, sequences: Iterable[Sequence]) -> None:
        """Raises `ArgumentError` for a sequence of another cache."""
        if any(each.cache is not self for each in sequences):
            raise ArgumentError("got a sequence of another cache")

    # ------------------------------------------------------------------ tokens

    def extend(self, sequences: Iterable[Sequence], tokens: Any, *, starts: Iterable[int] | None = None) -> None:
        """Makes room for more tokens in sequences, one number for all or one for each: in all of them or none. `starts`
        are for sequences without tokens, the first token that will be read."""
        tickets = array("q", [each.ticket for each in sequences])
        at_tickets, count = tickets.buffer_info()
        counts = None if isinstance(tokens, int) else array("q", tokens)
        begins = None if starts is None else array("q", starts)
        for each in (*((tokens,) if counts is None else counts), *(begins or ())):
            check_tokens(each, self.max_seq_len)
        if any(each is not None and len(each) != count for each in (counts, begins)):
            raise ValueError(f"got {count} sequences, and not one number for each")
        each = tokens if counts is None else -1
        at_counts = counts.buffer_info()[0] if counts else 0
        code, ask = codes.NEEDS, Ask()
        if starts is None:
            code = entries.grow(self.address, at_tickets, count, each, at_counts, ask.address)
        if code == codes.RING:
            self.pool.ring()
        elif code != codes.DONE:
            self.grow(at_tickets, count, each, counts, begins)

    def grow(
        self, tickets: int, count: int, each: int, counts: array[int] | None = None, starts: array[int] | None = None
    ) -> None:
        """`extend` for tickets at an address, where pages may have to be mapped; `each` counts without `counts`."""
        if self.dead:
            self.sweep()
        ask, begins = Ask(), starts.buffer_info()[0] if starts else 0
        arguments = self.address, tickets, count, each, counts.buffer_info()[0] if counts else 0, begins
        code = self.pool.change(ask, entries.plan_growth, *arguments)
        while code in (codes.PART, codes.BROKEN, codes.STALE):
            row = ask.words[ROW_AT]
            if code == codes.BROKEN:
                self.repair(int(self.owners[row]) << ROW_BITS | row)
            elif code == codes.PART:  # the pages behind its tokens are shared
                self.part(int(self.owners[row]) << ROW_BITS | row, int(self.lengths[row]))
            code = self.pool.change(ask, entries.plan_growth, *arguments)
        if code < 0:
            raise self.error(code, ask)

    def repair(self, ticket: int) -> None:
        """Maps what a row lacks where it was to have a copy of its own, and a call failed."""
        if self.rows["broken"][ticket & ROW_MASK]:
            self.pool.change(Ask(), entries.plan_repair, self.address, ticket)

    def part(self, ticket: int, token: int) -> None:
        """Makes a row the only one with its pages from a token on, a frame at a time: the tokens will be written over.
        Raises `OutOfPagesError` where there is no room for all copies."""
        size = self.pool.driver.page_size
        unsharing.part_from(self, ticket, [token * record // size for record in self.records], token)

    def keep(self, sequence: Sequence, start: int, length: int) -> None:
        """Drops all tokens of a sequence but `[start, length)`; -1 leaves a bound as it is."""
        ask = Ask()
        code = entries.keep(self.address, sequence.ticket, start, length, ask.address)
        if code < 0:
            raise self.error(code, ask)

    def share(self, source: Sequence, tokens: int) -> Sequence:
        """Starts a sequence with the first tokens of another: full frames are shared, the rest copied."""
        check_tokens(tokens, self.max_seq_len)
        self.check_own((source,))
        row = source.record_index()
        sequence = self.start(key=int(self.rows["key"][row]), avoid=row)
        try:
            self.share_into(sequence.ticket, source.ticket, tokens)
        except BaseException:
            with suppress(VmmkvError):  # else it is freed when it is collected
                self.free((sequence,))
            raise
        return sequence

    def share_into(self, ticket: int, source: int, tokens: int, frames_at: int = 0) -> None:
        """Starts a sequence without tokens with the first tokens of `source`, a ticket: see `plan_share`."""
        ask, arguments = Ask(), (self.address, ticket, source, tokens, tokens, frames_at)
        while (code := self.pool.change(ask, entries.plan_share, *arguments)) == codes.BROKEN:
            self.repair(source)
        if code < 0:
            raise self.error(code, ask)

    def adopt_kept(self, row: int, last: int, tokens: int, length: int = 0, expected: int = 0) -> Sequence | None:
        """Starts a sequence on a parked row, with tokens of its last sequence, and of `length` tokens if these lie on
        its pages; None if they are gone."""
        pool, most = self.pool, self.max_seq_len
        if min(row, tokens, length, expected) < 0 or row >= self.max_sequences or max(tokens, length, expected) > most:
            raise OutOfRangeError(f"asked for row {row} of {self.max_sequences}, {tokens}, {length}, {expected} tokens")
        sequence, ask, handle = self.kind(self), Ask(), pool.current_handle()
        arguments = row, last, tokens, length, expected, handle, sequence.cell.buffer_info()[0], ask.address
        while (code := entries.adopt_kept(self.address, *arguments)) == codes.NO_PAGES and pool.gain_budget_for(ask):
            pass
        if code == codes.GONE:
            return None
        self._started(sequence, code, ask, row)
        return sequence

    def record_stream(self, sequence: Sequence, stream: Any) -> None:
        """Names a stream that uses a sequence. Raises `ArgumentError` or `DeviceError` for what is no stream of the
        device."""
        check_stream(stream, self.pool.driver.device)
        ask = Ask()
        code = entries.record_stream(self.address, sequence.ticket, handle_of(stream), ask.address)
        if code < 0:
            raise gone() if code == codes.GONE else self.pool.error(code, ask)
        self.pool.keep_stream(ask, stream)

    def batch(self, sequences: Iterable[Sequence]) -> Batch:
        """A batch handle: sequences that grow together step by step."""
        return Batch(self, sequences)

    def error(self, code: int, ask: Ask) -> Exception:
        """What a code about sequences is raised as."""
        errors: dict[int, Callable[[], Exception]] = {
            codes.GONE: gone,
            codes.TOO_LONG: lambda: too_long(ask.words[ASKED], self.max_seq_len),
            codes.TWICE: lambda: ValueError("a sequence is named twice"),
            codes.NO_TOKEN: no_token,
            codes.SUSPENDED: suspended,
            codes.CHANGED: lambda: BusyError("another thread has changed the sequence meanwhile"),
        }
        return errors[code]() if code in errors else self.pool.error(code, ask)

    # ------------------------------------------------------------------ the end

    def owner(self) -> Views:
        """What a tensor over a range is to hold. A cache that holds such tensors itself drops them in `__del__`."""
        if (views := self.views()) is None:
            views = Views([*self.addresses])
            self.views = weakref.ref(views)
        return views

    def trim_own(self) -> int:
        """Gives the cache's surplus, and free pages, back to the driver; returns the number of pages."""
        while self.pool.change(Ask(), entries.plan_trim_own, self.address, TRIMMED) != codes.GONE:
            pass
        return self.pool.trim_to(self.pool.word("created") - self.pool.free_pages())

    def close(self) -> None:
        """Ends all sequences and gives all memory back, behind all work on the device. Addresses stay reserved while
        there are views of them. Where the device cannot be waited for, or the thread is in the middle of another
        change, nothing is closed. Where a later call fails, some memory is there still, and the cache can be closed
        again."""
        unsharing.check_copying(self.pool)
        with self.pool.copying:
            if self.is_closed:
                return
            wait_for_device(self.pool.driver)
            self.state[0]["closed"] = 1
        with suppress(DeviceLostError):  # its memory is lost, too
            self._empty()
            for each in self.addresses:
                each.is_empty = True
                if self.views() is None:
                    each.free()
        self.addresses = []  # the last view frees them
        self.is_closed = True

    def _empty(self) -> None:
        """Ends all sequences, and unmaps all rows."""
        with self.pool.copying:
            self.pool.unstage()
        rows = np.flatnonzero(self.owners[: self.max_sequences])
        if error := self._end(array("q", [int(self.owners[row]) << ROW_BITS | int(row) for row in rows])):
            raise error
        wait_for_device(self.pool.driver)
        for row in np.flatnonzero(self.extents["mapped"].reshape(self.max_sequences, -1).any(1)):
            self.pool.change(Ask(), entries.plan_empty, self.address, int(row))
        if self.pool.change(Ask(), entries.plan_close, self.address) == codes.TAKEN:
            raise BusyError("another thread is in the middle of a change; close the cache behind that")

    def __del__(self) -> None:
        """Closes a cache that nothing holds any more, or leaves that to the last view of it."""
        if (views := self.views()) is not None:
            views.cache = self
        else:
            self.end()

    def end(self, ends: Callable[[], bool] = is_finalizing) -> None:
        """Closes the cache; where that is not possible now, the pool does later. When the interpreter ends, memory goes
        with the process."""
        if ends() or "watches" not in vars(self):  # or it was interrupted before it lay on the pool
            return
        try:
            self.close()
        except VmmkvError:
            self.pool.close_later(self)
