"""The mapper: a thread that maps pages ahead of need, so that whoever grows finds them there.

It asks holders of a pool what they will soon need and makes one small change after another: planned with the monitor's
lock, run without it, committed with it. Holders whose growth comes first do the work themselves, as if there were none.

Invariants:
 1. It takes only what is idle: it never has a live row give up a page, and never makes `OutOfPagesError` more likely,
    for what it maps is surplus until tokens come.
 2. It ends with its pool, before the interpreter, and is not there in a forked child.
 3. What goes wrong in it changes nothing: it is kept in `error`, and it rests until it is rung for again.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from typing import Protocol

from ..errors import DriverError, VmmkvError
from ..memory.meter import Meter
from ..memory.pool import FramePool, make_calls
from .change import Change

CHUNK = 32
"""Pages of one change: about a millisecond of the driver's time, which who grows meanwhile may have to wait."""
STOCK = 1 / 32
"""Of the pages that are mapped: so many are to be free beside them, for prompts that nobody has announced."""


class Grower(Protocol):
    """What knows what a holder will need: its attribute `ahead`, where it has one."""

    @property
    def lookahead(self) -> int:
        """Tokens that are to be mapped behind each sequence."""

    def plan_ahead(self, change: Change, pages: int) -> int:
        """Plans up to so many pages, of frames that are free; returns how many."""

    def pages_ahead(self, enough: int) -> int:
        """Pages that are still to be mapped ahead, counted up to `enough`."""

    def plan_release(self, change: Change, pages: int) -> int:
        """Plans to unmap up to so many idle pages of parked rows; returns how many."""

    def commit_ahead(self, change: Change) -> None:
        """Brings its books up to what a change has done."""


class Mapper:
    """See above. Its thread starts with the first `ring`.

    Args:
        pool: whose holders it works for.
    """

    def __init__(self, pool: FramePool) -> None:
        self.meter = Meter()
        """Its calls of the driver."""
        self.pages = 0
        """Pages that it has mapped."""
        self.error: str | None = None
        """What went wrong last."""
        self._pool = weakref.ref(pool)
        self._calls = make_calls(pool.driver, self.meter)
        self._bell = threading.Lock()
        self._bell.acquire()
        self._is_over = False
        self._thread: threading.Thread | None = None
        weakref.finalize(pool, self.stop)  # at the end of the interpreter, too

    def ring(self) -> None:
        """Has it look for work soon. Costs next to nothing, and may be called in the middle of anything."""
        if self._thread is None and not self._is_over:
            thread = threading.Thread(target=_work, args=(self,), name="vmmkv-mapper", daemon=True)
            thread.start()
            self._thread = thread  # not before: nobody could wait for one that was interrupted here
        if self._bell.locked():
            with suppress(RuntimeError):  # somebody else was faster
                self._bell.release()

    def stop(self) -> None:
        """Ends the thread, and waits for it."""
        self._is_over = True
        if self._thread is not None and self._thread is not threading.current_thread():
            with suppress(RuntimeError):
                self._bell.release()
            self._thread.join()

    def forget(self) -> None:
        """In a forked child: there is no thread."""
        self._thread, self._is_over = None, True

    def wait(self) -> bool:
        """Waits until it is rung for; False when there is nothing left to do, ever."""
        self._bell.acquire()
        return not self._is_over

    def work(self) -> bool:
        """Makes one change; returns whether there may be another to make."""
        pool = self._pool()
        if pool is None or self._is_over:
            return False
        pool.driver.enter_thread()
        with pool.monitor.changing:
            pool.monitor.worker = threading.get_ident()  # no finalizer may change anything in between
            try:
                is_busy = self._make_frames(pool) or self._change(pool)
            finally:
                pool.monitor.worker = None
            with pool.monitor.lock:
                if not pool.monitor.is_dirty:
                    pool.monitor.verify()
            return is_busy

    def _make_frames(self, pool: FramePool) -> bool:
        """Makes frames, where there are too few for what is to be mapped ahead."""
        with pool.monitor.lock:
            if pool.monitor.is_dirty:
                return False
            with pool.monitor.working():
                count = min(self._missing(pool), pool.limit - pool.frames.existing, CHUNK)
                new = pool.frames.plan(count) if count > 0 else []
        if not new:
            return False
        with pool.ranges.frames:
            outcome = self._calls.create(pool.frames.handles, new)
        with pool.monitor.lock, pool.monitor.working():
            pool.frames.commit(new, outcome.done)
        outcome.check()
        return True

    def _change(self, pool: FramePool) -> bool:
        """Maps ahead; where there is too little to map it with, unmaps what is parked."""
        change = Change(self._calls, pool.frames.handles)
        with pool.monitor.lock:
            if pool.monitor.is_dirty:
                return False
            with pool.monitor.working():
                holders = growers(pool)
                planned = 0
                for grower in holders:
                    planned += grower.plan_ahead(change, CHUNK - planned)
                missing = 0 if planned else min(self._missing(pool), CHUNK)
                for grower in holders:
                    missing -= grower.plan_release(change, missing) if missing > 0 else 0
        if change.is_empty:
            return False
        with pool.ranges.change:
            change.run()
        with pool.monitor.lock, pool.monitor.working():
            self.pages += change.commit(pool)
            for grower in holders:
                grower.commit_ahead(change)
        change.check()
        return True

    def _missing(self, pool: FramePool) -> int:
        """Frames that should be free and are not."""
        wanted = sum(grower.pages_ahead(CHUNK) for grower in growers(pool))
        return wanted + int(STOCK * pool.frames.taken) - len(pool.frames.free)


def growers(pool: FramePool) -> list[Grower]:
    """Holders that want pages ahead."""
    all_of_them = [getattr(account.holder(), "ahead", None) for account in pool.accounts]
    return [grower for grower in all_of_them if grower is not None and grower.lookahead]


def _work(mapper: Mapper) -> None:
    """The thread."""
    while mapper.wait():
        try:
            while mapper.work():
                pass
        except (DriverError, VmmkvError) as error:
            mapper.error = str(error)
