"""The mapper: a thread that maps pages behind rows before these need them, a few frames at a time.

It plans and commits like all other threads, and they plan between its changes. It takes only idle memory: free frames,
new ones within the budget, pages of parked rows. It ends with its pool, and before the interpreter; a forked child has
none.

A failure in it changes nothing. The mapper leaves rows for which it failed alone until their pages change; a growth
that lacks a page maps it, or raises the error of its own call.
"""

from __future__ import annotations

import threading
import weakref
from _thread import start_new_thread
from queue import SimpleQueue
from time import sleep

from . import entries
from .codes import FAILED, RING, WAIT
from .pool import Ask, Pool

FRAMES = 4
"""Frames of one change, the most that another thread has to wait for."""
DELAY = 0.0003
"""Seconds between two changes, so that threads that launch kernels get the interpreter's lock."""


class Mapper:
    """Maps ahead for the caches of a pool. Its thread starts with the first `ring`."""

    def __init__(self, pool: Pool) -> None:
        self.error: Exception | None = None
        """The last failure."""
        self.changes = 0
        """The number of changes so far."""
        self._pool = weakref.ref(pool)
        self._bell: SimpleQueue[None] = SimpleQueue()
        """Written in C, so that no signal handler or finalizer comes while a lock of it is held."""
        self._alone = threading.Lock()
        """Held by the thread as long as it lives."""
        self._is_over = False
        self._ident = 0
        self._end = weakref.finalize(pool, self.stop)

    def ring(self) -> None:
        """Wakes the mapper, which looks for rows that need pages."""
        if not (self._ident or self._is_over):
            start_new_thread(self._work, ())  # Thread.start is Python code, too
        self._bell.put(None)

    def stop(self) -> None:
        """Ends the mapper after its current change."""
        self._is_over = True
        self._bell.put(None)
        if self._ident != threading.get_ident():
            with self._alone:
                """The thread has ended."""

    def leave(self) -> None:
        """Forgets the thread in a forked child, where it is not."""
        self._end.detach()

    def _work(self) -> None:
        if not self._alone.acquire(blocking=False):  # two were started
            return
        self._ident = threading.get_ident()
        try:
            while not self._is_over:
                self._bell.get()
                if (pool := self._pool()) is None:
                    return
                state = pool.state[0]
                while state["hungry"] and self._map(pool):
                    pass
                del pool, state
        finally:
            self._alone.release()

    def _map(self, pool: Pool) -> bool:
        """Maps until no row needs pages, or a call fails. Returns whether no call has failed. A row that is queued
        while the mapper is awake does not ring, so the caller looks once more."""
        state, ask = pool.state[0], Ask()
        state["asleep"] = 0
        try:
            while state["hungry"] and not self._is_over:
                if not self._change(pool, ask):
                    return False
                sleep(DELAY)
        finally:
            state["asleep"] = 1
        return not self._is_over

    def _change(self, pool: Pool, ask: Ask) -> bool:
        """Makes one change. Returns whether there may be more to do."""
        with pool.lock:
            code = entries.plan_ahead(pool.address, FRAMES, ask.address)
            if code > RING:
                entries.run(pool.address, code, 1)
                code = entries.commit(pool.address, code, ask.address)
                self.changes += 1
                if code == FAILED:
                    self.error = pool.failure(ask)
        return code != FAILED and code != WAIT
