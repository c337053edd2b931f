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
    """Sequences of a cache that grow together; for others an engine makes another handle."""

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
