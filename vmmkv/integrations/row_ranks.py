"""Requests on rows of several processes, of which each holds a share of the heads: what there is room for in one, there
is room for in all.

Each schedules the same requests, but its driver, and what it has kept of earlier ones, are its own. So what one process
may refuse all try, and agree on the least; who had more takes it back. Whether a request grows inside pages that all
are known to have follows from token counts, and is not asked.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Many
from functools import partial
from typing import Any

from ..errors import OutOfPagesError, RankFailedError, UnsupportedError
from .row_requests import NO_ROOM, RowRequests

FAILED = -float("inf")
"""What a process says that cannot go on."""


class Ranks:
    """The processes of a tensor parallel group. All make the same calls in the same order.

    Args:
        size: how many they are.
        rank: which of them this one is.
        minimum: the least of a number of each; all call it.
    """

    def __init__(self, size: int, rank: int, minimum: Callable[[float], float]) -> None:
        self.size, self._rank, self._minimum = size, rank, minimum

    def least(self, value: float) -> float:
        """The least of what they say.

        Raises:
            RankFailedError: one cannot go on.
        """
        if self.size == 1:
            return value
        least = self._minimum(value)
        if least == FAILED != value:
            raise RankFailedError(
                f"process {self._rank} of {self.size} stops, since another one has failed; its error says why"
            )
        return least

    def attempt(self, action: Callable[[], float]) -> tuple[float, float]:
        """What comes of an action here, and the least of what comes of it anywhere. It must not ask others.

        Raises:
            RankFailedError: another process failed.
        """
        try:
            here = action()
        except Exception:
            self.least(FAILED)
            raise
        return here, self.least(here)

    def check_alike(self, **options: Hashable) -> None:
        """Raises `UnsupportedError`, in every process, where one says something else than another."""
        for name, value in options.items():
            said = zlib.crc32(repr(value).encode())
            if self.least(said) != -self.least(-said):
                raise UnsupportedError(
                    f"{name} is {value} in process {self._rank} of {self.size}, and something else in another; "
                    "requests on rows need it alike in all of them"
                )


class RankedRequests(RowRequests):
    """Requests of which each process of a group has its share. All make the same calls in the same order.

    Args:
        ranks: the processes.
        caches, windows, reuse, has_host: see `RowRequests`.
    """

    def __init__(self, ranks: Ranks, caches: Many[Any], windows: Many[int], *, reuse: bool, has_host: bool) -> None:
        super().__init__(caches, windows, reuse=reuse, has_host=has_host)
        self._ranks = ranks
        self._sure: dict[str, int] = {}
        """By request: tokens that every process has pages of its own for."""

    def begin(self, name: str, expected: int, token_ids: list[int] | None = None, weights: str | None = None) -> int:
        """Starts a request, with what is known of its tokens in all processes.

        Raises:
            OutOfPagesError: there is no room in one of them.
        """
        here, least = self._ranks.attempt(partial(self._begin_here, name, expected, token_ids, weights))
        if least < 0:
            self.end(name)
            raise OutOfPagesError(f"asked for room for request {name}, which not all processes of its group have")
        if least < here:
            self.take_back(name, int(least))
        return int(least)

    def _begin_here(self, name: str, expected: int, token_ids: list[int] | None, weights: str | None) -> int:
        """Starts a request in this process; returns what is known of it, or -1 where there is no room."""
        try:
            return super().begin(name, expected, token_ids, weights)
        except NO_ROOM:
            return -1

    def grow_in_place(self, name: str, held: int, tokens: int) -> bool:
        return self._has_pages(name, tokens) and super().grow_in_place(name, held, tokens)

    def _has_pages(self, name: str, tokens: int) -> bool:
        """Whether every process is known to have pages for so many tokens."""
        return self.pages_of(tokens) <= self.pages_of(self._sure.get(name, 0))

    def make_room(self, name: str, held: int, tokens: int) -> bool:
        if self._has_pages(name, tokens) and not self.holds_more(name, held):
            return super().make_room(name, held, tokens)
        self._sure.pop(name, None)
        was_away = self.is_away(name)
        if was_away and self.pages_to_return(name, tokens) > self._ranks.least(self.available_pages):
            return False
        here, least = self._ranks.attempt(partial(super().make_room, name, held, tokens))
        if least:
            self._sure[name] = tokens
        elif here:
            self.take_back(name, held)
            if was_away:
                self.put_back(name)
        return bool(least)

    def fork(self, parent: str, children: Many[str]) -> list[str]:
        started: list[str] = []
        _, least = self._ranks.attempt(partial(self._fork_here, parent, children, started))
        for child in started[int(least) :]:
            self.end(child)
        return started[: int(least)]

    def _fork_here(self, parent: str, children: Many[str], started: list[str]) -> int:
        started += super().fork(parent, children)
        return len(started)

    def put_away(self, name: str) -> bool:
        self._sure.pop(name, None)
        moved, all_moved = self._ranks.attempt(partial(super().put_away, name))
        if moved and not all_moved:
            self.end_away(name)
        return bool(all_moved)

    def end(self, name: str) -> None:
        self._sure.pop(name, None)
        super().end(name)
