"""A bounded log of events: producers append under their own lock, a consumer drains when it likes.

Invariants:
 1. To append hashes nothing, encodes nothing and waits for nobody but another append. Blocks are hashed by who drains.
 2. The log holds at most `max_events` records and `max_tokens` token ids, of its own; the oldest go first.
 3. Records are resolved in the order in which they were appended, one at a time: a block's hash needs its parent's.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from numbers import Real
from operator import index
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import ArgumentError, BudgetError, LayoutError, ShapeError
from .chain import Root, Span
from .kinds import TIERS, Cleared, Created, Dropped, Event, Removed, Stored, Tier, Updated
from .naming import told_names

Record = tuple[int, Callable[[], Event | None]]
"""Token ids that it holds, and what makes an event of it, if there is anything to tell."""


class EventLog:
    """What happened to reusable blocks, for one consumer: threads and tasks that drain the same log share the events.

    A producer keeps the `Span` of what it stores, to say later which tokens are removed or have moved. A block is
    reported only once it is whole. What does not fit is dropped, the oldest first, and the consumer finds a `Dropped`
    in its place. Blocks whose `Stored` was dropped, and those behind them, are not reported again before they are
    stored anew.

    Methods may be called from several threads. In a forked child the log is empty.
    """

    def __init__(self, block_size: int = 16, *, max_events: int = 10_000, max_tokens: int = 1 << 22) -> None:
        """Makes an empty log.

        Args:
            block_size: tokens in a block; routers have to be told the same number.
            max_events: the most events that are kept for a consumer.
            max_tokens: the most token ids that they hold, 8 bytes each.

        Raises:
            ArgumentError: one of them is no whole number.
            LayoutError: `block_size` is not positive.
            BudgetError: a bound is not positive.
        """
        block_size, max_events = _whole("block_size", block_size), _whole("max_events", max_events)
        max_tokens = _whole("max_tokens", max_tokens)
        if block_size < 1:
            raise LayoutError(f"blocks of {block_size} tokens; they need at least one")
        if max_events < 1 or max_tokens < 1:
            raise BudgetError(f"max_events={max_events}, max_tokens={max_tokens}: a log has to hold something")
        self.block_size = block_size
        self.max_events, self.max_tokens = max_events, max_tokens
        self._closed = self._is_of_cache = False
        self._reset()
        _logs.add(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()  # reentrant: a finalizer may append in the middle of anything
        self._draining = threading.Lock()
        self._records: deque[Record] = deque()
        self._tokens = 0
        self._dropped = self._missed = 0  # in all, and since the consumer was told
        self._untold = 0  # taken by a call that has not returned

    @property
    def dropped(self) -> int:
        """How many events did not fit and were dropped."""
        return self._dropped

    @property
    def closed(self) -> bool:
        """Whether nothing more will come than what is there."""
        return self._closed

    def close(self) -> None:
        """Ends the log: later events are ignored, and waiting consumers are woken. What is left can be drained."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # Producers.

    def check_new(self) -> None:
        """Checks that it can be a new cache's.

        Raises:
            ArgumentError: it was closed, or is another cache's.
        """
        if self._closed or self._is_of_cache:
            state = "was closed" if self._closed else "is another cache's"
            raise ArgumentError(f"asked to tell of a new cache in a log that {state}; each cache needs one of its own")

    def root(self, salt: str | None = None, adapter: str | int | None = None, tenant: str | int | None = None) -> Span:
        """The empty beginning of all sequences of a salt, an adapter and a tenant. Two roots of the same are the same.

        Raises:
            ArgumentError: the salt is not text, the adapter neither text nor a number from 0 to 2**63 - 1, or the
                tenant neither text nor a number.
        """
        return Span(Root(*told_names(salt, adapter, tenant), self.block_size), None, 0, 0)

    def created(self, device_blocks: int, host_blocks: int = 0) -> None:
        """Reports that a cache has been made, empty, with room for that many blocks in each tier.

        Raises:
            ArgumentError: the log was closed, or is another cache's.
        """
        self.check_new()
        self._is_of_cache = True
        at = time.time()
        self._append(lambda: Created(at, device_blocks, host_blocks))

    def stored(self, parent: Span, start: int, ids: ArrayLike, *, tier: Tier = "device", priority: int = 35) -> Span:
        """Reports that tokens can be reused from now on, and returns their span.

        Args:
            parent: the span, or the root, that they continue.
            start: the position of the first of them, within `parent` or right behind it.
            ids: their token ids, and before them those back to the beginning of the block in which `start` lies: the
                first of `ids` is that of token `start - start % block_size`. The log makes a copy.
            tier: where they lie.
            priority: how long they are to be kept, 0 to 100.

        Raises:
            ShapeError: `ids` do not reach beyond `start`, or `start` is not in or behind `parent`.
            ArgumentError: `ids` are not whole numbers of 32 bits, or there is no such tier.
        """
        at = time.time()
        ids, stop = self._ids(start, ids)
        _check_tiers(tier)
        if parent.root.block_size != self.block_size or not parent.start <= start <= parent.stop:
            raise ShapeError(f"in blocks of {self.block_size}, a span from token {start} on cannot continue {parent}")
        span = Span(parent.root, parent, start, stop)

        def event() -> Event | None:
            blocks = span.store(ids)
            return Stored(at, blocks, tier, priority) if blocks else None

        self._append(event, len(ids))
        return span

    def removed(self, span: Span, start: int, *, tier: Tier = "device") -> None:
        """Reports that the tokens of a span from `start` on are gone from the tier in which they lay.

        Remove spans that continue it there first. Tokens in two tiers take two calls, the later tokens first.

        Raises:
            ShapeError: the span has no such token, or no longer has it.
            ArgumentError: there is no such tier.
        """
        at = time.time()
        _check_tiers(tier)
        self._check(span, start, start + 1)
        span.stop = start

        def event() -> Event | None:
            hashes = span.remove(start)
            return Removed(at, hashes, tier) if hashes else None

        self._append(event)

    def updated(
        self,
        span: Span,
        start: int,
        ids: ArrayLike,
        *,
        tier: tuple[Tier, Tier] | None = None,
        priority: tuple[int, int] | None = None,
    ) -> None:
        """Reports that tokens of a span have moved, or have another priority. A block is where its last token is.

        Args:
            span: of the tokens.
            start: the position of the first of them.
            ids: as those of `stored`, up to the last of them.
            tier: where they lay, and where they lie now; None: they have not moved.
            priority: the old one, and the new one; None: it has not changed.

        Raises:
            ShapeError: the span has no such tokens.
            ArgumentError: `ids` are not whole numbers of 32 bits, or there is no such tier.
        """
        at = time.time()
        ids, stop = self._ids(start, ids)
        _check_tiers(*(tier or ()))
        self._check(span, start, stop)

        def event() -> Event | None:
            blocks = span.blocks(start, ids)
            return Updated(at, blocks, tier, priority) if blocks else None

        self._append(event, len(ids))

    def cleared(self) -> None:
        """Reports that all blocks are gone. Spans stored before can no longer be removed or continued."""
        at = time.time()
        self._append(lambda: Cleared(at))

    def _ids(self, start: int, ids: ArrayLike) -> tuple[NDArray[np.int64], int]:
        """A copy of token ids, and the position behind the last one."""
        array = np.array(ids)
        check_ids(array)
        begin = start - start % self.block_size
        if start < 0 or array.ndim != 1 or begin + len(array) <= start:
            raise ShapeError(
                f"ids of shape {list(array.shape)} from token {begin} on, where a block begins, do not reach beyond "
                f"token {start}"
            )
        return array.astype(np.int64, copy=False), begin + len(array)

    def _check(self, span: Span, start: int, stop: int) -> None:
        if span.root.block_size != self.block_size or not span.start <= start < stop <= span.stop:
            raise ShapeError(f"tokens {start} to {stop - 1}, in blocks of {self.block_size}, are not all in {span}")

    def _append(self, event: Callable[[], Event | None], tokens: int = 0) -> None:
        record = tokens, event
        with self._changed:
            if self._closed:
                return
            # An interruption comes after a call: what is counted is counted before.
            self._tokens += tokens
            self._records.append(record)
            while len(self._records) > self.max_events or self._tokens > self.max_tokens:
                self._tokens -= self._records[0][0]
                self._dropped += 1
                self._missed += 1
                self._records.popleft()
            self._changed.notify_all()

    # Consumers.

    def events(self, timeout: float | None = 0.0, *, most: int | None = None) -> list[Event]:
        """Takes what is in the log, the oldest first.

        Args:
            timeout: how many seconds to wait if there is nothing; None waits until there is, or until the log is
                closed.
            most: how many events to take, all by default.

        Returns:
            The events; none after the timeout, or if the log is closed and nothing is left.

        Raises:
            ArgumentError: `timeout` is not a time, or `most` not a whole number.
            BudgetError: `most` is not positive.
        """
        if not (timeout is None or (isinstance(timeout, Real) and 0 <= timeout <= threading.TIMEOUT_MAX)):
            raise ArgumentError(
                f"got timeout={timeout!r}; give a number of seconds from 0 to {threading.TIMEOUT_MAX:.0f}, or None to "
                "wait for ever"
            )
        if not isinstance(most, SupportsIndex | None):
            raise ArgumentError(f"got most={most!r}; give a whole number of events, or None for all")
        if most is not None and most < 1:
            raise BudgetError(f"at most {most} events; ask for one or more, or for all by None")
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            closed = self._closed
            with self._draining:
                with self._changed:
                    self._missed += self._untold  # an interruption took them
                    self._untold = 0
                events = list(islice(self._resolved(), most))
                self._untold = 0
            left = None if end is None else end - time.monotonic()
            if events or closed or (left is not None and left <= 0):
                return events
            self._wait(left)

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Events as they come, until the log is closed. Who stops half-way leaves the others in the log."""
        given_up = threading.Event()
        try:
            while True:
                closed = self._closed
                while events := self.events(most=1):
                    yield events[0]
                if closed:
                    return
                await asyncio.to_thread(self._wait, None, given_up)
        finally:
            with self._changed:
                given_up.set()
                self._changed.notify_all()

    def _wait(self, timeout: float | None, given_up: threading.Event | None = None) -> None:
        """Waits until there is something, or will never be, or nobody wants it any more."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._records or self._missed or self._closed or (given_up and given_up.is_set()), timeout
            )

    def _resolved(self) -> Iterator[Event]:
        """Takes records and makes them events; those that were dropped come before all that are left."""
        while True:
            with self._changed:
                if missed := self._missed:
                    self._untold += missed
                    self._missed = 0
                elif self._records:
                    tokens, make = self._records[0]
                    self._untold += 1
                    self._tokens -= tokens
                    self._records.popleft()
                else:
                    return
            event = Dropped(time.time(), missed) if missed else make()
            if event:
                yield event


def _whole(name: str, value: object) -> int:
    """A whole number. Raises `ArgumentError` where it is none."""
    if not isinstance(value, SupportsIndex):
        raise ArgumentError(f"got {name}={value!r}; it must be a whole number")
    return index(value)


def check_ids(ids: NDArray[Any]) -> None:
    """Raises `ArgumentError` where these are no ids that routers can be told."""
    if ids.dtype.kind not in "iu" or (ids.size and not 0 <= ids.min() <= ids.max() < 1 << 32):
        raise ArgumentError(f"token ids of type {ids.dtype}; routers read whole numbers from 0 to 2**32 - 1")


def _check_tiers(*tiers: Tier) -> None:
    if not set(tiers) <= set(TIERS):
        raise ArgumentError(f"tier {' to '.join(map(repr, tiers))}: there are {' and '.join(TIERS)}")


_logs: weakref.WeakSet[EventLog] = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked child: who held a lock is not there, and what happened is the parent's to tell."""
    for log in _logs:
        log._reset()


os.register_at_fork(after_in_child=_after_fork)
