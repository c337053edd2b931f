"""Sequences that begin with cached tokens: arguments, errors and names over the compiled tree."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count
from sys import is_finalizing
from time import monotonic_ns
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..core import entries as core
from ..core.cache import Cache
from ..core.pool import LARGE, Ask, at, record, zeros
from ..core.sequence import Sequence, check_tokens
from ..core.tables import BROKEN, NOTE, ROW_MASK
from ..errors import (
    ArgumentError,
    BusyError,
    DtypeError,
    OutOfPagesError,
    OutOfRowsError,
    ShapeError,
    UnsupportedError,
    VmmkvError,
)
from ..events.naming import Name, name_of
from ..tier.host_tier import HostTier
from . import entries
from .names import tenant_key
from .offload import Offload
from .retention import Retention, words_of
from .ring import Ring
from .tables import (
    ADOPT,
    CHUNK,
    EVENT,
    FOUND,
    HOLDER,
    NO_FRONT,
    NODE,
    NOTES,
    NOTHING,
    OTHER_IDS,
    PART,
    TOO_FEW,
    TREE,
)

Ints = npt.NDArray[np.int64]

WORDS = len(FOUND.names or ())
ACTION, TOKENS, ROW_AT, LAST = range(4)
"""Places in a `FOUND`."""
NODES = 4
"""Nodes for each page that the pool may have, and for each row."""
WIDTHS = np.dtype(np.int64), np.dtype(np.int32)
"""Arrays of ids that are read as they are."""


class Key(NamedTuple):
    """What K and V depend on beside token ids, as numbers: of salt, adapter and tenant; and of the tenant alone."""

    number: int = 0
    tenant: int = 0


NO_NAMES = Key()
"""The key without salt, adapter and tenant."""


class Prefixes:
    """The prefix tree of a cache.

    Args:
        cache: the cache. It has no other guest.
        events: how many events are kept until they are drained; 0 keeps none.
        clock: nanoseconds, for priorities that end.
        tier: the cache's host memory, where evicted frames go first, if its lowest priority allows that.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        events: int = 0,
        clock: Callable[[], int] = monotonic_ns,
        tier: HostTier | None = None,
    ) -> None:
        self.cache, self.pool, self.clock = cache, cache.pool, clock
        self.names: dict[tuple[Name, Name, Name], Key] = {(None, None, None): NO_NAMES}
        self.numbers = count(1)
        self.tickets, self.keys = (array("q", bytes(8 * cache.max_sequences)) for _ in range(2))
        """By row: the sequence that was started here last, and the number of its key."""
        tier = tier if tier and tier.lowest_priority is not None else None
        self.state = new_tree(cache, events, tier.slots.limit if tier else 0)
        self.address = at(self.state)
        self.ring = Ring(self.state, self.names)
        self.offload = Offload(self.state, tier) if tier else None
        notes = zeros(8 * cache.max_sequences + 64, NOTE)
        core.join(cache.address, at(notes), len(notes))
        reference = weakref.ref(self)
        self.evictor: Callable[[int], int] = lambda pages: there.evict(pages) if (there := reference()) else 0
        cache.pool.evict.append(self.evictor)

    def key(self, salt: object = None, adapter: object = None, tenant: object = None) -> Key:
        """The key for a salt, an adapter and a tenant. Tokens of different keys never match.

        Raises:
            ArgumentError: a name is no text, bytes, whole number or None.
        """
        names = name_of("salt", salt), name_of("adapter", adapter), name_of("tenant", tenant)
        found = self.names.get(names)
        if found is None:
            found = self.names.setdefault(names, Key(next(self.numbers), tenant_key(names[2])))
        return found

    # ------------------------------------------------------------------ sequences

    def start(self, ids: Any, key: Key = NO_NAMES, *, whole: bool = True, expected: int = 0) -> tuple[Sequence, int]:
        """Starts a sequence with the cached tokens of a prompt. The last token of a prompt is never cached.

        Args:
            ids: token ids, `[tokens]`: an array of int64 or int32, or a list.
            key: see `key`.
            whole: whether the sequence has room for all tokens of the prompt, or begins with the cached ones.
            expected: how many tokens it will have.

        Returns:
            The sequence, and how many of its first tokens hold K and V.

        Raises:
            ArgumentError, ShapeError, DtypeError: the ids are no token ids.
            OutOfPagesError, OutOfRowsError, SequenceTooLongError, DriverError, StreamCaptureError: nothing has changed.
        """
        place, count, wide, _kept = ids_of(ids)
        length = check_tokens(count, self.cache.max_seq_len) if whole else 0
        expected = max(check_tokens(expected, self.cache.max_seq_len), min(count, self.cache.max_seq_len))
        found = array("q", bytes(8 * WORDS))
        words, out = (key.number, place, max(count - 1, 0), wide), found.buffer_info()[0]
        action = entries.look_up(self.address, *words, out)
        sequence, cached = None, 0
        if action == ADOPT:
            sequence = self.cache.adopt_kept(found[ROW_AT], found[LAST], found[TOKENS], expected)
            if sequence is not None:
                cached = found[TOKENS]
                entries.adopted(self.address, sequence.ticket, found[LAST], cached)
                self._extend(sequence, length - cached)
        if sequence is None and action != NOTHING:
            sequence, cached = self._share(key, words, length, expected, found)
        if sequence is None:
            sequence = self.cache.start(length, expected=expected, key=key.tenant)
        if self.offload:
            cached = self._load(sequence, words, cached)
        row = sequence.ticket & ROW_MASK
        self.tickets[row], self.keys[row] = sequence.ticket, key.number
        return sequence, cached

    def _share(
        self, key: Key, words: tuple[int, ...], length: int, expected: int, found: array[int]
    ) -> tuple[Sequence, int]:
        """Starts a sequence on shared frames, and on a copy of the tokens behind these. If there are too few pages for
        copies, it begins with fewer tokens."""
        pool, out = self.pool, found.buffer_info()[0]
        for over in (1, 0):
            sequence = self._start_beside(found[ROW_AT], key)
            ask, arguments = Ask(), (self.address, sequence.ticket, *words, length, expected, over, out)
            try:
                code = pool.change(ask, entries.plan_hit, *arguments)
                if code < 0:
                    raise self.cache.error(code, ask)
                if length > sequence.length:
                    sequence.extend(length - sequence.length)
            except BaseException as error:
                self._end(sequence)
                if over and isinstance(error, OutOfPagesError):
                    continue
                raise
            break
        return sequence, found[TOKENS]

    def _start_beside(self, row: int, key: Key) -> Sequence:
        """Starts a sequence on another row than a parked one; on that one if all others belong to live sequences."""
        try:
            return self.cache.start(key=key.tenant, avoid=row)
        except OutOfRowsError:
            if row < 0:
                raise
            return self.cache.start(key=key.tenant)

    def _extend(self, sequence: Sequence, tokens: int) -> None:
        """Makes room for more tokens, or ends the sequence."""
        try:
            if tokens > 0:
                sequence.extend(tokens)
        except BaseException:
            self._end(sequence)
            raise

    def _load(self, sequence: Sequence, words: tuple[int, ...], cached: int) -> int:
        """Copies tokens from the host, or ends the sequence. Returns how many hold K and V then."""
        try:
            return self.offload.load(sequence, words, cached) if self.offload else cached
        except BaseException:
            self._end(sequence)
            raise

    def _end(self, sequence: Sequence) -> None:
        """Ends a sequence, at the latest when it is collected."""
        with suppress(VmmkvError):
            self.cache.free((sequence,))

    def fork(self, sequence: Sequence) -> Sequence:
        """Starts a sequence with the same tokens, of which the same are known."""
        fork = sequence.fork()
        self.inherit(fork, sequence)
        return fork

    def inherit(self, fork: Sequence, sequence: Sequence) -> None:
        """Makes known of a fork what is known of its parent."""
        entries.inherit(self.address, fork.ticket, sequence.ticket)
        row, source = fork.ticket & ROW_MASK, sequence.ticket & ROW_MASK
        self.tickets[row] = fork.ticket if self.tickets[source] == sequence.ticket else 0
        self.keys[row] = self.keys[source]

    def reordered(self, batch: Iterable[Sequence], sources: Iterable[Sequence]) -> None:
        """Notes that sequences have come to hold the tokens of others: they have the keys of these."""
        keys = [(self.tickets[each.row] == each.ticket, self.keys[each.row]) for each in sources]
        for sequence, (is_known, key) in zip(batch, keys):
            self.tickets[sequence.row], self.keys[sequence.row] = sequence.ticket if is_known else 0, key

    def commit(self, sequence: Sequence, ids: Any, retention: Iterable[Retention] = ()) -> int:
        """Makes the first tokens of a sequence known: K and V of these ids are there, or are being written by work on
        streams that the sequence knows. Returns how many of its tokens are known; fewer than there are ids where the
        tree is full.

        Args:
            sequence: a live sequence that `start` or `fork` has returned.
            ids: ids of all its tokens from the first one on.
            retention: how long tokens are kept.

        Raises:
            ArgumentError: the sequence has fewer tokens, or was not started here.
            ValueError: other ids were committed for it.
            UnsupportedError: it has released its front.
            UseAfterFreeError, RetentionError, StreamCaptureError, DriverError: nothing has changed.
        """
        place, count, wide, _kept = ids_of(ids)
        ticket, ask = sequence.ticket, Ask()
        row = sequence.record_index()
        if sequence.cache.address != self.cache.address or not self.is_own(sequence):
            raise ArgumentError("asked to commit tokens of a sequence that Prefixes.start has not returned")
        ranges = words_of(retention, self.clock()) if retention else None
        words = (place, count, wide, ranges.buffer_info()[0] if ranges else 0, len(ranges) // 4 if ranges else 0)
        while (code := entries.commit(self.address, ticket, self.keys[row], *words, ask.address)) == BROKEN:
            self.cache.repair(ticket)
        if code < 0:
            raise self._error(code, count, ask)
        return code

    def known(self, sequence: Sequence) -> tuple[tuple[Name, Name] | None, Ints]:
        """Salt and adapter of a sequence that was started here, and the ids of its known tokens; None, and no ids, of
        others.

        Raises:
            UseAfterFreeError: it has ended.
        """
        row = sequence.record_index()
        if not self.is_own(sequence) or sequence.start:
            return None, np.empty(0, np.int64)
        ids = np.empty(self.cache.max_seq_len, np.int64)
        found = entries.known_ids(self.address, sequence.ticket, at(ids), len(ids))
        names = next(names for names, key in self.names.copy().items() if key.number == self.keys[row])
        return names[:2], ids[: max(found, 0)].copy()

    def is_own(self, sequence: Sequence) -> bool:
        """Whether a live sequence was started here, so that tokens of it can be committed."""
        return self.tickets[sequence.ticket & ROW_MASK] == sequence.ticket

    def shared_pages(self, ids: Any, key: Key = NO_NAMES) -> int:
        """The pages that a sequence of these ids would share with live ones if it began now.

        Raises:
            ArgumentError, ShapeError, DtypeError: the ids are no token ids.
        """
        place, tokens, wide, _kept = ids_of(ids)
        found = array("q", bytes(8 * WORDS))
        words = key.number, place, max(tokens - 1, 0), wide
        pages: int = entries.shared_pages(self.address, *words, found.buffer_info()[0])
        return pages

    def _error(self, code: int, count: int, ask: Ask) -> Exception:
        """The exception for a refusal of a commit."""
        if code == TOO_FEW:
            return ArgumentError(f"asked to commit {count} tokens; the sequence has fewer. Compute them first")
        if code == NO_FRONT:
            return UnsupportedError("asked to commit tokens of a sequence that has released its front")
        if code == OTHER_IDS:
            return ValueError("asked to commit other token ids than were committed for the sequence; truncate it first")
        return self.cache.error(code, ask)

    # ------------------------------------------------------------------ memory

    def frames(self) -> Any:
        """The frames that are held, each once: an array."""
        state = self.state[0]
        count = int(state["fresh"] * state["width"])
        words = np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(int(state["slots_at"])))
        return np.unique(words[words > 0]) - 1

    def evict(self, pages: int) -> int:
        """Drops cached frames, which may go to the host first, until so many pages are free or can be reclaimed.
        Returns the number of pages."""
        if self.offload:
            return self.offload.evict(pages, self.clock())
        return int(entries.evict(self.address, pages, self.clock(), 0, 0, 0))

    def close(self) -> None:
        """Drops all frames, and forgets all tokens. The cache stays, without a guest that evicts."""
        with self.pool.lock:
            entries.clear(self.address)
        if self.offload:
            with suppress(BusyError):  # the tier makes them make way
                self.offload.close()
        with suppress(ValueError):
            self.pool.evict.remove(self.evictor)

    end = close

    def __del__(self, ends: Callable[[], bool] = is_finalizing) -> None:
        """Drops all frames of a tree that nothing holds any more; in the middle of a change, the pool's next change
        does that."""
        if ends() or "evictor" not in vars(self):
            return
        if self.pool.lock._is_owned():
            self.pool.close_later(self)
        else:
            self.close()


def new_tree(cache: Cache, events: int, host_pages: int) -> Any:
    """The state of an empty tree."""
    size, records = cache.pool.driver.page_size, [int(each) for each in cache.ranges["record"]]
    widest = min(-(-size // each) for each in records)
    grain, step = min(widest, CHUNK), CHUNK if widest > CHUNK else 0
    parts, width, words = zeros(len(records), PART), 0, 0
    for part, each in zip(parts, cache.ranges):
        pages, row_pages = (1 if each["record"] <= size else each["record"] // size + 2), int(each["row_pages"])
        part["record"], part["single"], part["large"] = each["record"], width, width + pages
        part["pages_at"], part["groups_at"] = (at(zeros(row_pages + 2, np.dtype(np.int64))) for _ in range(2))
        width, words = width + pages + pages // LARGE + 1, words + row_pages + 2
    nodes = NODES * ((cache.pool.most + host_pages) * (widest // CHUNK + 1) + cache.max_sequences) + 64
    buckets = 1 << (nodes // NODES).bit_length()
    kinds, path = array("q", sorted({*records})), cache.max_seq_len + 4
    kept = zeros(len(kinds), np.dtype(np.int64))
    kept[:] = kinds
    ring, ids = zeros(events, EVENT), zeros(events * grain, np.dtype(np.int64))
    tables = {"nodes_at": NODE, "holders_at": HOLDER, "notes_at": NOTE}
    counts = {"nodes_at": nodes, "holders_at": cache.max_sequences, "notes_at": NOTES}
    longs = {
        "ids_at": nodes * grain, "slots_at": nodes * width, "marks_at": nodes * width, "buckets_at": buckets,
        "order_at": nodes, "timers_at": nodes, "path_at": path, "list_at": words,
    }  # fmt: skip
    places = {name: at(zeros(counts[name], dtype)) for name, dtype in tables.items()}
    places |= {name: at(zeros(count, np.dtype(np.int64))) for name, count in longs.items()}
    return record(
        TREE, cache=cache.address, page_size=size, large=LARGE, ranges=len(records), parts_at=at(parts),
        kinds=len(kept), kinds_at=at(kept), step=step, grain=grain, width=width, nodes=nodes, fresh=1,
        mask=buckets - 1, num_rows=cache.max_sequences, path=path, events_at=at(ring), event_ids_at=at(ids),
        num_events=events, **places,
    )  # fmt: skip


def ids_of(ids: Any) -> tuple[int, int, int, object]:
    """Token ids for compiled code: an address, their number, whether they have 64 bits, and what keeps the memory.

    Raises:
        ArgumentError, ShapeError, DtypeError: they are no token ids.
    """
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1:
            raise ShapeError(f"got token ids of shape {ids.shape}; give ids of one sequence, [tokens]")
        if ids.dtype not in WIDTHS or not ids.flags.c_contiguous:
            if ids.dtype.kind not in "iu" or not np.can_cast(ids.dtype, np.int64):
                raise DtypeError(f"got token ids of {ids.dtype}; they are integers that int64 holds")
            ids = np.ascontiguousarray(ids, np.int64)
        return ids.__array_interface__["data"][0], len(ids), int(ids.itemsize == 8), ids
    if not isinstance(ids, array):
        try:
            ids = array("q", ids)
        except (TypeError, OverflowError) as error:
            raise ArgumentError(f"got token ids that are no whole numbers of 64 bits: {error}") from None
    if ids.typecode not in "lqi":
        raise DtypeError(f"got token ids as an array of {ids.typecode!r}; they are of 32 or 64 bits, with a sign")
    return ids.buffer_info()[0], len(ids), int(ids.itemsize == 8), ids
