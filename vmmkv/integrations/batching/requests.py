"""Requests on rows: each is, by name, a sequence in every layer group, and all of these hold the same tokens.

What happens to a request happens in all layer groups, on all devices, and in all processes of a tensor parallel group,
or in none. Each process schedules the same requests, but its driver and the prefixes that it has cached are its own: so
all try, agree on the least that one has achieved (`Ranks`), and those that have achieved more undo it.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...cache import KVCache
from ...errors import OutOfPagesError, OutOfRowsError, RankFailedError, UnsupportedError
from ...sequence import Sequence
from .model import Weights

NO_ROOM = (OutOfPagesError, OutOfRowsError)
FAILED = -float("inf")  # what a process that fails contributes to a minimum


class Ranks:
    """A tensor parallel group, of transformers' `DistributedHelper`. All processes make the same calls in one order."""

    def __init__(self, helper: Any) -> None:
        self._size, self._rank, self._helper = helper.tp_size, helper.tp_local_rank, helper

    def least(self, value: float) -> float:
        """The minimum over all processes. Raises `RankFailedError` if another process fails."""
        if self._size == 1:
            return value
        least = float(self._helper.tp_all_reduce_min(torch.tensor(value, dtype=torch.float64), on_cpu=True))
        if least == FAILED != value:
            raise RankFailedError(
                f"process {self._rank} of {self._size} stops, since another one has failed; its error says why"
            )
        return least

    def attempt(self, action: Callable[[], float]) -> tuple[float, float]:
        """The result of an action, which does not communicate, and its minimum over all processes. If it raises, all
        processes stop."""
        try:
            here = action()
        except Exception:
            self.least(FAILED)
            raise
        return here, self.least(here)

    def check_alike(self, **options: Hashable) -> None:
        """Raise `UnsupportedError` in every process if an option differs between processes."""
        for name, value in options.items():
            said = zlib.crc32(repr(value).encode())
            if self.least(said) != -self.least(-said):
                raise UnsupportedError(
                    f"{name} is {value} in process {self._rank} of {self._size}, and something else in another; "
                    "requests on rows need it alike in all of them"
                )


@dataclass
class Request:
    """A sequence for each layer group."""

    sequences: list[Sequence]
    switches: int  # how often adapters had changed when the request began
    tokens: int = 0  # tokens that every sequence holds
    known: int = 0  # tokens that other requests may begin with

    def __post_init__(self) -> None:
        self.rows = [each.index for each in self.sequences]


class Requests:
    """The requests of an engine, on the cache and window of each layer group (0: all tokens). With `reuse` a request
    begins with cached prefixes, and leaves prefixes behind; not with windows, where the first tokens are gone."""

    def __init__(
        self, caches: list[KVCache], windows: list[int], weights: Weights, ranks: Ranks, *, reuse: bool
    ) -> None:
        self.caches, self._windows, self._weights, self._ranks = caches, windows, weights, ranks
        self.reuse = reuse and not any(windows)
        pools = dict.fromkeys(cache.pool for cache in caches)
        self.pools = [[cache for cache in caches if cache.pool is pool] for pool in pools]
        """The caches on each pool; there is one pool for each device."""
        self._requests: dict[str, Request] = {}
        self.grown: set[str] = set()  # requests that were given room for their next token when the step began
        self._is_full = False  # a request could not begin in this step; those behind it wait as well
        self._is_refused = False
        """The driver has refused pages that the limit allows, and no request has freed pages since."""

    def __contains__(self, name: str) -> bool:
        return name in self._requests

    def rows(self, names: list[str]) -> list[list[int]]:
        """Of each request its row in each layer group."""
        return [self._requests[name].rows for name in names]

    # ------------------------------------------------------------------ begin and grow

    def begin_step(self, decoding: Iterable[tuple[str, int]]) -> None:
        """Make room for one token in each request that decodes, by its name and the tokens that it holds: in all or
        none, by one call for each cache."""
        self._is_full, self.grown = False, set()
        growing = {name: each for name, held in decoding if (each := self._requests.get(name)) and each.tokens == held}
        _, has_room = self._ranks.attempt(partial(self._grow, [*growing.values()], 1)) if growing else (1, 1)
        for request in growing.values():
            if has_room:
                request.tokens += 1
            else:
                _shrink(request, request.tokens)
        self.grown = {*growing} if has_room else set()

    def _grow(self, requests: list[Request], tokens: int) -> bool:
        """Make room for so many more tokens in each request; returns whether there is."""
        with suppress(*NO_ROOM):
            for index, (cache, window) in enumerate(zip(self.caches, self._windows)):
                sequences = [request.sequences[index] for request in requests]
                for each in sequences if window else ():  # one token more than the next attends to stays
                    each.release_before(max(each.length - window, each.start))
                cache.extend(sequences, tokens)
            return True
        return False

    def begin(self, name: str, expected: int, token_ids: list[int] | None = None) -> int | None:
        """Start a request, which will have `expected` tokens soon, with the cached prefix of its first tokens. Returns
        how many tokens it begins with; None if there is no room."""
        self.end(name)  # of a step in which it had no room
        if self._is_full:
            return None
        _, known = self._ranks.attempt(partial(self._begin_here, name, expected, token_ids))
        if known < 0:
            self.end(name)
            self._is_full = True
            return None
        request = self._requests[name]
        request.tokens = request.known = int(known)
        _shrink(request, request.known)
        return request.known

    def _begin_here(self, name: str, expected: int, token_ids: list[int] | None) -> int:
        options: dict[str, Any] = {}
        if token_ids is not None and self.reuse:
            options = {"token_ids": token_ids, "adapter": self._weights.key(), "whole": False}
        switches = self._weights.switches()  # behind the key, which looks for adapters that were removed
        makers = [partial(cache.sequence, expected_tokens=expected, **options) for cache in self.caches]
        if not (sequences := _all_or_none(makers)):
            return -1
        self._requests[name] = Request(sequences, switches)
        return min(each.length for each in sequences)

    def admit(self, name: str, held: int, tokens: int, expected: int) -> bool:
        """Make room for `tokens` tokens in a request that holds `held`, which begins if it is new. Without room the
        request is as before, and one without tokens ends."""
        if name not in self._requests and self.begin(name, expected) is None:
            return False
        request = self._requests[name]

        def grow() -> bool:
            _shrink(request, held)  # the pages behind may be shared by now
            return self._grow([request], tokens - request.sequences[0].length)

        here, has_room = self._ranks.attempt(grow)
        if has_room:
            request.tokens = tokens
            return True
        _shrink(request, held)
        request.tokens = min(request.tokens, held)
        if not here:
            self._is_refused |= all(map(operator.le, self.pages_missing(name, tokens), self._available()))
        if not held:
            self.end(name)
            allowed = [caches[0].available_pages for caches in self.pools]  # also while the driver refuses some
            self._is_full = min(self._left(self.pages_missing(name, tokens), allowed)) < 0
        return False

    # ------------------------------------------------------------------ share

    def has_news(self, name: str, tokens: int, is_over: bool) -> bool:
        """Whether a request that has computed `tokens` tokens should commit them: those of a full page, and all when it
        is over. A request that was computed with several adapters never does."""
        request = self._requests.get(name)
        if not self.reuse or request is None or request.switches != self._weights.switches():
            return False
        records = {(cache.page_size, size) for cache in self.caches for size in cache.layout.record_bytes}
        return is_over or any(request.known * size // page < tokens * size // page for page, size in records)

    def commit(self, name: str, token_ids: list[int]) -> None:
        """Let other requests begin with the first tokens of this one."""
        request = self._requests[name]
        for sequence in request.sequences:
            if sequence.is_reusable:
                sequence.commit(token_ids)
        request.known = len(token_ids)

    def fork(self, name: str, children: list[str]) -> list[str]:
        """Start requests that hold what this one holds, as many as there is room for; returns which."""
        parent = self._requests[name]
        _, count = self._ranks.attempt(partial(self._fork_here, parent, children))
        for child in children[int(count) :]:
            self.end(child)
        return children[: int(count)]

    def _fork_here(self, parent: Request, children: list[str]) -> int:
        for count, child in enumerate(children):
            if not (sequences := _all_or_none([each.fork for each in parent.sequences])):
                return count
            self._requests[child] = Request(sequences, parent.switches, parent.tokens, parent.known)
        return len(children)

    # ------------------------------------------------------------------ end

    def end(self, name: str) -> None:
        """End a request, if there is one of this name."""
        if request := self._requests.pop(name, None):
            self._is_refused &= not any(each.length for each in request.sequences)
            for each in request.sequences:
                each.free()

    def end_all(self) -> None:
        """End all requests."""
        for name in list(self._requests):
            self.end(name)

    def trim(self) -> int:
        """Give memory without tokens of requests back to the system, and cached prefixes with it; returns its bytes."""
        return sum(cache.trim() for cache in self.caches)

    # ------------------------------------------------------------------ pages

    def _pages(self, tokens: int) -> list[int]:
        """Pages that tokens of a request lie in, on each pool."""
        return [sum(each.layout.pages(tokens, each.page_size) for each in caches) for caches in self.pools]

    def pages_missing(self, name: str, tokens: int) -> list[int]:
        """Pages that a request needs for `tokens` tokens beyond those that it has, on each pool."""
        request = self._requests.get(name)
        had = self._pages(0 if request is None else request.tokens)
        return [max(wanted - pages, 0) for wanted, pages in zip(self._pages(tokens), had)]

    def _available(self) -> list[int]:
        """Pages without tokens of requests, on each pool; none as long as the driver refuses some."""
        return [0 if self._is_refused else caches[0].available_pages for caches in self.pools]

    def _left(self, missing: list[int], pages: list[int]) -> list[float]:
        """Pages that every process has left, on each pool, behind a request that is missing some."""
        return [self._ranks.least(there) - needed for there, needed in zip(pages, missing)]

    def fits(self, name: str, tokens: int) -> bool:
        """Whether there is room for a request to grow to `tokens` tokens."""
        left = self._left(self.pages_missing(name, tokens), self._available())
        return min(left) >= 0 and tokens <= self.caches[0].max_seq_len

    def count_that_fit(self, wanted: Iterable[list[int]]) -> int:
        """How many requests there is room for, from the first on, by the pages that each is missing on each pool."""
        left, count = self._left([0] * len(self.pools), self._available()), 0
        for missing in wanted:
            left = [*map(operator.sub, left, missing)]
            if min(left) < 0:
                break
            count += 1
        return count

    def free_capacity(self, relative: bool) -> float:
        """Bytes without tokens of requests, or their share of the limit: of the pool that has the least."""
        pools = [caches[0].pool for caches in self.pools]
        scales = [1 / pool.limit_pages if relative else pool.page_size for pool in pools]
        return self._ranks.least(min(map(operator.mul, self._available(), scales)))

    def others_hold_memory(self) -> bool:
        """Whether other users of a pool, in any process, hold memory of it."""
        most = 0
        for caches in self.pools:
            pool, own = caches[0].pool, sum(cache.stats().pages["used"] for cache in caches)
            stats, elsewhere = pool.stats(), 0
            if pool.lender:
                pool.lender.look()
                elsewhere = pool.lender.used_by_others
            most = max(most, stats.used_bytes - own * pool.page_size, stats.leased_bytes, elsewhere)
        return self._ranks.least(-most) < 0

    def no_room_for(self, name: str, tokens: int) -> OutOfPagesError:
        """The error of a request for which there is no memory although no other has any."""
        needs = zip(self._pages(tokens), (caches[0].pool for caches in self.pools))
        pages, pool = max(needs, key=lambda need: need[0] / need[1].limit_pages)
        return OutOfPagesError(
            f"asked for {pages} pages on {pool.device}, of {tokens} tokens, for request {name} alone; the limit is "
            f"{pool.limit_pages} pages. A larger max_bytes helps",
            requested=pages,
            available=pool.limit_pages,
        )


def _shrink(request: Request, tokens: int) -> None:
    """Have a request hold no more than so many tokens on rows."""
    for each in request.sequences:
        if each.length > tokens:
            each.truncate(tokens)


def _all_or_none(makers: Iterable[Callable[[], Sequence]]) -> list[Sequence]:
    """Make all sequences; none if there is no room for one."""
    made: list[Sequence] = []
    with suppress(*NO_ROOM):
        for make in makers:
            made.append(make())
        return made
    for each in made:
        each.free()
    return []
