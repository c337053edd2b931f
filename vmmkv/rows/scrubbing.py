"""Scrubbing: frames that have left a tenant are zeroed in the background, for rows of others that will soon need them.

    free  --map-->  staging row  --zeroed on a stream of its own, unmapped-->  free, and its new tenant's

A frame is free only after the fence of the row that it lay on, so nothing has to be waited for before it is zeroed. It
comes to a row when it is zeros, never before: who reads all that is mapped there finds nothing of others at any time.

Invariants:
 1. It takes what is free and idle, and gives it back as soon as somebody lacks pages (`give_way`): so it is no reason
    for `OutOfPagesError`.
 2. A frame is said to be a tenant's when it is zeros. Where a call fails it stays whose it was.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..driver.fence import Fence, finished_on_error
from ..memory.frames import LARGE
from ..space.arena import Arena
from ..space.change import Change
from ..space.mapper import CHUNK
from .books import Books


class Wish(NamedTuple):
    """Frames that a tenant's row is to have ahead of need, and could not read yet."""

    tenant: int
    large: int
    single: int


class Scrubbing:
    """See above. It is a `vmmkv.space.mapper.Mover`.

    Args:
        books: what its rows hold.
    """

    def __init__(self, books: Books) -> None:
        self._pool, self._account, self._books, self._driver = books.pool, books.account, books, books.pool.driver
        self.wishes: list[Wish] = []
        """What the mapper has found to lack when it last looked."""
        self.staging: Arena | None = None
        """Where frames are zeroed: of one row, made when it is needed."""
        self._tenants: list[int] = []
        """By page of the staging row: whose it will be."""
        self._zeroed: Fence | None = None
        """Passes when all that is in the staging row is zeros; None where it will not be."""

    @property
    def wished(self) -> int:
        """Frames that are to be zeroed."""
        return sum([wish.large + wish.single for wish in self.wishes])

    @property
    def is_busy(self) -> bool:
        """Whether there are frames in the staging row."""
        return self.staging is not None and self.staging.table.end[0] > 0

    def give_way(self, wait: bool) -> int:
        """Gives back what is in the staging row; if it is not to wait, only where that is done. Returns its pages."""
        if not self.is_busy:
            return 0
        if wait and self._zeroed:
            self._zeroed.wait()
        return self._stage().unmap_back(0, 0) if self._finish() else 0

    # ------------------------------------------------------------------ what the mapper asks

    @property
    def is_waiting(self) -> bool:
        """Whether there will be something to do without anybody's ringing."""
        return self.is_busy or bool(self.wishes)

    def plan(self, change: Change) -> bool:
        """Plans the next step; it never lacks a frame.

        Raises:
            DriverError: there can be no staging row, or nobody knows what is zeros. Nothing is planned.
        """
        wishes, self.wishes = self.wishes, []
        if self.is_busy:
            if self._finish():
                self._stage().plan_back(change, 0, 0)
            return False
        free, idle = self._pool.frames, max(self._pool.accounts.idle(self._account), 0)
        large = [wish.tenant for wish in wishes for _ in range(wish.large)][: min(len(free.free_large), idle // LARGE)]
        idle -= len(large) * LARGE
        single = [wish.tenant for wish in wishes for _ in range(wish.single)][: min(len(free.free), idle)]
        if pages := len(large) * LARGE + len(single):
            table = self._stage().table
            self._tenants, self._zeroed = [*np.repeat(large, LARGE).tolist(), *single], None
            change.map(table, 0, pages, self._pool.take(self._account, pages, len(large)), len(large))
        return False

    def commit(self) -> None:
        """Zeroes what a change has mapped.

        Raises:
            DriverError: it could not be done, and is not under way any more.
        """
        if self._zeroed or not self.is_busy or self._stage().table.ready[0] < len(self._tenants):
            return
        with finished_on_error(self._driver):
            self._driver.fill(self._stage().address, len(self._tenants) * self._books.page_size, 0, self._stream)
            self._zeroed = Fence.after(self._driver, [self._stream])

    def _finish(self) -> bool:
        """Writes down whose frames are now, if they are zeros; returns whether nothing uses them any more."""
        if self._zeroed:
            if not self._zeroed.passed():
                return False
            pages = self._stage().table.pages_in(0)
            self._pool.frames.tenants[pages] = self._tenants[: len(pages)]
            self._pool.pages_cleaned += len(pages)
            self._zeroed = None
        return True

    @cached_property
    def _stream(self) -> Any:
        """The stream that zeroes."""
        return self._driver.new_stream()

    def _stage(self) -> Arena:
        """The staging row."""
        if self.staging is None:
            self.staging = Arena(self._pool, self._account, 1, CHUNK * LARGE * self._books.page_size)
        return self.staging
