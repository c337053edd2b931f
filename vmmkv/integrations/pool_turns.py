"""The turn at a pool where schedulers of several managers wait for each other's memory.

Who has it keeps what its requests hold; the others admit nobody until one of these is done, and give way where they
cannot go on. So one is done in the end. If all gave way and began anew, each could take what the other has just been
given, and none need ever be done.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from ..pool import FramePool


class Waiter(Protocol):
    """Who takes turns."""

    def has_pending_requests(self) -> bool:
        """Whether it has requests, waiting ones included."""

    def holds_memory(self) -> bool:
        """Whether some of its requests hold memory."""


class PoolTurn:
    """Whose turn it is at a pool: nobody's, or that of one who has requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: Callable[[], Waiter | None] = _nobody
        self._waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()

    def join(self, waiter: Waiter) -> None:
        """Adds one who takes turns."""
        with self._lock:
            self._waiters.add(waiter)

    def take(self, waiter: Waiter) -> bool:
        """Gives the turn to `waiter`, if no other has it; returns whether that is so."""
        with self._lock:
            if self.is_anothers(waiter):
                return False
            self._holder = weakref.ref(waiter)
            return True

    def end(self, waiter: Waiter) -> None:
        """Takes the turn from `waiter`, if it has it."""
        with self._lock:
            if self._holder() is waiter:
                self._holder = _nobody

    def is_anothers(self, waiter: Waiter) -> bool:
        """Whether another than `waiter` has the turn."""
        holder = self._holder()
        return holder is not None and holder is not waiter and holder.has_pending_requests()

    def others_hold_memory(self, waiter: Waiter) -> bool:
        """Whether requests of others than `waiter` hold memory, of those that take turns."""
        with self._lock:  # others may join
            waiters = list(self._waiters)
        return any(each is not waiter and each.holds_memory() for each in waiters)


def _nobody() -> None:
    """Has no turn."""


_turns: weakref.WeakKeyDictionary[FramePool, PoolTurn] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def turn_at(pool: FramePool) -> PoolTurn:
    """The turn at a pool."""
    with _lock:
        return _turns.setdefault(pool, PoolTurn())
