"""The frame table: every piece of physical memory that a pool has, by the numbers of its pages.

    vacant --create--> free --take--> taken --give--> free --release--> vacant
                                       | share ^
                                       +-------+  once more to be given

A frame is of one page, or large: of `LARGE` pages, whose numbers are next to each other and begin at a multiple of
`LARGE`. It is named by the first of them.

Invariants:
 1. `handles[page]` is the driver's handle of the frame that a page is part of, `VACANT` where there is none: the code
    that makes the driver's call writes it down.
 2. A frame that exists is either free or taken, and whoever took it maps it, unmaps it, and then gives it back. One
    that is shared is mapped in several places, of one holder, and free when each of them has given it.
 3. `is_large[page]` says what a page is part of, or would be if it existed: it is written before `handles`.
 4. All other books follow from that and from who has taken what: `settle` works them out.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..driver.calls import Calls
from ..driver.table import VACANT
from ..errors import DriverOutOfMemoryError

LARGE = 16
"""Pages of a large frame: 32 MiB cost the driver as much as one page of 2 MiB, and 128 MiB somewhat more (H200)."""
UNKNOWN = -1
"""Whose bytes a frame may hold that the driver has just made: it promises nothing."""
SEVERAL = -2
"""Whose bytes a frame may hold that one tenant's are just being copied to: also of whoever had it before."""


class Tenants:
    """Who must not read each other's bytes, by number. `None`, who says nothing of the kind, is 0.

    A number is its tenant's for as long as a frame, or a row, carries it. Then the tenant may be forgotten, and the
    number another's: of all who ever came, as many are remembered as there are frames and rows, and some more.
    """

    spare = 1000
    """Names to remember beyond twice those that were last known to matter: to look which do costs as much as many of
    them."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {None: 0}
        self._vacant: list[int] = []
        """Numbers that nothing carries."""
        self._end = 1
        """Numbers from here on were nobody's yet."""
        self._kept = 1
        """Names that mattered when that was last looked at."""

    def __bool__(self) -> bool:
        """Whether there is anybody to be kept apart."""
        return len(self._numbers) > 1

    def __len__(self) -> int:
        """How many are remembered, `None` among them."""
        return len(self._numbers)

    @property
    def are_many(self) -> bool:
        """Whether it is time to `forget`."""
        return len(self._numbers) > 2 * self._kept + self.spare

    def number(self, tenant: Hashable) -> int:
        """The number of a tenant."""
        number = self._numbers.get(tenant)
        if number is None:
            if not self._vacant:
                self._end += 1
                self._vacant.append(self._end - 1)
            number = self._numbers[tenant] = self._vacant.pop()
        return number

    def forget(self, carried: set[int]) -> None:
        """Forgets those whose numbers nothing carries."""
        numbers = {tenant: number for tenant, number in self._numbers.items() if number in carried or not number}
        self._numbers, self._kept = numbers, len(numbers)
        self._vacant = [number for number in range(self._end - 1, 0, -1) if number not in carried]


@dataclass(eq=False, slots=True)
class Supply:
    """Frames for somebody who maps them.

    Attributes:
        large: large ones.
        single: those of one page.
    """

    large: list[int]
    single: list[int]

    def pop(self, pages: int, large: int) -> list[int]:
        """Frames of so many pages in all, up to `large` large ones first."""
        if count := min(large, len(self.large)):
            return _pop(self.large, count) + _pop(self.single, pages - count * LARGE)
        return _pop(self.single, pages)


class Frames:
    """The table.

    Args:
        calls: what makes and releases frames.
        limit: how many pages there can ever be; columns of so many take addresses only.
    """

    def __init__(self, calls: Calls, limit: int) -> None:
        self._calls = calls
        self.handles = np.full(0, VACANT)
        """By page."""
        self.is_large = np.zeros(0, np.bool_)
        """By page: whether it is part of a large frame."""
        self.has_large = False
        """Whether there has ever been one."""
        self.shares = np.zeros(0, np.int32)
        """By frame: in how many places it is, beyond the first."""
        self.has_shared = False
        """Whether there has ever been one in several, or was about to be."""
        self.users = np.zeros(0, np.int32)
        """By page: how many sequences use it, of those who may share it."""
        self.uses = np.zeros(0, np.int64)
        """By page: how often it has left a sequence since it was made."""
        self.tenants = np.zeros(0, np.int32)
        """By page: whose bytes it may hold, as `Tenants` numbers them; `UNKNOWN` of one that was just made, and
        `SEVERAL`, which nobody may read."""
        self.limit = limit
        self.free: list[int] = []
        """Frames of one page that exist and belong to nobody."""
        self.free_large: list[int] = []
        """Large ones."""
        self.taken = 0
        """How many pages somebody has."""
        self.made = 0
        """How many pages were made since the beginning."""
        self.numbers = 0
        """Pages `[0, numbers)` have existed."""
        self._vacant: list[int] = []
        """Numbers for frames of one page."""
        self._vacant_large: list[int] = []
        """Numbers for large frames."""

    @property
    def free_pages(self) -> int:
        """How many pages are free."""
        return len(self.free) + len(self.free_large) * LARGE

    @property
    def existing(self) -> int:
        """How many pages there are."""
        return self.taken + self.free_pages

    def known_tenants(self) -> set[int]:
        """Numbers of those whose bytes there may be somewhere."""
        return set(self.tenants[: len(self.handles)][self.handles != VACANT].tolist())

    def in_pages(self, frames: Iterable[int]) -> list[int]:
        """The numbers of all pages of frames, in order."""
        is_large, pages = self.is_large.data, list[int]()
        for frame in frames:
            pages += range(frame, frame + LARGE) if is_large[frame] else (frame,)
        return pages

    def of_pages(self, pages: npt.NDArray[np.integer]) -> list[int]:
        """The frames that pages are part of, of each of which all pages are named."""
        if self.has_large:
            pages = pages[~self.is_large[pages] | (pages % LARGE == 0)]
        return pages.tolist()  # type: ignore[no-any-return]

    def take(self, pages: int, large: int, limit: int) -> Supply:
        """Hands out frames: free ones first, then newly made ones, then free ones of the other size made anew.

        Args:
            pages: how many in all; there must be memory for them.
            large: large frames among them, as far as there is memory for such.
            limit: pages that may exist.

        Raises:
            DriverError: one could not be made; those made before it are free now.
        """
        if large:
            self._make_large(large - len(self.free_large), len(self.free) - pages + large * LARGE, limit)
            large = min(large, len(self.free_large))
        single = pages - large * LARGE
        if single > len(self.free):
            try:
                self.make(min(single - len(self.free), limit - self.existing))
            except DriverOutOfMemoryError:  # the device has less left than that
                if single > len(self.free) + (len(self.free_large) - large) * LARGE:
                    raise
            while single > len(self.free):
                self.break_up(self._calls)
        self.taken += pages
        return Supply(_pop(self.free_large, large), _pop(self.free, single))

    def give(self, frames: Collection[int]) -> int:
        """Takes frames back, from where they are not any more; returns the pages of those that are nowhere else."""
        before, shares, is_large = self.taken, self.shares.data, self.is_large.data
        for frame in frames:
            if shares[frame]:
                shares[frame] -= 1
                continue
            free, pages = (self.free_large, LARGE) if is_large[frame] else (self.free, 1)
            free.append(frame)
            self.taken -= pages
            if self.has_shared:
                self.users[frame : frame + pages] = 0  # a cache that was closed has counted none off
        return before - self.taken

    def is_readable(self, pages: npt.NDArray[np.integer], tenant: int) -> npt.NDArray[np.bool_]:
        """Whether pages hold nothing but what a tenant may read."""
        holders = self.tenants[pages]
        readable: npt.NDArray[np.bool_] = holders == tenant
        return readable | (holders == UNKNOWN) if tenant == 0 else readable

    def bring_forward(self, tenant: int, count: int) -> tuple[int, int]:
        """Has free frames that a tenant may read be taken next, of those `count` of each size that would be; returns
        how many large and single ones."""
        found = []
        for free, pages in (self.free_large, LARGE), (self.free, 1):
            last = np.array(free[-count:], np.int64)
            readable = self.is_readable(np.add.outer(last, np.arange(pages)), tenant).all(axis=1)
            free[len(free) - len(last) :] = last[np.argsort(readable, kind="stable")].tolist()
            found.append(int(readable.sum()))
        return found[0], found[1]

    def frame_of(self, page: int) -> int:
        """The frame that a page is part of."""
        return page // LARGE * LARGE if self.is_large[page] else page

    def frames_of(self, pages: Iterable[int]) -> list[int]:
        """The frames that pages are part of, once for each page."""
        is_large = self.is_large.data
        return [page // LARGE * LARGE if is_large[page] else page for page in pages]

    def expect_shares(self) -> None:
        """Says that frames are about to be in several places: first of all, for who is interrupted leaves rows that are
        marked, and whoever asks for `has_shared` before looking there must see them."""
        self.has_shared = True

    def share(self, frames: Collection[int]) -> None:
        """Says that frames are in one place more."""
        self.expect_shares()
        shares = self.shares.data
        for frame in frames:
            shares[frame] += 1

    def make(self, count: int, pages: int = 1, calls: Calls | None = None) -> None:
        """Makes frames of so many pages, which are free then; by other calls than its own, where that is asked for.

        Raises:
            DriverError: one could not be made; those before it are there.
        """
        if count > 0:
            new = self.plan(count, pages)
            outcome = (calls or self._calls).create(self.handles, new, pages)
            self.commit(new, outcome.done, pages)
            outcome.check()

    def _make_large(self, count: int, spare: int, limit: int) -> None:
        """Makes up to so many large frames: of new memory, then of up to `spare` free pages."""
        new = min(count, (limit - self.existing) // LARGE)
        with suppress(DriverOutOfMemoryError):  # single ones may still be had
            self.make(new, LARGE)
        for _ in range(min(count - new, spare // LARGE)):
            self._release(self._calls, LARGE, 1)
            self.make(1, LARGE)

    def break_up(self, calls: Calls) -> None:
        """Makes frames of one page out of a free large one.

        Raises:
            DriverError: it could not be released, or they could not be made.
        """
        self._release(calls, 1, LARGE)
        self.make(LARGE, calls=calls)

    def plan(self, count: int, pages: int = 1) -> list[int]:
        """Numbers for frames of so many pages that are about to be made."""
        _, vacant = self._lists(pages)
        if count > len(vacant):
            self._add_numbers(count - len(vacant), pages)
        new = _pop(vacant, count)
        if pages > 1 or self.has_large:
            self.has_large = True
            for frame in new:
                self.is_large[frame : frame + pages] = pages > 1
        self.numbers = max(self.numbers, max(new) + pages)
        return new

    def commit(self, new: list[int], done: int, pages: int = 1) -> None:
        """Writes down that the first of planned frames were made: they are free."""
        free, vacant = self._lists(pages)
        free += new[:done]
        vacant += new[done:]
        self.made += done * pages

    def release(self, pages: int) -> None:
        """Gives the memory of so many free pages back to the system, and of what is left of a large frame.

        Raises:
            DriverError: one could not be released; those before it are gone.
        """
        large = min(pages // LARGE, len(self.free_large))
        self._release(self._calls, large, LARGE)
        single = min(pages - large * LARGE, len(self.free))
        self._release(self._calls, single, 1)
        self._release(self._calls, -(-(pages - large * LARGE - single) // LARGE), LARGE)

    def _release(self, calls: Calls, count: int, pages: int) -> None:
        """Gives so many free frames of one size back."""
        if count <= 0:
            return
        free, vacant = self._lists(pages)
        old = free[-count:]
        outcome = calls.release(self.handles, old, pages)
        free[len(free) - count :] = old[outcome.done :]
        self._forget(old[: outcome.done], pages)
        vacant += old[: outcome.done]
        outcome.check()

    def _forget(self, frames: list[int], pages: int) -> None:
        """Frames that are made next are unused, and nobody knows what they hold."""
        numbers = np.add.outer(np.array(frames, np.int64), np.arange(pages))
        self.uses[numbers], self.tenants[numbers] = 0, UNKNOWN

    def settle(self, taken: Iterable[int]) -> None:
        """Works out anew, after an interruption, which frames are free: all that exist but those of pages `taken`.

        Args:
            taken: pages, once for each place where they are.
        """
        exists = self.handles != VACANT
        vacant = ~exists.reshape(-1, LARGE).any(axis=1)
        self._vacant_large = (np.flatnonzero(vacant)[::-1] * LARGE).tolist()
        self._vacant = np.flatnonzero(~exists & ~np.repeat(vacant, LARGE)).tolist()
        self.uses[: len(exists)][~exists], self.tenants[: len(exists)][~exists] = 0, UNKNOWN
        places = np.bincount(np.fromiter(taken, np.int64), minlength=len(exists))
        is_large = self.is_large[: len(exists)]  # who was interrupted may have added numbers to it alone
        shares = np.maximum(places - 1, 0)
        shares.reshape(-1, LARGE)[is_large[::LARGE], 1:] = 0  # by frame, not by page
        self.shares[: len(exists)] = shares
        self.users[:] = 0
        is_free = exists & (places == 0)
        self.free = np.flatnonzero(is_free & ~is_large).tolist()
        self.free_large = (np.flatnonzero((is_free & is_large)[::LARGE]) * LARGE).tolist()
        self.taken = int(exists.sum() - is_free.sum())

    def close(self) -> None:
        """Releases all, in whatever state the driver is."""
        existing = self.of_pages(np.flatnonzero(self.handles != VACANT))
        for pages in (1, LARGE):
            some = [frame for frame in existing if self.is_large[frame] == (pages > 1)]
            while some:
                outcome = self._calls.release(self.handles, some, pages)
                del some[: outcome.done + (not outcome)]
        self.free.clear()
        self.free_large.clear()
        self.taken = 0

    def _lists(self, pages: int) -> tuple[list[int], list[int]]:
        """Of frames of so many pages: the free ones, and numbers for more."""
        return (self.free, self._vacant) if pages == 1 else (self.free_large, self._vacant_large)

    def _add_numbers(self, count: int, pages: int) -> None:
        """Adds numbers for at least so many frames."""
        missing = -(-count * pages // LARGE)  # large frames, or numbers of such
        self._grow(missing if pages > 1 else missing - len(self._vacant_large))
        if pages == 1:
            split = _pop(self._vacant_large, missing)
            self._vacant[:0] = np.add.outer(split, np.arange(LARGE - 1, -1, -1)).ravel().tolist()

    def _grow(self, missing: int) -> None:
        """Adds numbers for so many large frames."""
        if missing <= 0:
            return
        first = len(self.handles)
        more = -(-max(missing * LARGE, min(first, self.limit - first)) // LARGE) * LARGE
        self.uses = np.concatenate([self.uses[:first], np.zeros(more, np.int64)])
        self.shares = np.concatenate([self.shares[:first], np.zeros(more, np.int32)])
        self.users = np.concatenate([self.users[:first], np.zeros(more, np.int32)])
        self.tenants = np.concatenate([self.tenants[:first], np.full(more, UNKNOWN, np.int32)])
        self.is_large = np.concatenate([self.is_large[:first], np.zeros(more, np.bool_)])
        self.handles = np.concatenate([self.handles, np.full(more, VACANT)])
        self._vacant_large[:0] = range(first + more - LARGE, first - 1, -LARGE)


def _pop(numbers: list[int], count: int) -> list[int]:
    """The last ones of a list, which it has no more."""
    if not count:
        return []
    popped = numbers[-count:]
    del numbers[-count:]
    return popped
