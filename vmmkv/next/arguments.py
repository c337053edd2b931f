"""Arguments of caches and sequences, checked."""

from __future__ import annotations

from collections.abc import Iterable

from ..arguments import check_flags as check_flags
from ..arguments import check_priority as check_priority
from ..arguments import check_shape as check_shape
from ..arguments import indices_of as indices_of
from ..arguments import not_negative as not_negative
from ..arguments import one_of as one_of
from ..arguments import row_number as row_number
from ..arguments import whole_numbers as whole_numbers
from ..core import sequence as core
from ..reuse.prefixes import ids_of as ids_of
from ..sequence import check_length as check_length
from ..sequence import check_tokens as check_tokens


def batch_of(cache: object, sequences: Iterable[core.Sequence], *, repeated: bool = False) -> list[core.Sequence]:
    """Lists sequences of a cache, each once.

    Args:
        repeated: whether they may be named several times.

    Raises:
        TypeError, ValueError: they are none, or another cache's, or one is named twice.
    """
    if isinstance(sequences, core.Sequence):
        raise TypeError(f"got {sequences!r}; give a list of sequences, or call the sequence's own method")
    try:
        batch = list(sequences)
    except TypeError:
        raise TypeError(f"got {sequences!r}; give a list of sequences") from None
    for sequence in batch:
        if not isinstance(sequence, core.Sequence):
            raise TypeError(f"got {sequence!r} among the sequences; they are what KVCache.sequence() returns")
        if sequence.cache is not cache:
            raise ValueError(f"{sequence!r} belongs to another cache")
    if len({*batch}) == len(batch):
        return batch
    if repeated:
        return list(dict.fromkeys(batch))
    raise ValueError("a sequence is named twice; name each once, and for extend() add its tokens up")
