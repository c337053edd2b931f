"""The frame table: every piece of physical memory that a pool has, by its number.

    vacant --create--> free --take--> taken --give--> free --release--> vacant

Invariants:
 1. `handles[frame]` is the driver's handle of a frame that exists, `VACANT` of one that does not; except while
    `Calls.in_doubt`: who is interrupted then (Ctrl-C) cannot know whether the driver has made or released one.
 2. A frame that exists is either free or taken, and whoever took it maps it, unmaps it, and then gives it back.
 3. All other books follow from that and from who has taken what: `settle` works them out.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from .calls import VACANT, Calls

UNKNOWN = -1
"""Whose bytes a frame may hold that the driver has just made: it promises nothing."""


class Tenants:
    """Who must not read each other's bytes, by number. `None`, who says nothing of the kind, is 0."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {None: 0}

    def __bool__(self) -> bool:
        """Whether there is anybody to be kept apart."""
        return len(self._numbers) > 1

    def number(self, tenant: Hashable) -> int:
        """The number of a tenant; the same at any time."""
        return self._numbers.setdefault(tenant, len(self._numbers))


class Frames:
    """Frames of one page.

    Args:
        calls: what makes and releases them.
        limit: how many there can ever be; columns of so many take addresses only.
    """

    def __init__(self, calls: Calls, limit: int) -> None:
        self._calls = calls
        self.handles = np.full(0, VACANT)
        """By frame."""
        self.uses = np.zeros(0, np.int64)
        """By frame: how often it has left a sequence since it was made."""
        self.tenants = np.zeros(0, np.int32)
        """By frame: whose bytes it may hold, as `Tenants` numbers them; `UNKNOWN` of one that was just made."""
        self.limit = limit
        self.free: list[int] = []
        """Those that exist and belong to nobody."""
        self.taken = 0
        """How many somebody has."""
        self.made = 0
        """How many were made since the beginning."""
        self.numbers = 0
        """Frames `[0, numbers)` have existed."""
        self._vacant: list[int] = []

    @property
    def existing(self) -> int:
        """How many there are."""
        return self.taken + len(self.free)

    def take(self, count: int) -> list[int]:
        """Hands out `count` frames, free ones first, the rest newly made.

        Raises:
            DriverError: one could not be made; those made before it are free now.
        """
        if count > len(self.free):
            self.make(count - len(self.free))
        keep = len(self.free) - count
        taken = self.free[keep:]
        self.taken += count
        del self.free[keep:]
        return taken

    def give(self, frames: Sequence[int]) -> None:
        """Takes frames back; they must be mapped nowhere."""
        self.free.extend(frames)
        self.taken -= len(frames)

    def make(self, count: int) -> None:
        """Makes frames, which are free then.

        Raises:
            DriverError: one could not be made; those before it are there.
        """
        new = self.plan(count)
        outcome = self._calls.create(self.handles, new)
        self.commit(new, outcome.done)
        outcome.check()

    def plan(self, count: int) -> list[int]:
        """Numbers for frames that are about to be made."""
        self._grow(count)
        new = self._vacant[-count:]
        del self._vacant[len(self._vacant) - count :]
        self.uses[new], self.tenants[new] = 0, UNKNOWN
        self.numbers = max(self.numbers, max(new) + 1)
        return new

    def commit(self, new: list[int], done: int) -> None:
        """Writes down that the first of planned frames were made: they are free."""
        self.free += new[:done]
        self._vacant += new[done:]
        self.made += done

    def release(self, count: int) -> None:
        """Gives the memory of so many free frames back to the system.

        Raises:
            DriverError: one could not be released; those before it are gone.
        """
        if not count:
            return
        old = self.free[-count:]
        outcome = self._calls.release(self.handles, old)
        del self.free[len(self.free) - count :]
        self.free += old[outcome.done :]
        self._vacant += old[: outcome.done]
        outcome.check()

    def settle(self, taken: Iterable[int]) -> None:
        """Works out anew, after an interruption, which frames are free: all that exist but those `taken`."""
        exists = self.handles != VACANT
        self._vacant = np.flatnonzero(~exists).tolist()
        exists[list(taken)] = False
        self.free = np.flatnonzero(exists).tolist()
        self.taken = len(self.handles) - len(self._vacant) - len(self.free)

    def close(self) -> None:
        """Releases all, in whatever state the driver is."""
        existing = np.flatnonzero(self.handles != VACANT).tolist()
        while existing:
            outcome = self._calls.release(self.handles, existing)
            del existing[: outcome.done + (not outcome)]
        self.free.clear()
        self.taken = 0

    def _grow(self, count: int) -> None:
        """Sees to it that so many numbers are vacant."""
        missing = count - len(self._vacant)
        if missing > 0:
            first = len(self.handles)
            more = max(missing, min(first, self.limit - first))
            self.uses = np.concatenate([self.uses[:first], np.zeros(more, np.int64)])
            self.tenants = np.concatenate([self.tenants[:first], np.zeros(more, np.int32)])
            self.handles = np.concatenate([self.handles, np.full(more, VACANT)])
            self._vacant[:0] = range(first + more - 1, first - 1, -1)
