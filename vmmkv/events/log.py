"""Events, and a log of them: what its reader makes of the changes that a cache writes to a ring.

A cache hashes nothing, and waits for nothing: it writes token ids to its ring, and the oldest changes are lost when
that is full. The thread that drains the log hashes blocks, and polls the ring while it waits.

Block `i` of a sequence is tokens `[i * block_size, (i + 1) * block_size)`. Its digest is SHA-256 of the digest of the
block before it and its own token ids as little-endian int64; what comes before the first block is a digest of salt,
adapter, tenant and block size (`naming`). So a digest is the same in every process, and equal only for equal prefixes
under the same names. Events carry the last 8 of its 32 bytes, as a big-endian number.

Invariants, with the log's lock free:
 1. `_position` is the number of the change that is read next. Changes in front of it have become events.
 2. `_links` has the nodes with tokens that were reported and not removed since; `_counts` says of a block how many of
    these have it, since two nodes may begin with the same tokens.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, BudgetError, LayoutError
from ..layout import as_index
from .naming import Name, Names, root_digest, told_names

POLL = 0.005
"""Seconds between two looks at the ring while a reader waits."""
Kind = Literal["stored", "removed", "cleared"]


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Consecutive blocks of one sequence.

    Attributes:
        hashes: one per block, unsigned 64-bit numbers.
        parent: the hash of the block before the first one; None at the beginning of the sequence.
        ids: their token ids, int64, `[len(hashes) * size]`.
        start: the position of the first token in the sequence.
        size: tokens in a block.
        salt: the salt of the sequence, if any.
        adapter: the LoRA adapter that they were computed with, by name or number, if any.
        tenant: the sequence's tenant, if any.
    """

    hashes: tuple[int, ...]
    parent: int | None
    ids: NDArray[np.int64]
    start: int
    size: int
    salt: str | None
    adapter: str | int | None
    tenant: str | int | None


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """An event. `time`: when the log read it, in seconds since 1970."""

    time: float


@dataclass(frozen=True, slots=True, eq=False)
class Created(Event):
    """A cache has been made. It is empty."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored(Event):
    """Blocks can be reused from now on. `blocks`: consecutive ones of one sequence; `priority`: from 0 to 100."""

    blocks: Blocks
    priority: int


@dataclass(frozen=True, slots=True, eq=False)
class Removed(Event):
    """Blocks are gone. `hashes`: of the blocks, the last in the sequence first."""

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Cleared(Event):
    """All blocks that were reported are gone."""


@dataclass(frozen=True, slots=True, eq=False)
class Dropped(Event):
    """Events are missing here: nothing drained the log in time. Blocks that were reported may be gone. `count`: the
    number of changes of the cache that are missing."""

    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """The end of some tokens of a sequence, from which later tokens are hashed: the sequence's names, the digest of the
    last whole block, or of the root, the token ids behind that block, and the hashes of blocks that end within these
    tokens."""

    names: Names
    digest: bytes
    rest: NDArray[np.int64]
    hashes: tuple[int, ...] = ()

    @classmethod
    def root(cls, names: Names, block_size: int) -> Link:
        """The beginning of all sequences of a salt, an adapter and a tenant."""
        return cls(names, root_digest(*names, block_size), np.empty(0, np.int64))

    def follow(self, ids: NDArray[np.int64], size: int) -> Link:
        """Hashes the blocks that end within the ids that come next."""
        ids = np.concatenate([self.rest, ids])
        data, digest, hashes = ids.astype("<i8", copy=False).tobytes(), self.digest, []
        for at in range(0, len(data) - 8 * size + 1, 8 * size):
            digest = hashlib.sha256(digest + data[at : at + 8 * size]).digest()
            hashes.append(int.from_bytes(digest[-8:], "big"))
        return Link(self.names, digest, ids[len(hashes) * size :].copy(), tuple(hashes))

    def blocks(self, before: Link, ids: NDArray[np.int64], start: int, known: int, size: int) -> Blocks:
        """The blocks that end within its tokens `ids`, which follow `before` and begin at position `start`, without the
        first `known` blocks, which are not all."""
        first = start - len(before.rest) + known * size
        parent = self.hashes[known - 1] if known else int.from_bytes(before.digest[-8:], "big")
        ids = np.concatenate([before.rest, ids])[known * size : len(self.hashes) * size]
        return Blocks(self.hashes[known:], parent if first else None, ids, first, size, *self.names)


class Change(NamedTuple):
    """What has changed of the tokens that can be found: tokens are there from now on, or are gone, or all are.

    `node` is a number for these tokens behind those of `parent`; it may stand for others once they are gone. `names`
    are salt, adapter and tenant, `start` is the position of the first token.
    """

    kind: Kind
    node: int
    parent: int
    names: tuple[Name, Name, Name]
    start: int
    ids: NDArray[np.int64]
    priority: int


class Source(Protocol):
    """A ring of changes, numbered from 0 on."""

    @property
    def first(self) -> int:
        """The number of the oldest change that is there."""

    def drain(self) -> tuple[int, list[Change]]:
        """Takes the oldest changes. Returns the number of the first, and the changes."""


class EventLog:
    """What happens to the reusable blocks of one cache, for one consumer: threads that drain the same log share the
    events.

    A block is reported only once it is whole. Changes that do not fit are dropped, the oldest first, and the consumer
    finds a `Dropped` in their place. Blocks that were reported before that, and blocks that follow these, are not
    reported again before they are stored anew.

    Methods may be called from several threads. In a forked child the log is empty.
    """

    def __init__(self, block_size: int = 16, *, max_events: int = 1 << 16) -> None:
        """Makes an empty log.

        Args:
            block_size: tokens in a block; routers have to be told the same number.
            max_events: the most changes that are kept for a consumer. A change is of a page of tokens, or of 64 tokens
                where a page has more; the consumer finds those of one sequence in one event.

        Raises:
            ArgumentError: one of them is no whole number.
            LayoutError: `block_size` is not positive.
            BudgetError: `max_events` is not positive.
        """
        self.block_size, self.max_events = as_index("block_size", block_size), as_index("max_events", max_events)
        if self.block_size < 1:
            raise LayoutError(f"blocks of {block_size} tokens; they need at least one")
        if self.max_events < 1:
            raise BudgetError(f"max_events={max_events}: a log has to hold something")
        self.closed = self._is_of_cache = False
        """Whether nothing more will come than what is there."""
        self._reset()
        _logs.add(self)

    def _reset(self) -> None:
        """Empties the log. A forked child has no events, and a thread that it does not have may hold the lock."""
        self._lock = threading.RLock()  # a signal handler may read in the middle of a read
        self._source: Source | None = None
        self._ready: list[Event] = []
        self._is_over = False  # all that there will be was read
        self._is_clear = False  # the last change was that all is gone
        self._position = self._dropped = 0
        self._forget()

    def _forget(self) -> None:
        """Forgets which blocks were reported."""
        self._links: dict[int, Link] = {}
        self._counts: Counter[int] = Counter()

    @property
    def dropped(self) -> int:
        """How many changes did not fit and were dropped."""
        with self._lock:
            return self._dropped + (max(self._source.first - self._position, 0) if self._source else 0)

    def close(self) -> None:
        """Ends the log: waiting consumers return. What is left can be drained."""
        self.closed = True

    # ------------------------------------------------------------------ the cache

    def check_new(self) -> None:
        """Raises `ArgumentError` where the log was closed, or is another cache's."""
        if self.closed or self._is_of_cache:
            state = "was closed" if self.closed else "is another cache's"
            raise ArgumentError(f"got an event_log that {state}; each cache needs one of its own")

    def follow(self, source: Source) -> None:
        """Begins to read the changes of a new cache. Raises as `check_new` does."""
        self.check_new()
        with self._lock:
            self._is_of_cache, self._source = True, source
            self._ready.append(Created(time.time()))

    # ------------------------------------------------------------------ consumers

    def events(self, timeout: float | None = 0.0, *, most: int | None = None) -> list[Event]:
        """Takes what is in the log, the oldest first.

        Args:
            timeout: how many seconds to wait if there is nothing; None waits until there is, or until the log is
                closed.
            most: how many events to take, all by default.

        Returns:
            The events; none after the timeout, or if the log is closed and nothing is left.

        Raises:
            ArgumentError, BudgetError: `timeout` is not a time, or `most` not a positive whole number.
        """
        if not (timeout is None or (isinstance(timeout, Real) and 0 <= timeout <= threading.TIMEOUT_MAX)):
            raise ArgumentError(
                f"got timeout={timeout!r}; give a number of seconds from 0 to {threading.TIMEOUT_MAX:.0f}, or None to "
                "wait for ever"
            )
        if most is not None and as_index("most", most) < 1:
            raise BudgetError(f"got most={most}; ask for one event or more, or for all by None")
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            closed = self.closed
            events = self._take(most)
            left = POLL if end is None else end - time.monotonic()
            if events or closed or left <= 0:
                return events
            time.sleep(min(left, POLL))

    def _take(self, most: int | None) -> list[Event]:
        with self._lock:
            rounds, closed = self.max_events + 1, self.closed  # not as long as changes go on to come
            while rounds and (most is None or len(self._ready) < most) and self._read():
                rounds -= 1
            if closed and rounds and not self._is_over and (most is None or len(self._ready) < most):
                if self._source and not self._is_clear:
                    self._ready.append(Cleared(time.time()))
                self._is_over = True
            taken = self._ready[:most]
            del self._ready[:most]
            return taken

    def _read(self) -> bool:
        """Makes events of some changes. Returns whether there were any."""
        if self._source is None or self._is_over:
            return False
        first, changes = self._source.drain()
        now, events, lost = time.time(), list[Event](), first - self._position
        if lost:  # also changes that an interrupted call has taken
            events.append(Dropped(now, lost))
            self._forget()
        for change in changes:
            self._add(events, now, change)
        self._ready += events
        self._position, self._dropped = first + len(changes), self._dropped + lost
        return bool(lost or changes)

    def _add(self, events: list[Event], now: float, change: Change) -> None:
        """Adds what there is to tell of a change: to the last event, where it is of the same kind and goes on there."""
        last = events[-1] if events else None
        self._is_clear = change.kind == "cleared"
        if self._is_clear:
            self._forget()
            events.append(Cleared(now))
        elif change.kind == "removed":
            hashes = self._removed(change)
            if hashes and isinstance(last, Removed):
                events[-1] = replace(last, hashes=last.hashes + hashes)
            elif hashes:
                events.append(Removed(now, hashes))
        elif blocks := self._stored(change):
            if isinstance(last, Stored) and (last.priority, last.blocks.hashes[-1]) == (change.priority, blocks.parent):
                ids = np.concatenate([last.blocks.ids, blocks.ids])
                joined = replace(last.blocks, hashes=last.blocks.hashes + blocks.hashes, ids=ids)
                events[-1] = replace(last, blocks=joined)
            else:
                events.append(Stored(now, blocks, change.priority))

    def _stored(self, change: Change) -> Blocks | None:
        """The blocks that can be found with some tokens, and could not before."""
        if change.start:
            before = self._links.get(change.parent)
            if before is None:  # its own event was dropped
                return None
        else:
            before = Link.root(told_names(*change.names), self.block_size)
        link = self._links[change.node] = before.follow(change.ids, self.block_size)
        known = sum(block in self._counts for block in link.hashes)  # the first ones: those of a node that begins alike
        self._counts.update(link.hashes)
        if known == len(link.hashes):
            return None
        return link.blocks(before, change.ids, change.start, known, self.block_size)

    def _removed(self, change: Change) -> tuple[int, ...]:
        """The blocks that cannot be found without some tokens, the last one first."""
        link = self._links.pop(change.node, None)
        gone = []
        for block in reversed(link.hashes if link else ()):
            self._counts[block] -= 1
            if not self._counts[block]:
                del self._counts[block]
                gone.append(block)
        return tuple(gone)


def check_ids(ids: NDArray[Any]) -> None:
    """Raises `ArgumentError` where these are no ids that routers can be told."""
    if ids.size and not 0 <= ids.min() <= ids.max() < 1 << 32:
        raise ArgumentError("got token ids below 0 or above 2**32 - 1; routers read ids of 32 bits")


_logs: weakref.WeakSet[EventLog] = weakref.WeakSet()


def _reset_all() -> None:
    for log in _logs:
        log._reset()


os.register_at_fork(after_in_child=_reset_all)
