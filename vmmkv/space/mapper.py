"""The mapper: a thread that maps pages ahead of need, so that whoever grows finds them there.

It asks holders of a pool what they will soon need and makes one small change after another: planned with the monitor's
lock, run without it, committed with it. Holders whose growth comes first do the work themselves, as if there were none.

Invariants:
 1. It takes only what is idle: of a live row no page that it holds, that it expects to need, or that is its lookahead.
    It never makes `OutOfPagesError` more likely, for what it maps is surplus until tokens come; but then a large frame
    is used as a whole.
 2. It ends with its pool, before the interpreter, and is not there in a forked child.
 3. What goes wrong in it changes nothing: it is kept in `error`, and it rests until it is rung for again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import sleep
from typing import NamedTuple, Protocol

from ..driver.calls import Calls
from ..driver.meter import Meter
from ..errors import DriverError, DriverOutOfMemoryError, VmmkvError
from ..memory.frames import LARGE
from ..memory.pool import FramePool
from .change import Change

CHUNK = 16
"""Frames of one change: about half a millisecond of the driver's time, which who grows meanwhile may have to wait."""
MADE, RELEASED = 4 * CHUNK, 2 * CHUNK
"""Frames of a size that are made at once, and pages that are unmapped: that takes about as long, as to make a frame, or
to unmap one, costs less than to map it."""
PATIENCE = 0.002
"""Seconds between two looks at what the device is at."""
DELAY = 0.001
"""Seconds that it leaves to who needs pages many tokens from now: he launches kernels, and needs the interpreter."""
PAUSE, PAUSES = 0.0005, 8
"""Seconds that it rests when somebody has just mapped in need, and how often in a row: then it works all the same."""
STOCK = 1 / 32
"""Of the pages that are mapped: so many are to be free beside them, for prompts that nobody has announced."""


class Lack(NamedTuple):
    """Frames that could not be mapped ahead, because they are not there."""

    large: int
    single: int


Making = tuple[int, int]
"""So many frames to be made, and the pages of each."""


class Grower(Protocol):
    """What knows what a holder will need: its attribute `ahead`, where it has one."""

    @property
    def lookahead(self) -> int:
        """Tokens that are to be mapped behind each sequence."""

    def plan_ahead(self, change: Change, frames: int) -> Lack:
        """Plans to map up to so many frames, of those that are free; returns what lacks of them, up to `MADE`."""

    def plan_release(self, change: Change, pages: int) -> int:
        """Plans to unmap so many pages, of rows that nobody has, or behind others what these neither expect to need nor
        have as a lookahead, as far as there are any; returns how many."""

    def commit_ahead(self, change: Change) -> None:
        """Brings its books up to what a change has done."""


class Mover(Protocol):
    """What moves pages to where they cost less, or has them cleaned, one change after another, when there is nothing to
    map: one of a holder's `movers`, where it has any."""

    @property
    def is_waiting(self) -> bool:
        """Whether there is something to do for it, or will be when the device is done, without anybody's ringing."""

    def plan(self, change: Change) -> bool:
        """Plans the next one, if there is any; returns whether it lacks a large frame, for which there is room."""

    def commit(self) -> None:
        """Goes on with what a change has done."""


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
        self._calls = Calls(pool.driver, self.meter)
        self._bell = threading.Lock()
        self._bell.acquire()
        self._is_over = False
        self._is_full = False
        """Whether the device had no memory for a frame when it was last asked, since it was rung for."""
        self._is_waiting = False
        """Whether a mover waits for the device."""
        self._has_time = False
        """Whether nobody has rung but for what is needed later."""
        self._seen = 0
        """Pages that others had mapped in need when it last looked."""
        self._thread: threading.Thread | None = None
        weakref.finalize(pool, self.stop)  # at the end of the interpreter, too

    def ring(self) -> None:
        """Has it look for work soon. Costs next to nothing, and may be called in the middle of anything."""
        if (self._thread is None or not self._thread.is_alive()) and not self._is_over:
            thread = threading.Thread(target=_work, args=(self,), name="vmmkv-mapper", daemon=True)
            thread.start()
            self._thread = thread  # not before: nobody could wait for one that was interrupted here
        self._has_time = False
        if self._bell.locked():
            with suppress(RuntimeError):  # somebody else was faster
                self._bell.release()

    def ring_later(self) -> None:
        """`ring`, for what is needed many tokens from now."""
        is_first = self._bell.locked()
        self.ring()
        self._has_time = is_first

    def stop(self) -> None:
        """Ends the thread, and waits for it."""
        self._is_over = True
        with suppress(RuntimeError):
            self._bell.release()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def forget(self) -> None:
        """In a forked child: there is no thread."""
        self._thread, self._is_over = None, True

    def wait(self) -> bool:
        """Waits until it is rung for, or has to look again; False when there is nothing left to do, ever."""
        if self._bell.acquire(timeout=PATIENCE if self._is_waiting else -1):
            self._is_full = False
            if self._has_time:
                sleep(DELAY)
        return not self._is_over

    def rest(self) -> bool:
        """Waits while others map in need, one after another, as where many sequences start at once: what it would make
        and map meanwhile they would have to wait for. False when there is nothing left to do, ever."""
        for _ in range(PAUSES):
            pool = self._pool()
            if pool is None or self._is_over:
                return False
            before, self._seen = self._seen, pool.pages_in_need
            del pool  # which may end meanwhile
            if self._seen == before:
                break
            sleep(PAUSE)
        return True

    def work(self) -> bool:
        """Makes one change; returns whether there may be another to make."""
        pool = self._pool()
        if pool is None or self._is_over:
            return False
        with pool.monitor.door:
            pass  # after who waits there
        with pool.monitor.changing:
            with pool.monitor.running:  # no finalizer may change anything in between
                is_busy = self._change(pool)
            with pool.monitor.lock:
                if not pool.monitor.is_dirty:
                    pool.monitor.verify()
            return is_busy

    def _change(self, pool: FramePool) -> bool:
        """Maps ahead; where there is too little to map, makes frames, or has parked rows give theirs up."""
        change = Change(pool, self._calls)
        making: list[Making] = []
        with pool.monitor.lock:
            if pool.monitor.is_dirty or pool.monitor.is_unfinished:
                return False
            free = pool.frames.free_pages
            with pool.monitor.working():
                holders = growers(pool)
                lacks = [grower.plan_ahead(change, CHUNK) for grower in holders]
                lack = Lack(*map(sum, zip((0, 0), *lacks)))
                if change.is_empty:
                    if _must_break_up(pool, lack):
                        pool.frames.break_up(self._calls)
                        return True
                    if not self._is_full:
                        making = _frames_to_make(pool, lack)
                    if not making:
                        _plan_release(pool, holders, change, lack)
            has_freed = pool.frames.free_pages > free
        if making:
            self._make(pool, making)
            return True
        if change.is_empty:
            return has_freed or self._move(pool)  # freed: what was kept, and lay on no row
        self._run(pool, change, holders)
        has_more = any(lack) or change.frames in (0, CHUNK) or any(mover.is_waiting for mover in movers(pool))
        return has_more or pool.frames.free_pages < stock(pool) // 2

    def _move(self, pool: FramePool) -> bool:
        """Makes a change of a mover's; returns whether there was any."""
        self._is_waiting = False
        for mover in movers(pool):
            change, lacks = Change(pool, self._calls), False
            with pool.monitor.lock:
                if pool.monitor.is_dirty:
                    return False
                with pool.monitor.working(), self._noted():
                    lacks = mover.plan(change)
            if lacks and not self._is_full:
                self._make(pool, [(1, LARGE)])
                return True
            if not change.is_empty:
                self._run(pool, change, mover=mover)
                return True
            self._is_waiting |= mover.is_waiting
        return False

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Around what may go wrong, and changes nothing then."""
        try:
            yield
        except VmmkvError as error:
            self.error = str(error)

    def _make(self, pool: FramePool, making: list[Making]) -> None:
        """Makes frames."""
        for count, pages in making:
            with pool.monitor.lock:
                if pool.monitor.is_dirty:  # somebody was interrupted: the next operation works out what there is
                    return
                with pool.monitor.working():
                    new = pool.frames.plan(count, pages)
            with pool.nvtx.frames:
                outcome = self._calls.create(pool.frames.handles, new, pages)
            with pool.monitor.lock:
                if pool.monitor.is_dirty:
                    return
                with pool.monitor.working():
                    pool.frames.commit(new, outcome.done, pages)
            try:
                outcome.check()
            except DriverOutOfMemoryError as error:  # what parked rows have may still be had
                self._is_full, self.error = True, str(error)
                return

    def _run(self, pool: FramePool, change: Change, holders: Sequence[Grower] = (), mover: Mover | None = None) -> None:
        """Runs a change that was planned for holders, or for a mover."""
        with pool.nvtx.change:
            change.run()
        with pool.monitor.lock:
            if pool.monitor.is_dirty:  # what is in doubt is unmapped by the next operation
                return
            with pool.monitor.working():
                pages = change.commit()
                for grower in holders:
                    grower.commit_ahead(change)
                if mover:
                    with self._noted():
                        mover.commit()
                else:
                    self.pages += pages
        change.check()


def _must_break_up(pool: FramePool, lack: Lack) -> bool:
    """Whether single frames lack, none can be made, and there is a large one that does not lack."""
    frames = pool.frames
    return lack.single > 0 and not lack.large and bool(frames.free_large) and pool.accounts.room <= 0


def _frames_to_make(pool: FramePool, lack: Lack) -> list[Making]:
    """Those that lack, and the stock, where half of it is gone."""
    frames, wanted = pool.frames, stock(pool)
    room, making = pool.accounts.room, list[Making]()
    for missing, most, free, pages in (
        (lack.large, wanted // LARGE if frames.has_large else 0, len(frames.free_large), LARGE),
        (lack.single, min(wanted, 2 * CHUNK), len(frames.free), 1),
    ):
        count = min(missing + most - free, room // pages, MADE)
        if count > 0 and free < missing + -(-most // 2):
            making.append((count, pages))
            room -= count * pages
    return making


def stock(pool: FramePool) -> int:
    """Pages that are to be free for what nobody has announced."""
    return int(STOCK * pool.frames.taken)


def _plan_release(pool: FramePool, holders: list[Grower], change: Change, lack: Lack) -> None:
    """Plans to have holders unmap what lacks, and the stock."""
    missing = lack.large * LARGE + lack.single + stock(pool) - pool.frames.free_pages
    missing = min(missing, RELEASED)
    for grower in holders:
        if missing > 0:
            missing -= grower.plan_release(change, missing)


def growers(pool: FramePool) -> list[Grower]:
    """Holders that want pages ahead."""
    all_of_them = [getattr(account.holder(), "ahead", None) for account in pool.accounts]
    return [grower for grower in all_of_them if grower is not None and grower.lookahead]


def movers(pool: FramePool) -> list[Mover]:
    """Those of holders."""
    return [mover for account in pool.accounts for mover in getattr(account.holder(), "movers", ())]


def _work(mapper: Mapper) -> None:
    """The thread."""
    while mapper.wait():
        try:
            while mapper.rest() and mapper.work():
                pass
        except (DriverError, VmmkvError) as error:
            mapper.error = str(error)
