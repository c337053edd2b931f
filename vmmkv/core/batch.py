"""A batch handle: sequences of a cache that grow together, so that a step of an engine converts no list."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

from . import entries
from .codes import DONE, RING
from .pool import Ask
from .sequence import Sequence, check_tokens

if TYPE_CHECKING:
    from .cache import Cache


class Batch:
    """Sequences that grow together: an engine adds and removes them as requests come and go.

    Args:
        cache: the cache of all of them.
        sequences: the first ones.
    """

    def __init__(self, cache: Cache, sequences: Iterable[Sequence] = ()) -> None:
        self.cache, self._ask = cache, Ask()
        self.sequences = list(sequences)
        cache.check_own(self.sequences)
        self._list()

    def _list(self) -> None:
        """Lists the tickets of the sequences."""
        self._tickets = array("q", [each.ticket for each in self.sequences])
        self._at, self._count = self._tickets.buffer_info()

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence at the end."""
        self.cache.check_own((sequence,))
        self._count = -1  # until the list is right: an interruption may come
        self.sequences.append(sequence)
        self._list()

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence; the last one takes its place."""
        index = self.sequences.index(sequence)
        self._count = -1
        self.sequences[index:] = [self.sequences[-1], *self.sequences[index + 1 : -1]][
            : len(self.sequences) - index - 1
        ]
        self._list()

    def extend(self, tokens: int = 1) -> None:
        """Makes room for as many more tokens in each of them: in all or none. Errors are those of `Cache.extend`."""
        if self._count < 0:  # an interruption came before the list was right
            self._list()
        check_tokens(tokens, self.cache.max_seq_len)
        code = entries.grow(self.cache.address, self._at, self._count, tokens, 0, self._ask.address)
        if code == RING:
            self.cache.pool.ring()
        elif code != DONE:
            self.cache.grow(self._at, self._count, tokens)
