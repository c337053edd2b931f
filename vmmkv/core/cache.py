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

from ..driver.fence import Fence, wait_for_device
from ..errors import (
    ArgumentError,
    BusyError,
    OutOfPagesError,
    OutOfRangeError,
    OutOfRowsError,
    SequenceTooLongError,
    UseAfterFreeError,
    VmmkvError,
)
from ..layout import KVLayout
from . import entries
from .mapper import Mapper
from .pool import (
    ASKED,
    FRESH,
    LARGE,
    NO_LIMIT_PAGES,
    ROW_AT,
    SLOTS_AT,
    TICK,
    Ask,
    Pool,
    at,
    busy,
    record,
    zeros,
)
from .tables import (
    BROKEN,
    CACHE,
    CHANGED,
    DONE,
    EXTENT,
    GONE,
    LISTS,
    NEEDS,
    NO_ROWS,
    NO_TOKEN,
    PART,
    RANGE,
    RING,
    ROW,
    ROW_BITS,
    ROW_MASK,
    STALE,
    TAKEN,
    TOO_LONG,
    TWICE,
)


class Watch(weakref.ref["Sequence"]):
    """A weak reference to a sequence, queued for `sweep` when the sequence is collected."""

    __slots__ = ("cell",)
    cell: array[int]


class Sequence:
    """A sequence of a `Cache`: a row's owner number and the row, in one integer."""

    __slots__ = ("__weakref__", "cache", "cell")

    def __init__(self, cache: Cache) -> None:
        self.cache, self.cell = cache, array("q", (0,))
        watch = Watch(self, cache._dead.append)
        watch.cell = self.cell
        cache._watches.add(watch)

    @property
    def ticket(self) -> int:
        """The ticket: its name in compiled code."""
        return self.cell[0]

    @property
    def row(self) -> int:
        """Its row."""
        return self.record_index()

    def record_index(self) -> int:
        """The row. Raises `UseAfterFreeError`."""
        ticket = self.cell[0]
        row = ticket & ROW_MASK
        if not ticket or self.cache.owners[row] != ticket >> ROW_BITS:
            raise gone()
        return row

    @property
    def length(self) -> int:
        """Tokens so far, including those before `start`."""
        return int(self.cache.lengths[self.record_index()])

    @property
    def start(self) -> int:
        """The first token that it still has."""
        return int(self.cache.starts[self.record_index()])

    @property
    def capacity(self) -> int:
        """The length up to which it grows without a driver call."""
        return int(self.cache.capacities[self.record_index()])

    def extend(self, tokens: int) -> None:
        """Makes room for more tokens: see `Cache.extend`."""
        cache = self.cache
        check_tokens(tokens, cache.max_seq_len)
        code = entries.grow_one(cache.address, self.cell[0], tokens, -1)
        if code == RING:
            cache.pool.ring()
        elif code != DONE:
            cache.grow(self.cell.buffer_info()[0], 1, tokens)

    def extend_in_place(self, tokens: int, held: int = -1) -> bool:
        """Makes room for more tokens if their pages are mapped, and the length is `held` or that is negative."""
        check_tokens(tokens, self.cache.max_seq_len)
        code = entries.grow_one(self.cache.address, self.cell[0], tokens, held)
        if code == RING:
            self.cache.pool.ring()
        return code >= DONE

    def truncate(self, tokens: int) -> None:
        """Drops tokens from one on. Raises `ValueError` for one that it does not have."""
        self.cache.keep(self, -1, check_tokens(tokens, self.cache.max_seq_len))

    def release_before(self, token: int) -> None:
        """Drops tokens in front of one. Raises `ValueError` for one that it does not have."""
        self.cache.keep(self, check_tokens(token, self.cache.max_seq_len), -1)

    def fork(self) -> Sequence:
        """Starts a sequence with the same tokens."""
        return self.cache.share(self, self.length)

    def record_stream(self, stream: Any) -> None:
        """Names a stream that uses the sequence."""
        self.cache.record_stream(self, stream)

    def free(self) -> None:
        """Ends the sequence."""
        self.cache.free((self,))


class Cache:
    """Rows of virtual memory on a pool.

    Args:
        pool: the physical memory.
        layout: the shape of a token.
        max_sequences: rows.
        max_seq_len: tokens of a row.
        limit: the most pages that it may use; None is all of the pool.
        reserved: pages that it can have at any time.
        lookahead: tokens behind each sequence for which the mapper maps pages.
        overread: tokens behind each length for which pages are mapped.
        large: whether prompts go on large frames.
        scrub: whether memory is filled before another sequence can read it.
    """

    def __init__(
        self,
        pool: Pool,
        layout: KVLayout,
        max_sequences: int,
        max_seq_len: int,
        *,
        limit: int | None = None,
        reserved: int = 0,
        lookahead: int = 0,
        overread: int = 0,
        large: bool = True,
        scrub: bool = False,
    ) -> None:
        if not (0 < max_sequences <= ROW_MASK and max_seq_len > 0 and lookahead >= 0 and overread >= 0):
            raise ArgumentError(
                f"got max_sequences={max_sequences}, max_seq_len={max_seq_len}, lookahead={lookahead}, "
                f"overread={overread}; there may be up to {ROW_MASK} rows, of a token at least"
            )
        self.pool, self.layout, self.max_sequences, self.max_seq_len = pool, layout, max_sequences, max_seq_len
        records, size = layout.record_bytes, pool.driver.page_size
        self.ranges = zeros(len(records), RANGE)
        for part, nbytes in zip(self.ranges, records):
            row_pages = -(-(max_seq_len + overread) * nbytes // size)
            row_pages = -(-row_pages // LARGE) * LARGE if row_pages >= LARGE and large else row_pages
            pages = max_sequences * row_pages
            part["record"], part["row_pages"] = nbytes, row_pages
            part["address"], part["pages_at"] = pool.driver.reserve(pages * size), at(zeros(pages, np.dtype(np.int32)))
        self.rows = zeros(max_sequences + LISTS, ROW)
        self.extents = zeros(max_sequences * len(records), EXTENT)
        self.state = record(
            CACHE, pool=pool.address, num_rows=max_sequences, ranges=len(records),
            ranges_at=at(self.ranges), rows_at=at(self.rows), extents_at=at(self.extents), max_tokens=max_seq_len,
            overread=overread, lookahead=lookahead, large=int(large), key_of_sequence=int(scrub),
            queue_at=at(zeros(max_sequences, np.dtype(np.int64))),
        )  # fmt: skip
        self.address = at(self.state)
        self._link_rows()
        self.owners, self.lengths = self.rows["owner"], self.rows["length"]
        self.starts, self.capacities = self.rows["start"], self.rows["capacity"]
        self._dead: deque[Watch] = deque()
        self._watches: set[Watch] = set()
        self.account = pool.opened(
            entries.open_cache, self.address, NO_LIMIT_PAGES if limit is None else limit, reserved
        )
        if lookahead and pool.mapper is None:
            pool.mapper = Mapper(pool)

    def _link_rows(self) -> None:
        """Puts all rows on the list of those without pages."""
        count, heads = self.max_sequences, np.arange(self.max_sequences, self.max_sequences + LISTS)
        rows, numbers = self.rows, np.arange(self.max_sequences)
        rows["next"][count:] = rows["prev"][count:] = rows["older"][count:] = rows["younger"][count:] = heads
        rows["next"][:count], rows["prev"][:count] = numbers + 1, numbers - 1
        rows["prev"][0], rows["next"][count], rows["prev"][count] = count, 0, count - 1
        rows["list"][count:] = -1

    # ------------------------------------------------------------------ sequences

    def sequence(
        self, tokens: int = 0, *, expected: int = 0, key: int = 0, row: int | None = None, avoid: int = -1
    ) -> Sequence:
        """Starts a sequence of so many tokens: on a row, or on any row but `avoid`."""
        if self._dead:
            self.sweep()
        check_tokens(tokens, self.max_seq_len)
        check_tokens(expected, self.max_seq_len)
        if not (row is None or 0 <= row < self.max_sequences) or not 0 <= key < KEYS:
            raise OutOfRangeError(f"asked for row {row} of {self.max_sequences}, and for key {key}")
        sequence = Sequence(self)
        self._adopt(sequence, tokens, expected, key, -2 - avoid if row is None else row)
        if tokens:
            try:
                sequence.extend(tokens)
            except BaseException:
                with suppress(VmmkvError):  # else it is freed when it is collected
                    self.free((sequence,))
                raise
        return sequence

    def _adopt(self, sequence: Sequence, tokens: int, expected: int, key: int, row: int) -> None:
        """Gives a sequence a row."""
        ask, handle = Ask(), self.pool.current_handle()
        arguments = tokens, expected, key, row, handle, sequence.cell.buffer_info()[0]
        code = entries.adopt(self.address, *arguments, ask.address)
        while code == NEEDS:
            if self.pool.change(Ask(), entries.plan_empty, self.address, row) < 0:
                code = NO_ROWS
                break
            code = entries.adopt(self.address, *arguments, ask.address)
        self._started(sequence, code, ask, row)

    def _started(self, sequence: Sequence, code: int, ask: Ask, row: int) -> None:
        """Watches a sequence that was started, or raises the error of its start."""
        if code < 0:
            if code == GONE:
                raise UseAfterFreeError("the cache was closed; make a new one")
            if code in (NO_ROWS, TAKEN):
                which = (
                    f"row {row} belongs to a live sequence" if code == TAKEN else "all rows belong to live sequences"
                )
                raise OutOfRowsError(f"asked for a sequence; {which} of max_sequences={self.max_sequences}. Free some")
            raise self.pool.error(code, ask)
        if ask.words[FRESH]:
            self.pool.driver.slot_streams[ask.words[FRESH] - 1] = self.pool.driver.current_stream()
        if code == RING:
            self.pool.ring()

    def sweep(self) -> None:
        """Ends sequences that were collected."""
        for watch in list(self._dead):
            ask = Ask()
            code = entries.free(self.address, watch.cell.buffer_info()[0], 1, self.pool.current_handle(), ask.address)
            if code < 0:  # a graph is being captured: later
                return
            with suppress(ValueError):  # another thread has been first
                self._dead.remove(watch)
            self._watches.discard(watch)

    def free(self, sequences: Iterable[Sequence]) -> None:
        """Ends sequences, with one fence for all. Sequences that were freed are ignored.

        Raises:
            StreamCaptureError: a CUDA graph is being captured on one of their streams. No sequence has ended.
        """
        batch, ask = list(sequences), Ask()
        self._check_own(batch)
        tickets = array("q", [each.cell[0] for each in batch])
        address, count = tickets.buffer_info()
        code = entries.free(self.address, address, count, self.pool.current_handle(), ask.address)
        if code < 0:
            raise self.pool.error(code, ask)

    def _check_own(self, sequences: Iterable[Sequence]) -> None:
        """Raises `ArgumentError` for a sequence of another cache."""
        if any(each.cache is not self for each in sequences):
            raise ArgumentError("got a sequence of another cache")

    # ------------------------------------------------------------------ tokens

    def extend(self, sequences: Iterable[Sequence], tokens: Any, *, starts: Iterable[int] | None = None) -> None:
        """Makes room for more tokens in sequences: all of them or none.

        Args:
            tokens: one number for all, or one for each.
            starts: for sequences without tokens, the first token that will be read.

        Raises:
            SequenceTooLongError, OutOfPagesError, DriverError, StreamCaptureError, UseAfterFreeError, BusyError: no
                sequence has changed.
            ValueError: a sequence is named twice, a number is negative, or there is not one for each.
        """
        tickets = array("q", [each.cell[0] for each in sequences])
        at_tickets, count = tickets.buffer_info()
        counts = None if isinstance(tokens, int) else array("q", tokens)
        begins = None if starts is None else array("q", starts)
        for each in (*((tokens,) if counts is None else counts), *(begins or ())):
            check_tokens(each, self.max_seq_len)
        if any(each is not None and len(each) != count for each in (counts, begins)):
            raise ValueError(f"got {count} sequences, and not one number for each")
        each = tokens if counts is None else -1
        at_counts = counts.buffer_info()[0] if counts else 0
        code = NEEDS
        if starts is None:
            code = entries.grow(self.address, at_tickets, count, each, at_counts, Ask().address)
        if code == RING:
            self.pool.ring()
        elif code != DONE:
            self.grow(at_tickets, count, each, counts, begins)

    def grow(
        self, tickets: int, count: int, each: int, counts: array[int] | None = None, starts: array[int] | None = None
    ) -> None:
        """`extend` for tickets at an address, where pages may have to be mapped; `each` counts without `counts`."""
        if self._dead:
            self.sweep()
        ask, begins = Ask(), starts.buffer_info()[0] if starts else 0
        arguments = self.address, tickets, count, each, counts.buffer_info()[0] if counts else 0, begins
        code = self.pool.change(ask, entries.plan_growth, *arguments)
        while code in (PART, BROKEN, STALE):
            if code != STALE:
                self._part_before(ask.words[ROW_AT], code)
            code = self.pool.change(ask, entries.plan_growth, *arguments)
        if code == RING:
            self.pool.ring()
        elif code < 0:
            raise self.error(code, ask)

    def _part_before(self, row: int, code: int) -> None:
        """Makes the pages behind a row's length writable: by a copy, or by a repair if the row is broken."""
        ticket = int(self.owners[row]) << ROW_BITS | row
        if code == BROKEN:
            self.repair(ticket)
            return
        self.part(ticket, int(self.lengths[row]))

    def repair(self, ticket: int) -> None:
        """Maps what a row lacks where it was to have a copy of its own, and a call failed."""
        if self.rows["broken"][ticket & ROW_MASK]:
            self.pool.change(Ask(), entries.plan_repair, self.address, ticket)

    def part(self, ticket: int, token: int) -> None:
        """Makes a row the only one with its pages from a token on, a frame at a time."""
        size = self.pool.driver.page_size
        self.part_from(ticket, [token * record_bytes // size for record_bytes in self.layout.record_bytes])

    def part_from(self, ticket: int, pages: list[int]) -> None:
        """`part`, from a page of each range on. Raises `OutOfPagesError` where there is no room for all copies."""
        self._check_copying()
        ask, firsts = Ask(), array("q", pages)
        with self.pool.copying:
            self._unstage()
            code = entries.can_part(self.address, ticket, firsts.buffer_info()[0], ask.address)
            if code < 0:
                raise self.error(code, ask)
            for part, page in enumerate(pages):
                while self._part_step(ticket, part, page):
                    pass

    def _check_copying(self) -> None:
        """Raises `BusyError` where the thread is in the middle of `part`, or the interpreter ends."""
        if self.pool.copying._is_owned() or is_finalizing():
            raise busy()

    def _part_step(self, ticket: int, part: int, page: int) -> bool:
        """Makes one step of `part`. Returns whether there may be more."""
        ask, before = Ask(), self.shared_end(ticket, part)
        try:
            code = self.pool.change(ask, entries.plan_part, self.address, ticket, part, page)
        except OutOfPagesError:  # unless parked rows alone have the frame, too
            if self.pool.change(Ask(), entries.plan_retired, self.pool.address, 1 << 40) == GONE:
                raise
            return True
        if code == GONE:
            raise gone()
        if code == BROKEN:
            self.repair(ticket)
            return True
        if ask.words[ROW_AT]:
            try:
                self._wait_for_row(ticket)
                code = self.pool.change(Ask(), entries.plan_swap, self.address, ticket, part)
            except BaseException:
                with suppress(VmmkvError):  # else the next growth, or copy, repairs the row
                    self.repair(ticket)
                with suppress(VmmkvError):  # else the next copy does it
                    self._unstage()
                raise
            if code < 0:
                self._unstage()
                return True
        return self.shared_end(ticket, part) > max(page, 0) and self.shared_end(ticket, part) != before

    def shared_end(self, ticket: int, part: int) -> int:
        """The page below which a row's pages may be shared."""
        return int(self.extents[(ticket & ROW_MASK) * len(self.ranges) + part]["shared"])

    def _unstage(self) -> None:
        """Drops a copy that was left in the staging range."""
        if self.pool.word("staged"):
            wait_for_device(self.pool.driver)
            self.pool.change(Ask(), entries.plan_unstage, self.pool.address)

    def _wait_for_row(self, ticket: int) -> None:
        """Waits for all work on a row."""
        ask = Ask()
        code = entries.fence(self.address, ticket, ask.address)
        if code < 0:
            raise gone() if code == GONE else self.pool.error(code, ask)
        Fence(self.pool.driver, ask.words[SLOTS_AT], ask.words[TICK]).wait()

    def keep(self, sequence: Sequence, start: int, length: int) -> None:
        """Drops all tokens of a sequence but `[start, length)`; -1 leaves a bound as it is."""
        ask = Ask()
        code = entries.keep(self.address, sequence.cell[0], start, length, ask.address)
        if code < 0:
            raise self.error(code, ask)

    def share(
        self,
        source: Sequence | int,
        tokens: int,
        *,
        key: int = 0,
        frames: array[int] | None = None,
        expected: int = 0,
        last: int | None = None,
    ) -> Sequence:
        """Starts a sequence with the first tokens of another, or of a row: full frames are shared, the rest copied.

        Args:
            source: a sequence, or the number of a parked row, or -1 where all tokens lie on `frames`.
            frames: the full frames in front, as a list of a guest.
            last: the owner number of the sequence that has left its tokens on the parked row; None is the last one.
        """
        check_tokens(tokens, self.max_seq_len)
        if isinstance(source, Sequence):
            self._check_own((source,))
            row, given = source.record_index(), source.ticket
            key = int(self.rows["key"][row])
        else:
            row, given = source, source
            if not -1 <= row < self.max_sequences or (row < 0 and frames is None):
                raise OutOfRangeError(f"asked for tokens of row {row} of {self.max_sequences}")
            if row >= 0:
                given = (int(self.rows["last"][row]) if last is None else last) << ROW_BITS | row
        sequence = self.sequence(key=key, expected=expected, avoid=row)
        try:
            self.share_into(sequence.ticket, given, tokens, frames.buffer_info()[0] if frames is not None else 0)
        except BaseException:
            with suppress(VmmkvError):  # else it is freed when it is collected
                self.free((sequence,))
            raise
        return sequence

    def share_into(self, ticket: int, source: int, tokens: int, frames_at: int = 0) -> None:
        """Starts a sequence without tokens with the first tokens of `source`, a ticket: see `share`."""
        ask, arguments = Ask(), (self.address, ticket, source, tokens, frames_at)
        while (code := self.pool.change(ask, entries.plan_share, *arguments)) == BROKEN:
            self.repair(source)
        if code < 0:
            raise self.error(code, ask)

    def adopt_kept(self, row: int, last: int, tokens: int, expected: int = 0) -> Sequence | None:
        """Starts a sequence on a parked row, with tokens of its last sequence; None if they are gone."""
        if not 0 <= row < self.max_sequences or not 0 <= expected <= self.max_seq_len:
            raise OutOfRangeError(f"asked for row {row} of {self.max_sequences}, and {expected} expected tokens")
        sequence, ask = Sequence(self), Ask()
        code = entries.adopt_kept(
            self.address, row, last, check_tokens(tokens, self.max_seq_len), expected, self.pool.current_handle(),
            sequence.cell.buffer_info()[0], ask.address,
        )  # fmt: skip
        if code == GONE:
            return None
        self._started(sequence, code, ask, row)
        return sequence

    def record_stream(self, sequence: Sequence, stream: Any) -> None:
        """Names a stream that uses a sequence."""
        from ..driver.driver import handle_of

        ask = Ask()
        code = entries.record_stream(self.address, sequence.ticket, handle_of(stream), ask.address)
        if code < 0:
            raise gone() if code == GONE else self.pool.error(code, ask)
        if ask.words[FRESH]:
            self.pool.driver.slot_streams[ask.words[FRESH] - 1] = stream

    def batch(self, sequences: Iterable[Sequence] = ()) -> Batch:
        """A batch handle: sequences that grow together step by step."""
        return Batch(self, sequences)

    def error(self, code: int, ask: Ask) -> Exception:
        """What a code about sequences is raised as."""
        if code == GONE:
            return gone()
        if code == TOO_LONG:
            return too_long(ask.words[ASKED], self.max_seq_len)
        if code == TWICE:
            return ValueError("a sequence is named twice")
        if code == NO_TOKEN:
            return no_token()
        if code == CHANGED:
            return BusyError("another thread has changed the sequence meanwhile")
        return self.pool.error(code, ask)

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Ends all sequences and gives all memory back, behind all work on the device. Where that fails, or is
        interrupted, no sequence can be started any more, and the cache can be closed again.

        Raises:
            StreamCaptureError, DriverError: some memory is there still.
            BusyError: the thread is in the middle of another change.
        """
        self._check_copying()
        with self.pool.copying:
            if not self.ranges["address"].any():
                return
            self.state[0]["closed"] = 1
            wait_for_device(self.pool.driver)
            self._unstage()
        rows = np.flatnonzero(self.owners[: self.max_sequences])
        tickets = array("q", [int(self.owners[row]) << ROW_BITS | int(row) for row in rows])
        ask = Ask()
        code = entries.free(
            self.address, tickets.buffer_info()[0], len(tickets), self.pool.current_handle(), ask.address
        )
        if code < 0:
            raise self.pool.error(code, ask)
        wait_for_device(self.pool.driver)
        for row in np.flatnonzero(self.extents["mapped"].reshape(self.max_sequences, -1).any(1)):
            self.pool.change(Ask(), entries.plan_empty, self.address, int(row))
        if self.pool.change(Ask(), entries.plan_close, self.address) == TAKEN:
            raise BusyError("another thread is in the middle of a change; close the cache behind that")

    def __del__(self, ends: Callable[[], bool] = is_finalizing) -> None:
        """Closes a cache that nothing holds any more; where that is not possible now, the pool's next change does. When
        the interpreter ends, memory goes with the process."""
        if ends() or "account" not in vars(self):  # or it was not made whole
            return
        try:
            self.close()
        except VmmkvError:
            self.pool.unclosed.append(self)


class Batch:
    """Sequences that grow together: an engine adds and removes them as requests come and go.

    Args:
        cache: the cache of all of them.
        sequences: the first ones.
    """

    def __init__(self, cache: Cache, sequences: Iterable[Sequence] = ()) -> None:
        self.cache, self._ask = cache, Ask()
        self.sequences = list(sequences)
        cache._check_own(self.sequences)
        self._list()

    def _list(self) -> None:
        """Lists the tickets of the sequences."""
        self._tickets = array("q", [each.cell[0] for each in self.sequences])
        self._at, self._count = self._tickets.buffer_info()

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence at the end."""
        self.cache._check_own((sequence,))
        self._count = -1  # until the list is right: an interruption may come
        self.sequences.append(sequence)
        self._list()

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence; the last one takes its place."""
        index = self.sequences.index(sequence)
        self._count = -1
        self.sequences[index:] = [self.sequences[-1], *self.sequences[index + 1 : -1]][
            : len(self.sequences) - index - 1
        ]
        self._list()

    def extend(self, tokens: int = 1) -> None:
        """Makes room for as many more tokens in each of them: in all or none. Errors are those of `Cache.extend`."""
        if self._count < 0:  # an interruption came before the list was right
            self._list()
        check_tokens(tokens, self.cache.max_seq_len)
        code = entries.grow(self.cache.address, self._at, self._count, tokens, 0, self._ask.address)
        if code == RING:
            self.cache.pool.ring()
        elif code != DONE:
            self.cache.grow(self._at, self._count, tokens)


KEYS = 1 << 62
"""Keys are below this."""


def no_token() -> ValueError:
    """What is raised for tokens that a sequence does not have."""
    return ValueError("asked for tokens that the sequence does not have")


def check_tokens(tokens: int, most: int) -> int:
    """A number of tokens: compiled code takes 64 bits, and rows have no more than `most`.

    Raises:
        ValueError, SequenceTooLongError: it is negative, or more.
    """
    if tokens < 0:
        raise ValueError(f"asked for {tokens} tokens; to drop tokens use truncate")
    if tokens > most:
        raise too_long(tokens, most)
    return tokens


def gone() -> UseAfterFreeError:
    """The error for a sequence that has ended."""
    return UseAfterFreeError("the sequence was freed; start a new one")


def too_long(length: int, most: int) -> SequenceTooLongError:
    """The error for a sequence that would outgrow its row."""
    return SequenceTooLongError(f"asked for {length} tokens; a row is max_seq_len={most} long")
