"""Admission of requests to rows: which there is room for, in all processes of a group, and what each begins with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress

from ..errors import OutOfPagesError
from .row_ranks import Ranks
from .row_requests import NO_ROOM, RowRequests


class Admission:
    """See above.

    Args:
        requests: those that there are.
        ranks: the processes, of which each holds a share of every request.
        max_seq_len: tokens of a row.
        weights: says what K and V depend on beside tokens.
    """

    def __init__(self, requests: RowRequests, ranks: Ranks, max_seq_len: int, weights: Callable[[], Hashable]) -> None:
        self._requests, self._ranks, self._max_seq_len, self._weights = requests, ranks, max_seq_len, weights
        self._pool = requests.caches[0].pool
        self._committed: dict[str, int] = {}
        """By request: tokens that others may begin with."""

    def fits(self, name: str, tokens: int) -> bool:
        """Whether there is room for a request to grow to so many tokens."""
        fits = self._requests.pages_missing(name, tokens) <= self._ranks.least(self._requests.available_pages)
        return fits and tokens <= self._max_seq_len

    def count_that_fit(self, pages: Iterable[int]) -> int:
        """How many requests there is room for, from the first on, of which each needs so many pages."""
        left, count = self._ranks.least(self._requests.available_pages), 0
        for needed in pages:
            left -= needed
            if left < 0:
                break
            count += 1
        return count

    def admit(self, name: str, held: int, tokens: int, expected: int) -> bool:
        """Gives a request that holds `held` tokens room for `tokens`; returns whether there is.

        Args:
            expected: tokens that it is to have soon, if it is new.
        """
        is_new = name not in self._requests and not self._requests.is_away(name)
        has_room = (not is_new or self._begin(name, expected)) and self._requests.make_room(name, held, tokens)
        if not has_room and not held:
            self.end(name)
        return has_room

    def begin_known(self, name: str, token_ids: list[int]) -> int:
        """Starts a request with what is known of its tokens; returns how many these are."""
        self._requests.end(name)  # from a step in which there was no room
        return self._committed[name] if self._begin(name, len(token_ids), token_ids) else 0

    def _begin(self, name: str, expected: int, token_ids: list[int] | None = None) -> bool:
        """Starts a request; returns whether there is a row for it."""
        with suppress(*NO_ROOM):
            self._committed[name] = self._requests.begin(name, expected, token_ids, self._weights())
            return True
        return False

    def commits(self, name: str, tokens: int, is_over: bool) -> bool:
        """Whether a request that holds so many tokens has some to make known to others."""
        if name not in self._requests:
            return False
        return is_over or self._requests.fills_pages(self._committed.get(name, 0), tokens)

    def commit(self, name: str, tokens: int, token_ids: list[int]) -> None:
        """Makes the first so many tokens of a request known to others."""
        self._requests.commit(name, token_ids[:tokens])
        self._committed[name] = tokens

    def end(self, name: str) -> None:
        """Ends a request, if there is one of this name."""
        self._requests.end(name)
        self._committed.pop(name, None)

    def end_all(self) -> None:
        """Ends all requests."""
        self._requests.end_all()
        self._committed.clear()

    def free_pages(self, relative: bool) -> float:
        """Bytes that hold no tokens of any request; or their share of all."""
        pages = self._requests.available_pages
        return self._ranks.least(pages / self._pool.limit if relative else pages * self._pool.page_size)

    def others_hold_memory(self) -> bool:
        """Whether others on the pool, in any process, use some of it."""
        stats, caches = self._pool.stats(), self._requests.caches
        used = sum(cache.stats().pages["used"] for cache in caches) * self._pool.page_size
        return self._ranks.least(-max(stats.used_bytes - used, stats.leased_bytes)) < 0

    def no_room_for(self, name: str, tokens: int) -> OutOfPagesError:
        """Why a request of so many tokens ends, for which there is no memory though nobody else has any."""
        needed, limit = self._requests.pages_of(tokens), self._pool.limit
        return OutOfPagesError(
            f"asked for {needed} pages, of {tokens} tokens, for request {name} alone; the limit is {limit} pages. A "
            "larger max_bytes helps",
            requested=needed,
            available=limit,
        )
