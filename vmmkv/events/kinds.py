"""What is told: a cache has been made, blocks were stored, have moved or gone, one or all, events are missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .chain import Blocks

Tier = Literal["device", "host"]
"""Where blocks lie."""

TIERS: tuple[Tier, ...] = get_args(Tier)


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """What all events have.

    Attributes:
        time: when it happened, in seconds since 1970.
    """

    time: float


@dataclass(frozen=True, slots=True, eq=False)
class Created(Event):
    """A cache has been made. It is empty.

    Attributes:
        device_blocks: how many blocks fit device memory.
        host_blocks: how many fit the host tier.
    """

    device_blocks: int
    host_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class Stored(Event):
    """Blocks can be reused from now on.

    Attributes:
        blocks: consecutive ones of one sequence.
        tier: where they lie.
        priority: how long they are to be kept, 0 to 100.
    """

    blocks: Blocks
    tier: Tier
    priority: int


@dataclass(frozen=True, slots=True, eq=False)
class Removed(Event):
    """Blocks are gone.

    Attributes:
        hashes: of the blocks, the last in the sequence first.
        tier: where they lay.
    """

    hashes: tuple[int, ...]
    tier: Tier


@dataclass(frozen=True, slots=True, eq=False)
class Updated(Event):
    """Blocks have moved, or are kept at another priority.

    Attributes:
        blocks: consecutive ones of one sequence.
        tier: where they lay and where they lie, None if they have not moved.
        priority: the old one and the new one, None if it has not changed.
    """

    blocks: Blocks
    tier: tuple[Tier, Tier] | None
    priority: tuple[int, int] | None


@dataclass(frozen=True, slots=True, eq=False)
class Cleared(Event):
    """All blocks that were reported are gone."""


@dataclass(frozen=True, slots=True, eq=False)
class Dropped(Event):
    """Events are missing here: nobody drained the log in time. Blocks that were reported may be gone.

    Attributes:
        count: how many.
    """

    count: int
