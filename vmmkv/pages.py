"""The page pool: physical pages, the budget they are drawn from, and how often each was used.

A page is named by a small number for as long as its memory exists. It is in one of three states:

    vacant --create--> free --take--> taken --give--> free --release--> vacant

Invariants:
 1. `created = free + taken <= budget`, in pages; the driver holds exactly the created ones.
 2. `take` hands out all that is asked for or changes nothing that a caller can see.
 3. The pool never maps anything; whoever took a page maps it, unmaps it, and then gives it back.
 4. `handles` says which pages exist, except while `unsettled`: who is interrupted then (Ctrl-C) cannot know. All other
    books follow from that and from who has taken what: `settle` works them out.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter_ns

from .driver import Driver, Handle
from .errors import DriverError, OutOfPagesError
from .meter import Meter


class PagePool:
    """Pages of one driver, at most `budget` of them at a time.

    Args:
        driver: the memory system.
        budget: the largest number of pages that may exist at once.
    """

    def __init__(self, driver: Driver, budget: int) -> None:
        self.driver = driver
        self.budget = budget
        self.meter = Meter()
        """Calls that the pool, and whoever maps its pages, have made."""
        self.handles: list[Handle | None] = []
        """By page number: the driver's handle; None while vacant."""
        self.uses: list[int] = []
        """By page number: how often the page has left a sequence since it was created."""
        self.pages_created = 0
        """Pages created since the beginning."""
        self.page_uses = 0
        """How often a page has left a sequence since the beginning."""
        self.taken = 0
        """Pages that somebody has taken."""
        self.unsettled = False
        """Whether the driver is making or releasing a page, and the books do not say so yet."""
        self._free: list[int] = []
        self._vacant: list[int] = []
        weakref.finalize(self, _release_all, driver, self.handles, os.getpid()).atexit = False

    @property
    def free(self) -> int:
        """Pages that exist and belong to nobody."""
        return len(self._free)

    @property
    def free_pages(self) -> list[int]:
        """Their numbers."""
        return list(self._free)

    @property
    def created(self) -> int:
        """Pages that exist."""
        return self.taken + len(self._free)

    @property
    def available(self) -> int:
        """Pages that can be taken within the budget."""
        return self.budget - self.taken

    def take(self, count: int) -> list[int]:
        """Hands out `count` pages, free ones first, the rest newly created.

        Raises:
            OutOfPagesError: the budget does not allow so many.
            DriverError: the driver could not create one; those created before it are free now.
        """
        if count > self.budget - self.taken:
            raise OutOfPagesError(
                f"asked for {count} pages of {self.driver.page_size} bytes; {self.available} are available "
                f"of a budget of {self.budget}",
                requested=count,
                available=self.available,
            )
        keep = max(len(self._free) - count, 0)
        pages = self._free[keep:]
        del self._free[keep:]
        if len(pages) < count:
            start = perf_counter_ns()
            created = len(pages)
            try:
                while len(pages) < count:
                    pages.append(self._create())
            except BaseException:
                self._free += pages
                raise
            finally:
                self.meter.create.add(len(pages) - created, perf_counter_ns() - start)
        self.taken += count
        return pages

    def give(self, pages: list[int]) -> None:
        """Takes pages back; they must be mapped nowhere."""
        self._free.extend(pages)
        self.taken -= len(pages)

    def count_uses(self, pages: list[int]) -> None:
        """Counts that these pages have left the sequence that they were part of."""
        self.page_uses += len(pages)
        for page in pages:
            self.uses[page] += 1

    def release_free(self) -> int:
        """Gives the memory of all free pages back to the system; returns how many pages that were."""
        count = len(self._free)
        start = perf_counter_ns()
        try:
            while self._free:
                page = self._free[-1]
                handle = self.handles[page]
                assert handle is not None
                with self._unsettled():
                    self.handles[page] = None  # before: what is released twice may be somebody else's by then
                    try:
                        self.driver.release(handle)
                    except DriverError:
                        self.handles[page] = handle
                        raise
                self._vacant.append(self._free.pop())
        finally:
            self.meter.release.add(count - len(self._free), perf_counter_ns() - start)
        return count

    def settle(self, taken: Collection[int]) -> None:
        """Works out anew, after an interruption, which pages are free: all that exist but those `taken`."""
        exists = [handle is not None for handle in self.handles]
        self._free = [page for page, there in enumerate(exists) if there and page not in taken]
        self._vacant = [page for page, there in enumerate(exists) if not there]
        self.uses += [0] * (len(exists) - len(self.uses))
        self.taken = len(taken)

    def close(self) -> None:
        """Gives all memory back, in whatever state the driver is."""
        _release_all(self.driver, self.handles, os.getpid())
        self._free.clear()

    def _create(self) -> int:
        page = self._vacant[-1] if self._vacant else len(self.handles)
        with self._unsettled():
            handle = self.driver.create()
            if self._vacant:
                self.handles[page] = handle
            else:
                self.handles.append(handle)
        if self._vacant:
            self._vacant.pop()
            self.uses[page] = 0
        else:
            self.uses.append(0)
        self.pages_created += 1
        return page

    @contextmanager
    def _unsettled(self) -> Iterator[None]:
        """Around a call of the driver, and the line that writes it down. A call that fails has done nothing."""
        self.unsettled = True
        try:
            yield
        except DriverError:
            self.unsettled = False
            raise
        self.unsettled = False


def _release_all(driver: Driver, handles: list[Handle | None], owner: int) -> None:
    if os.getpid() != owner:
        return
    for page, handle in enumerate(handles):
        if handle is not None:
            with suppress(DriverError):
                handles[page] = None  # before: see `release_free`
                driver.release(handle)
