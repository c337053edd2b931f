"""Requests of an engine on rows: each is, by name, a sequence in every layer group, which hold the same tokens.

All groups lie on one pool. A request grows in all of them or in none; tokens that a window has left are given back.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from contextlib import suppress

from ..cache import KVCache
from ..errors import OutOfHostMemoryError, OutOfPagesError, OutOfRowsError
from ..sequence import Sequence

NO_ROOM = (OutOfPagesError, OutOfRowsError)


class RowRequests:
    """See above.

    Args:
        caches: of each layer group its rows.
        windows: of each the tokens that a token attends to, itself included; 0: all before it.
        reuse: whether requests begin with what others have made known, and leave what they have. Not with windows,
            whose first tokens are gone.
        has_host: whether the caches have room on the host.
    """

    def __init__(self, caches: Many[KVCache], windows: Many[int], *, reuse: bool, has_host: bool) -> None:
        self.caches, self.windows, self._has_host = caches, windows, has_host
        self._page_size = caches[0].page_size
        self._record_bytes = {record for cache in caches for record in cache.layout.record_bytes}
        self.reuse = reuse and not any(windows)
        self._requests: dict[str, list[Sequence]] = {}
        self._away: dict[str, list[Sequence]] = {}
        """Those whose tokens are on the host."""
        self._starts: dict[str, list[int]] = {}
        """By request that was moved there, of each group the first token that it held."""
        self._is_refused = False
        """Whether the driver has refused pages that the limit allows, since a request gave some back."""

    @property
    def stages(self) -> list[RowRequests]:
        """Requests of each device, where layers are on several; here on one. Not kept: who names himself stays until
        the garbage collector comes, and with him the caches."""
        return [self]

    def __contains__(self, name: str) -> bool:
        return name in self._requests

    def is_away(self, name: str) -> bool:
        """Whether its tokens are on the host."""
        return name in self._away

    def rows(self, name: str) -> list[int]:
        """Of each group the row that it has."""
        return [sequence.index for sequence in self._requests[name]]  # each request of each step comes by here

    def begin(self, name: str, expected: int, token_ids: list[int] | None = None, weights: str | None = None) -> int:
        """Starts a request that is to have so many tokens soon, with what is known of them under the same weights,
        where they are given; returns how many these are.

        Raises:
            OutOfPagesError, OutOfRowsError: there is no room; there is no such request then.
        """
        if token_ids is None or not self.reuse:
            self._requests[name] = [cache.sequence(expected_tokens=expected) for cache in self.caches]
            return 0
        (cache,) = self.caches
        sequence = cache.sequence(token_ids=token_ids, adapter=weights, whole=False, expected_tokens=expected)
        self._requests[name] = [sequence]
        return sequence.cached_tokens

    def shared_pages(self, token_ids: list[int], weights: str | None) -> int:
        """Pages that a request would share with others if it began now, with what is known of its tokens."""
        if not self.reuse:
            return 0
        (cache,) = self.caches
        return cache.shared_pages(token_ids, adapter=weights, expected_tokens=len(token_ids))

    def grow_in_place(self, name: str, held: int, tokens: int) -> bool:
        """Grows a request that holds `held` tokens to `tokens`, if it has pages for them already; returns whether."""
        sequences = self._requests.get(name, ())
        if len(sequences) != 1 or self.windows[0]:
            return False
        return sequences[0].extend_in_place(tokens - held, held=held)

    def make_room(self, name: str, held: int, tokens: int) -> bool:
        """Sees to it that a request has room for `tokens` tokens, of which it holds the first ones already; brings them
        back from the host, where there is room for all. Returns whether there is; where there is not it holds what it
        did, and where it did.

        Raises:
            SequenceTooLongError: rows are shorter.
        """
        was_away = name in self._away
        if was_away and self.pages_to_return(name, tokens) > self.available_pages:
            return False
        with suppress(*NO_ROOM):
            for sequence in self._away.get(name, []):
                sequence.resume()
            if was_away:
                self._requests[name] = self._away.pop(name)
            self._grow(name, held, tokens)
            return True
        if was_away:
            self.put_back(name)
        self._is_refused |= self.pages_missing(name, tokens) <= self.available_pages
        return False

    def put_back(self, name: str) -> None:
        """Moves tokens that came from the host back there, as far as there is room for them still."""
        self._away.setdefault(name, self._requests.pop(name, []))
        with suppress(OutOfHostMemoryError):
            for sequence in self._away[name]:
                if not sequence.is_suspended:
                    sequence.suspend()

    def holds_more(self, name: str, tokens: int) -> bool:
        """Whether a request holds more than so many tokens on rows."""
        return any(sequence.length > tokens for sequence in self._requests.get(name, []))

    def take_back(self, name: str, tokens: int) -> None:
        """Has a request hold no more than so many tokens."""
        for sequence in self._requests[name]:
            sequence.truncate(min(sequence.length, tokens))

    def _grow(self, name: str, held: int, tokens: int) -> None:
        try:
            for sequence, window in zip(self._requests[name], self.windows):
                if sequence.length > held:
                    sequence.truncate(held)  # what is written again may lie in others by now
                if window:  # one more than it will ask for
                    sequence.release_before(max(sequence.length - window, sequence.start))
                sequence.extend(tokens - sequence.length)
        except NO_ROOM:
            self.take_back(name, held)
            raise

    def pages_of(self, tokens: int) -> int:
        """Pages that so many tokens of a request lie in."""
        return sum(cache.layout.pages(tokens, cache.page_size) for cache in self.caches)

    def pages_to_return(self, name: str, tokens: int) -> int:
        """Pages that a request needs to come back from the host and have room for so many tokens."""
        left = sum(
            start * record // self._page_size
            for cache, start in zip(self.caches, self._starts[name])
            for record in cache.layout.record_bytes
        )
        return self.pages_of(tokens) - left

    def fills_pages(self, before: int, tokens: int) -> bool:
        """Whether a request that grows to so many tokens fills a page."""
        size = self._page_size  # each request of each step comes by here
        return any(before * record // size < tokens * record // size for record in self._record_bytes)

    def pages_missing(self, name: str, tokens: int) -> int:
        """Pages that a request needs for `tokens` tokens, beyond those that its tokens lie in."""
        length = self._requests[name][0].length if name in self._requests else 0
        return max(self.pages_of(tokens) - self.pages_of(length), 0)

    @property
    def available_pages(self) -> int:
        """Pages that hold no tokens of any request; none while the driver refuses some of them."""
        return 0 if self._is_refused else self.allowed_pages

    @property
    def allowed_pages(self) -> int:
        """Pages that hold no tokens of any request, whether or not the driver gives them."""
        return self.caches[0].available_pages

    def commit(self, name: str, token_ids: list[int]) -> None:
        """Makes a request's first tokens known to others, if it was begun with tokens."""
        for sequence in self._requests.get(name, []):
            if sequence.is_reusable:
                sequence.commit(token_ids)

    def fork(self, parent: str, children: Many[str]) -> list[str]:
        """Starts requests that hold what another holds, as many as there is room for; returns which."""
        started = []
        with suppress(*NO_ROOM):
            for child in children:
                self._requests[child] = [sequence.fork() for sequence in self._requests[parent]]
                started.append(child)
        return started

    def put_away(self, name: str) -> bool:
        """Moves a request's tokens to the host; without room there it ends. Returns whether they are there."""
        sequences = self._requests.pop(name, [])
        self._starts[name] = [sequence.start for sequence in sequences]
        moved = self._is_refused = False
        if sequences and self._has_host:
            with suppress(OutOfHostMemoryError):
                for sequence in sequences:
                    sequence.suspend()
                moved = True
        if moved:
            self._away[name] = sequences
        else:
            self._free(sequences)
        return moved

    def end(self, name: str) -> None:
        """Ends a request that has its tokens on rows, if there is one of this name."""
        sequences = self._requests.pop(name, [])
        self._is_refused &= not any(sequence.length for sequence in sequences)
        if name not in self._away:
            self._starts.pop(name, None)
        self._free(sequences)

    def end_away(self, name: str) -> None:
        """Ends a request that has its tokens on the host, if there is one of this name."""
        self._starts.pop(name, None)
        self._free(self._away.pop(name, []))

    def end_all(self) -> None:
        """Ends all requests."""
        for name in list(self._requests):
            self.end(name)
        for name in list(self._away):
            self.end_away(name)

    def _free(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.free()

    def forget_known(self) -> None:
        """Gives memory that holds no tokens of a request back to the system, and with it what is known."""
        for cache in self.caches:
            cache.trim()
