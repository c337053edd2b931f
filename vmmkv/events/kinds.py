"""Events: a cache has been made, blocks were stored or removed, all are gone, events are missing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Consecutive blocks of one sequence.

    Attributes:
        hashes: one per block, unsigned 64-bit numbers.
        parent: the hash of the block before the first one; None at the beginning of the sequence.
        ids: their token ids, int64, `[len(hashes) * size]`.
        start: the position of the first token in the sequence.
        size: tokens in a block.
        salt: the salt of the sequence, if any.
        adapter: the LoRA adapter that they were computed with, by name or number, if any.
        tenant: the sequence's tenant, if any.
    """

    hashes: tuple[int, ...]
    parent: int | None
    ids: NDArray[np.int64]
    start: int
    size: int
    salt: str | None
    adapter: str | int | None
    tenant: str | int | None


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """An event. `time`: when the log read it, in seconds since 1970."""

    time: float


@dataclass(frozen=True, slots=True, eq=False)
class Created(Event):
    """A cache has been made. It is empty."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored(Event):
    """Blocks can be reused from now on. `blocks`: consecutive ones of one sequence; `priority`: from 0 to 100."""

    blocks: Blocks
    priority: int


@dataclass(frozen=True, slots=True, eq=False)
class Removed(Event):
    """Blocks are gone. `hashes`: of the blocks, the last in the sequence first."""

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Cleared(Event):
    """All blocks that were reported are gone."""


@dataclass(frozen=True, slots=True, eq=False)
class Dropped(Event):
    """Events are missing here: nothing drained the log in time. Blocks that were reported may be gone. `count`: the
    number of changes of the cache that are missing."""

    count: int
