"""Sequences that begin with cached tokens: arguments, errors and names over the compiled tree."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import blake2b
from itertools import count
from os import urandom
from sys import is_finalizing
from time import monotonic_ns
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..core import entries as core
from ..core.cache import Cache
from ..core.codes import BROKEN
from ..core.pool import LARGE, Ask, at, record, zeros
from ..core.sequence import Sequence, check_tokens
from ..core.tables import NOTE, ROW_MASK
from ..errors import (
    ArgumentError, BusyError, OutOfPagesError, OutOfRowsError, UnsupportedError, VmmkvError,
)  # fmt: skip
from ..events.log import Change, Kind
from ..events.naming import Name, name_of
from ..tier.host_tier import HostTier
from . import entries
from .offload import Offload
from .retention import Retention, words_of
from .tables import (
    ADOPT, CHUNK, CLEARED, EVENT_WORDS, FOUND, HEAP, HOLDER, NODE, NOTHING, NO_FRONT, OTHER_IDS, PART, REMOVED, SHAPE,
    STORED, TOO_FEW, TREE,
)  # fmt: skip

Ints = npt.NDArray[np.int64]

WORDS = len(FOUND.names or ())
ACTION, TOKENS, ROW_AT, LAST = range(WORDS)
"""Places in a `FOUND`."""
NO_WORDS = array("q", bytes(8 * WORDS))
REFUSALS: dict[int, tuple[type[Exception], str]] = {
    TOO_FEW: (ArgumentError, "{} tokens; the sequence has fewer. Compute them first"),
    NO_FRONT: (UnsupportedError, "tokens of a sequence that has released its front"),
    OTHER_IDS: (ValueError, "other token ids than were committed for the sequence; truncate it first"),
}
NODES = 4
"""Nodes for each page that the pool may have, and for each row."""
LONG = np.dtype(np.int64)
_salt = urandom(16)
DRAINED = 256
"""Events that are drained at a time."""
KINDS: dict[int, Kind] = {STORED: "stored", REMOVED: "removed", CLEARED: "cleared"}


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
        self, cache: Cache, *, events: int = 0, clock: Callable[[], int] = monotonic_ns, tier: HostTier | None = None
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
        """The key for a salt, an adapter and a tenant. Tokens of different keys never match."""
        names = name_of("salt", salt), name_of("adapter", adapter), name_of("tenant", tenant)
        return self.names.get(names) or self.names.setdefault(names, Key(next(self.numbers), tenant_key(names[2])))

    # ------------------------------------------------------------------ sequences

    def start(self, ids: Any, key: Key = NO_NAMES, *, whole: bool = True, expected: int = 0) -> tuple[Sequence, int]:
        """Starts a sequence with the cached tokens of a prompt; the last token of a prompt is never cached. Returns the
        sequence, and how many of its first tokens hold K and V.

        Args:
            ids: token ids, `[tokens]`, of int64.
            key: see `key`.
            whole: whether the sequence has room for all tokens of the prompt, or begins with the cached ones.
            expected: how many tokens it will have.
        """
        ids, most = np.ascontiguousarray(ids, np.int64), self.cache.max_seq_len
        length = check_tokens(len(ids), most) if whole else 0
        expected = max(check_tokens(expected, most), min(len(ids), most))
        found = NO_WORDS[:]
        words, out = (key.number, at(ids), max(len(ids) - 1, 0)), found.buffer_info()[0]
        action = entries.look_up(self.address, *words, out)
        sequence, cached = None, found[TOKENS]
        try:
            if action == ADOPT:
                sequence = self.cache.adopt_kept(found[ROW_AT], found[LAST], found[TOKENS], length, expected)
            if sequence is not None:
                if length > self.cache.lengths[found[ROW_AT]]:
                    sequence.extend(length - cached)
            elif action != NOTHING:
                sequence = self._share(key, words, length, expected, found)
                cached = found[TOKENS]
            else:
                sequence = self.cache.start(length, expected=expected, key=key.tenant)
            if self.offload:
                cached = self.offload.load(sequence, words, cached)
        except BaseException:
            if sequence is not None:
                with suppress(VmmkvError):  # else it is freed when it is collected
                    self.cache.free((sequence,))
            raise
        row = sequence.ticket & ROW_MASK
        self.tickets[row], self.keys[row] = sequence.ticket, key.number
        return sequence, cached

    def _share(
        self, key: Key, words: tuple[int, int, int], length: int, expected: int, found: array[int], over: int = 1
    ) -> Sequence:
        """Starts a sequence on shared frames, and on a copy of the tokens behind these. If there are too few pages for
        copies, it begins with fewer tokens."""
        row, ask = found[ROW_AT], Ask()
        try:
            sequence = self.cache.start(key=key.tenant, avoid=row)
        except OutOfRowsError:  # all others belong to live sequences
            if row < 0:
                raise
            sequence = self.cache.start(key=key.tenant)
        arguments = self.address, sequence.ticket, *words, length, expected, over, found.buffer_info()[0]
        try:
            code = self.pool.change(ask, entries.plan_hit, *arguments)
            if code < 0:
                raise self.cache.error(code, ask)
            if length > sequence.length:
                sequence.extend(length - sequence.length)
            return sequence
        except BaseException as error:
            with suppress(VmmkvError):
                self.cache.free((sequence,))
            if over and isinstance(error, OutOfPagesError):
                return self._share(key, words, length, expected, found, 0)
            raise

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
        """Makes the first tokens of a sequence known, which `start` has returned, or a fork that `inherit` knows: K and
        V of these ids are there, or are being written by work on streams that the sequence knows. Returns how many of
        its tokens are known; fewer than there are ids where the tree is full."""
        ids, ticket, ask = np.ascontiguousarray(ids, np.int64), sequence.ticket, Ask()
        row = sequence.record_index()
        if sequence.cache.address != self.cache.address or not self.is_own(sequence):
            raise ArgumentError(
                "asked to commit tokens of a sequence that was not started for reuse; start it with "
                "cache.sequence(token_ids=...)"
            )
        ranges = words_of(retention, self.clock()) if retention else None
        words = at(ids), len(ids), ranges.buffer_info()[0] if ranges else 0, len(ranges) // 4 if ranges else 0
        while (code := entries.commit(self.address, ticket, self.keys[row], *words, ask.address)) == BROKEN:
            self.cache.repair(ticket)
        if code in REFUSALS:
            kind, message = REFUSALS[code]
            raise kind(f"asked to commit {message.format(len(ids))}")
        if code < 0:
            raise self.cache.error(code, ask)
        return code

    def known(self, sequence: Sequence) -> tuple[tuple[Name, Name] | None, Ints]:
        """Salt and adapter of a sequence that was started here, and the ids of its known tokens; None, and no ids, of
        others."""
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
        """The pages that a sequence of these ids would share with live ones if it began now."""
        ids, found = np.ascontiguousarray(ids, np.int64), NO_WORDS[:]
        words = key.number, at(ids), max(len(ids) - 1, 0), found.buffer_info()[0]
        return int(entries.shared_pages(self.address, *words))

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


class Ring:
    """The events of a tree, for an `EventLog`, numbered from 0 on; the oldest are lost when there is no room for more.
    It keeps neither the tree nor its cache alive.

    Args:
        state: the tree's.
        keys: salts, adapters and tenants, and the tree's numbers for them, which grow.
    """

    def __init__(self, state: Any, keys: dict[tuple[Name, Name, Name], Any]) -> None:
        self.state, self.keys = state, keys
        self.names: dict[int, tuple[Name, Name, Name]] = {}

    @property
    def first(self) -> int:
        """The number of the oldest event that is there."""
        return int(self.state[0]["first_event"])

    def drain(self) -> tuple[int, list[Change]]:
        """Takes the oldest events. Returns the number of the first, and the events. One thread at a time may call
        this."""
        out = np.zeros((DRAINED, int(self.state[0]["event_words"])), np.int64)
        events = out[: entries.drain(at(self.state), at(out), DRAINED)]
        return int(events[0, 0]) if len(events) else self.first, [self._change(each) for each in events]

    def _change(self, words: np.ndarray[Any, np.dtype[np.int64]]) -> Change:
        _, kind, node, parent, key, begin, end, priority = words[:EVENT_WORDS].tolist()
        if key not in self.names:
            self.names = {number: names for names, (number, _tenant) in self.keys.copy().items()}
        ids = words[EVENT_WORDS : EVENT_WORDS + end - begin].copy()
        return Change(KINDS[kind], node, parent, self.names[key], begin, ids, priority)


def tenant_key(tenant: Name) -> int:
    """The key of a tenant's pages: 0 for None, else 61 bits of a digest that differs from process to process."""
    name = name_of("tenant", tenant)
    if name is None:
        return 0
    kind, content = ("b", name) if isinstance(name, bytes) else (type(name).__name__, str(name).encode())
    return 1 + (int.from_bytes(blake2b(kind.encode() + b":" + content, key=_salt, digest_size=8).digest()) >> 3)


def new_tree(cache: Cache, events: int, host_pages: int) -> Any:
    """The state of an empty tree."""
    size, records = cache.pool.driver.page_size, cache.records
    widest = min(-(-size // each) for each in records)
    grain, step = min(widest, CHUNK), CHUNK if widest > CHUNK else 0
    parts, shapes, words = zeros(len(records), PART), list[tuple[int, int, int]](), 0
    for index, (part, row_pages) in enumerate(zip(parts, cache.ranges["row_pages"].tolist())):
        pages = 1 if records[index] <= size else records[index] // size + 2
        shapes += [(index, 1, page) for page in range(pages)]
        shapes += [(index, LARGE, group) for group in range(pages // LARGE + 1)]
        part["record"], words = records[index], words + row_pages + 2
        part["pages_at"], part["groups_at"] = (at(zeros(row_pages + 2, LONG)) for _ in range(2))
    nodes = NODES * ((cache.pool.most + host_pages) * (widest // CHUNK + 1) + cache.max_sequences) + 64
    buckets, path, width = 1 << (nodes // NODES).bit_length(), cache.max_seq_len + 4, len(shapes)
    kinds = zeros(width, SHAPE)
    kinds[:] = shapes
    event_words = EVENT_WORDS + grain
    counts = {
        "ids_at": nodes * grain, "slots_at": nodes * width, "marks_at": nodes * width, "buckets_at": buckets,
        "path_at": path, "list_at": words, "events_at": events * event_words,
    }  # fmt: skip
    places = {name: at(zeros(count, LONG)) for name, count in counts.items()}
    heaps = [
        record(HEAP, room=nodes, **{name: at(zeros(nodes, LONG)) for name in ("items_at", "places_at", "keys_at")})
        for _ in range(2)
    ]
    return record(
        TREE, cache=cache.address, page_size=size, large=LARGE, ranges=len(records), parts_at=at(parts), step=step,
        grain=grain, width=width, shapes_at=at(kinds), nodes=nodes, nodes_at=at(zeros(nodes, NODE)), fresh=1,
        mask=buckets - 1, holders_at=at(zeros(cache.max_sequences, HOLDER)), num_rows=cache.max_sequences, path=path,
        order=at(heaps[0]), timers=at(heaps[1]), event_words=event_words,
        num_events=events, **places,
    )  # fmt: skip
