"""Events: a cache has been made, blocks were stored or removed, all are gone, events are missing."""

from __future__ import annotations

from dataclasses import dataclass

from .chain import Blocks


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """What all events have.

    Attributes:
        time: when the log read it, in seconds since 1970.
    """

    time: float


@dataclass(frozen=True, slots=True, eq=False)
class Created(Event):
    """A cache has been made. It is empty.

    Attributes:
        device_blocks: how many blocks fit its budget.
    """

    device_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class Stored(Event):
    """Blocks can be reused from now on.

    Attributes:
        blocks: consecutive ones of one sequence.
        priority: how long they are to be kept, 0 to 100.
    """

    blocks: Blocks
    priority: int


@dataclass(frozen=True, slots=True, eq=False)
class Removed(Event):
    """Blocks are gone.

    Attributes:
        hashes: of the blocks, the last in the sequence first.
    """

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Cleared(Event):
    """All blocks that were reported are gone."""


@dataclass(frozen=True, slots=True, eq=False)
class Dropped(Event):
    """Events are missing here: nothing drained the log in time. Blocks that were reported may be gone.

    Attributes:
        count: how many changes of the cache are missing.
    """

    count: int
