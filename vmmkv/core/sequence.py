"""Sequences: what a user holds of rows, one by one or as a batch."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..errors import SequenceTooLongError, SuspendedError, UseAfterFreeError
from ..layout import shown
from . import entries
from .codes import DONE, RING
from .pool import Ask
from .tables import ROW_BITS, ROW_MASK

if TYPE_CHECKING:
    from .cache import Cache


EMPTY = array("q", (0,))
"""The cell of a sequence without a row."""


class Watch(weakref.ref["Sequence"]):
    """A weak reference to a sequence, queued for `sweep` when the sequence is collected."""

    __slots__ = ("cell",)
    cell: array[int]


class Sequence:
    """A sequence of a `Cache`: a row's owner number and the row, in one integer."""

    __slots__ = ("__weakref__", "cache", "cell", "ticket")

    ticket: int
    """Its name in compiled code; 0 before it has a row."""
    cell: array[int]
    """The ticket, where compiled code writes it, and finds it once the sequence is collected."""

    def __init__(self, cache: Cache) -> None:
        self.cache, self.cell, self.ticket = cache, EMPTY[:], 0
        watch = Watch(self, cache.dead.append)
        watch.cell = self.cell
        cache.watches.add(watch)

    def record_index(self) -> int:
        """The row. Raises `UseAfterFreeError`."""
        ticket = self.ticket
        row = ticket & ROW_MASK
        if not ticket or self.cache.owners[row] != ticket >> ROW_BITS:
            raise gone()
        return row

    row = property(record_index)

    @property
    def length(self) -> int:
        """Tokens so far, including those before `start`."""
        row = self.record_index()
        return int(self.cache.lengths[row] or self.cache.aways[row])

    @property
    def start(self) -> int:
        """The first token that it still has."""
        row = self.record_index()
        return int(self.cache.starts[row] or self.cache.away_starts[row])

    @property
    def capacity(self) -> int:
        """The length up to which it grows without a driver call."""
        return max(int(self.cache.capacities[self.record_index()]), 0)

    def extend(self, tokens: int) -> None:
        """Makes room for more tokens: see `Cache.extend`."""
        cache = self.cache
        check_tokens(tokens, cache.max_seq_len)
        code = entries.grow_one(cache.address, self.ticket, tokens, -1)
        if code == RING:
            cache.pool.ring()
        elif code != DONE:
            cache.grow(self.cell.buffer_info()[0], 1, tokens)

    def extend_in_place(self, tokens: int, held: int = -1) -> bool:
        """Makes room for more tokens if their pages are mapped, and the length is `held` or that is negative."""
        check_tokens(tokens, self.cache.max_seq_len)
        code = entries.grow_one(self.cache.address, self.ticket, tokens, held)
        if code == RING:
            self.cache.pool.ring()
        return code >= DONE

    def truncate(self, tokens: int) -> None:
        """Drops tokens from one on. Raises `ValueError` for one that it does not have."""
        self.cache.keep(self, -1, check_tokens(tokens, self.cache.max_seq_len))

    def release_before(self, token: int) -> None:
        """Drops tokens in front of one. Raises `ValueError` for one that it does not have."""
        self.cache.keep(self, check_tokens(token, self.cache.max_seq_len), -1)

    def fork(self) -> Sequence:
        """Starts a sequence with the same tokens."""
        return self.cache.share(self, self.length)

    def record_stream(self, stream: Any) -> None:
        """Names a stream that uses the sequence."""
        self.cache.record_stream(self, stream)

    def free(self) -> None:
        """Ends the sequence."""
        self.cache.free((self,))


class Batch:
    """Sequences of a cache that grow together, so that a step of an engine converts no list."""

    def __init__(self, cache: Cache, sequences: Iterable[Sequence]) -> None:
        self.cache, self._ask, self.sequences = cache, Ask(), list(sequences)
        cache.check_own(self.sequences)
        self._tickets = array("q", [each.ticket for each in self.sequences])
        self._at, self._count = self._tickets.buffer_info()

    def extend(self, tokens: int = 1) -> None:
        """Makes room for as many more tokens in each of them: in all or none. Errors are those of `Cache.extend`."""
        check_tokens(tokens, self.cache.max_seq_len)
        code = entries.grow(self.cache.address, self._at, self._count, tokens, 0, self._ask.address)
        if code == RING:
            self.cache.pool.ring()
        elif code != DONE:
            self.cache.grow(self._at, self._count, tokens)


def no_token() -> ValueError:
    """What is raised for tokens that a sequence does not have."""
    return ValueError("asked for tokens that the sequence does not have")


def check_tokens(tokens: int, most: int) -> int:
    """A number of tokens: compiled code takes 64 bits, and rows have no more than `most`."""
    if tokens < 0:
        raise ValueError(f"asked for {shown(tokens)} tokens; to drop tokens use truncate")
    if tokens > most:
        raise too_long(tokens, most)
    return tokens


def gone() -> UseAfterFreeError:
    """The error for a sequence that has ended."""
    return UseAfterFreeError("the sequence was freed, or its cache was closed; start a new one")


def suspended() -> SuspendedError:
    """The error for a sequence whose tokens are in host memory."""
    return SuspendedError("the sequence is suspended: it can be resumed, freed, or asked for its length")


def too_long(length: int, most: int) -> SequenceTooLongError:
    """The error for a sequence that would outgrow its row."""
    return SequenceTooLongError(
        f"asked for {shown(length)} tokens; a row is max_seq_len={most} long. Make the cache with a larger one: a "
        "longer row takes addresses, not memory"
    )
