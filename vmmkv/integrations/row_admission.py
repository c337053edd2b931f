"""Admission of requests to rows: which there is room for, in all processes of a group and on all devices, and what each
begins with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress

from ..errors import OutOfPagesError
from .row_ranks import Ranks
from .row_requests import NO_ROOM
from .row_stages import Requests


class Admission:
    """See above.

    Args:
        requests: those that there are.
        ranks: the processes, of which each holds a share of every request.
        max_seq_len: tokens of a row.
        weights: says what K and V depend on beside tokens.
        adapters: says which of that change under requests that run.
    """

    def __init__(
        self,
        requests: Requests,
        ranks: Ranks,
        max_seq_len: int,
        weights: Callable[[], str],
        adapters: Callable[[], Hashable],
    ) -> None:
        self._requests, self._ranks, self._max_seq_len, self._weights = requests, ranks, max_seq_len, weights
        self._committed: dict[str, int] = {}
        """By request: tokens that others may begin with."""
        self._refused: dict[str, tuple[int, int]] = {}
        """By request that there was no room for: the tokens that it was to have, and how often requests had been asked
        what others may know."""
        self._asked = 0
        """How often they have been: as often in all processes, of which one may see adapters change before others."""
        self._adapters, self._used = adapters, adapters()
        self._mixed: set[str] = set()
        """Requests that were computed with several adapters: nobody may begin with what they hold."""

    def fits(self, name: str, tokens: int) -> bool:
        """Whether there is room for a request to grow to so many tokens."""
        fits = [needed <= there for needed, there in zip(self.pages_missing(name, tokens), self._available_pages())]
        return all(fits) and tokens <= self._max_seq_len

    def pages_missing(self, name: str, tokens: int) -> list[int]:
        """Pages that a request lacks for so many tokens, on each device."""
        return [stage.pages_missing(name, tokens) for stage in self._requests.stages]

    def _available_pages(self) -> list[float]:
        """Pages that hold no tokens, on each device, in every process."""
        return [self._ranks.least(stage.available_pages) for stage in self._requests.stages]

    def count_that_fit(self, pages: Iterable[list[int]]) -> int:
        """How many requests there is room for, from the first on, of which each needs so many pages on each device."""
        left, count = self._available_pages(), 0
        for needed in pages:
            left = [there - taken for there, taken in zip(left, needed)]
            if min(left) < 0:
                break
            count += 1
        return count

    def admit(self, name: str, held: int, tokens: int, expected: int) -> bool:
        """Gives a request that holds `held` tokens room for `tokens`; returns whether there is.

        Args:
            expected: tokens that it is to have soon, if it is new.
        """
        is_new = name not in self._requests and not self._requests.is_away(name)
        if is_new and self._has_no_more_room(name, None):
            return False
        has_room = (not is_new or self._begin(name, expected)) and self._requests.make_room(name, held, tokens)
        if not has_room and not held:
            self.end(name)
            self._refused[name] = tokens, self._asked
        return has_room

    def _has_no_more_room(self, name: str, token_ids: list[int] | None) -> bool:
        """Whether there was no room for a request, and there are fewer pages than it needs still, with those that it
        could share by now. In each step transformers asks for all that wait, and to begin one, and end it, takes longer
        than many others' share of a step."""
        if name not in self._refused:
            return False
        tokens, asked = self._refused[name]
        lacking = [needed - there for needed, there in zip(self.pages_missing(name, tokens), self._allowed_pages())]
        if max(lacking) <= 0:
            return False
        if asked == self._asked:
            return True
        if token_ids is None or all(lack <= shared for lack, shared in zip(lacking, self._shared_pages(token_ids))):
            return False
        self._refused[name] = tokens, self._asked
        return True

    def _shared_pages(self, token_ids: list[int]) -> list[float]:
        """Pages that a request would share with others, on each device, in every process."""
        weights = self._weights()
        return [self._ranks.least(stage.shared_pages(token_ids, weights)) for stage in self._requests.stages]

    def _allowed_pages(self) -> list[float]:
        """Pages that hold no tokens, as far as limits go. Whether the driver gives them, only who begins finds out."""
        return [self._ranks.least(stage.allowed_pages) for stage in self._requests.stages]

    def begin_known(self, name: str, token_ids: list[int]) -> int:
        """Starts a request with what is known of its tokens; returns how many these are."""
        self._requests.end(name)  # from a step in which there was no room
        if self._has_no_more_room(name, token_ids) or not self._begin(name, len(token_ids), token_ids):
            return 0
        return self._committed[name]

    def _begin(self, name: str, expected: int, token_ids: list[int] | None = None) -> bool:
        """Starts a request; returns whether there is a row for it."""
        self.look_at_adapters()
        with suppress(*NO_ROOM):
            self._committed[name] = self._requests.begin(name, expected, token_ids, self._weights())
            self._mixed.discard(name)
            return True
        return False

    def look_at_adapters(self) -> None:
        """Looks which adapters a forward pass has, before it and behind it."""
        if (used := self._adapters()) != self._used:
            self._used = used
            self._mixed.update(self._committed)

    def fork(self, parent: str, children: Sequence[str]) -> list[str]:
        """Starts requests that hold what another holds, as many as there is room for; returns which."""
        started = self._requests.fork(parent, children)
        self._committed.update(dict.fromkeys(started, self._committed.get(parent, 0)))
        if parent in self._mixed:
            self._mixed.update(started)
        return started

    def commits(self, name: str, tokens: int, is_over: bool) -> bool:
        """Whether a request that holds so many tokens has some to make known to others; counts that it was asked."""
        self._asked += 1
        if name not in self._requests or name in self._mixed:
            return False
        return is_over or self._requests.fills_pages(self._committed.get(name, 0), tokens)

    def commit(self, name: str, tokens: int, token_ids: list[int]) -> None:
        """Makes the first so many tokens of a request known to others."""
        self._requests.commit(name, token_ids[:tokens])
        self._committed[name] = tokens

    def end(self, name: str) -> None:
        """Ends a request, if there is one of this name that is not on the host: what that one holds is known, and
        computed, as it was, once it comes back."""
        self._requests.end(name)
        self._refused.pop(name, None)
        if not self._requests.is_away(name):
            self._committed.pop(name, None)
            self._mixed.discard(name)

    def end_away(self, name: str) -> None:
        """Ends a request, if there is one of this name that is on the host."""
        self._requests.end_away(name)
        self.end(name)

    def end_all(self) -> None:
        """Ends all requests."""
        self._requests.end_all()
        self._committed.clear()
        self._refused.clear()
        self._mixed.clear()

    def free_pages(self, relative: bool) -> float:
        """Bytes that hold no tokens of any request; or their share of all. Of several devices where it is the least."""
        free = []
        for stage in self._requests.stages:
            pages, pool = stage.available_pages, stage.caches[0].pool
            free.append(pages / pool.limit_pages if relative else pages * pool.page_size)
        return self._ranks.least(min(free))

    def others_hold_memory(self) -> bool:
        """Whether others on the pool, in any process, use some of it."""
        most = 0
        for stage in self._requests.stages:
            pool = stage.caches[0].pool
            stats, own = pool.stats(), sum(cache.stats().pages["used"] for cache in stage.caches) * pool.page_size
            most = max(most, stats.used_bytes - own, stats.leased_bytes)
        return self._ranks.least(-most) < 0

    def no_room_for(self, name: str, tokens: int) -> OutOfPagesError:
        """Why a request of so many tokens ends, for which there is no memory though nobody else has any."""
        stages = self._requests.stages
        needed, limit, pool = max(
            ((stage.pages_of(tokens), stage.caches[0].pool.limit_pages, stage.caches[0].pool) for stage in stages),
            key=lambda each: each[0] / each[1],
        )
        return OutOfPagesError(
            f"asked for {needed} pages on {pool.device}, of {tokens} tokens, for request {name} alone; the limit is "
            f"{limit} pages. A larger max_bytes helps",
            requested=needed,
            available=limit,
        )
