"""Neighbours: pools of one process on one device, which share nothing but what the device has.

Where it has no memory left, one asks the others for what nobody uses there. They give it back to the system, which
clears it, so that no bytes go from one pool to another.

Who is asked may be in the middle of an operation, which is waited for. So that nobody waits in a circle a pool that is
asking itself is not asked: of two that wait for each other the later one would know that the other asks. Nor is one
that this thread is in the middle of, where a signal handler asks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from ..driver.driver import Driver
from ..errors import VmmkvError
from .pool import FramePool, living_pools

_asking: dict[int, None] = {}
"""Numbers of pools that ask now."""


@contextmanager
def asking(pool: FramePool) -> Iterator[Iterator[FramePool]]:
    """Around what a pool asks of others: gives these, the oldest first."""
    _asking[pool.number] = None  # before it looks who else is asking
    try:
        yield (other for other in living_pools() if _is_neighbour(pool, other) and other.number not in _asking)
    finally:
        _asking.pop(pool.number, None)


def give_back(pool: FramePool, nbytes: int) -> int:
    """Has a pool give up to so many bytes that nobody uses there back to the system; returns how many it gave."""
    given: list[int] = []
    mine = [each.monitor for each in living_pools() if each.monitor.inside.locked()]

    def trim() -> None:
        with suppress(VmmkvError), ExitStack() as inside:  # it is closed, or unusable: it has nothing for others then
            for monitor in mine:  # who is waited for by this thread: what garbage collection ends here is not to wait
                inside.enter_context(monitor.inside)
            given.append(pool.trim(keep=max(pool.accounts.physical * pool.page_size - nbytes, 0)))

    # In a thread, which takes that pool's locks as any other: who is interrupted here leaves none of them held.
    thread = threading.Thread(target=trim, name="vmmkv-neighbour", daemon=True)
    with suppress(RuntimeError):  # no thread can be started, at the interpreter's end for one
        thread.start()
        thread.join()
    return sum(given)


def _is_neighbour(pool: FramePool, other: FramePool) -> bool:
    return other is not pool and not other.monitor.is_mine and _of_one_memory(pool.driver, other.driver)


def _of_one_memory(one: Driver, other: Driver) -> bool:
    """Whether two drivers have their pages from the same device."""
    return one.device == other.device and one.table["create"] == other.table["create"]
