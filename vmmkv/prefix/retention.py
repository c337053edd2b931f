"""How long cached tokens are kept: priorities for ranges of tokens, with or without an end.

The semantics are those of TensorRT-LLM's `KvCacheRetentionConfig`: priorities from 0 to 100, 35 by default; a page has
the priority of its first token; a priority for some seconds falls back to the default after them. Tokens that no range
names keep the priority that they have.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import SupportsIndex

from ..errors import RetentionError
from .tables import DEFAULT_PRIORITY

MIN_PRIORITY, MAX_PRIORITY = 0, 100
NO_END = 1 << 60
NANOSECONDS = 1_000_000_000


@dataclass(frozen=True)
class Retention:
    """Tokens `[start, end)` of a sequence are evicted after all of lower priority, and before all of higher.

    Args:
        start: the first token.
        end: the token behind the last; None is the sequence's end.
        priority: from 0, the first to go, to 100.
        seconds: after that many, counted from the commit, the priority is the default again; None is never.

    Raises:
        RetentionError: the range is empty, reversed or begins before token 0, the priority is out of range, or the
            time is negative.
    """

    start: int = 0
    end: int | None = None
    priority: int = DEFAULT_PRIORITY
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.start < 0 or (self.end is not None and self.end <= self.start):
            raise RetentionError(f"asked for tokens [{self.start}, {self.end}); a range begins at 0 or later, and ends "
                                 "behind its start")  # fmt: skip
        check_priority(self.priority, self.seconds)


@dataclass(frozen=True)
class RetentionConfig:
    """How long a request's tokens are kept: ranges of its prompt, and the tokens that it generates.

    Args:
        ranges: ranges of the prompt's tokens, in any order; they do not overlap.
        decode_priority: the priority of generated tokens.
        decode_seconds: how long they have this priority; None is forever.

    Raises:
        RetentionError: ranges overlap, the priority is out of range, or the time is negative.
    """

    ranges: tuple[Retention, ...] = ()
    decode_priority: int = DEFAULT_PRIORITY
    decode_seconds: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranges", in_order(self.ranges))
        check_priority(self.decode_priority, self.decode_seconds)

    def of_sequence(self, prompt: int) -> tuple[Retention, ...]:
        """Ranges of a sequence with a prompt of `prompt` tokens."""
        found = [
            Retention(each.start, prompt if each.end is None else min(each.end, prompt), each.priority, each.seconds)
            for each in self.ranges
            if each.start < prompt
        ]
        if self.decode_priority != DEFAULT_PRIORITY:
            found.append(Retention(prompt, None, self.decode_priority, self.decode_seconds))
        return tuple(found)


def check_priority(priority: int, seconds: float | None) -> None:
    """Raises `RetentionError` for a priority or a time that there is not."""
    is_number = isinstance(priority, SupportsIndex) and not isinstance(priority, bool)
    if not is_number or not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise RetentionError(f"asked for priority {priority!r}; it is a number from {MIN_PRIORITY} to {MAX_PRIORITY}")
    if seconds is not None and not seconds >= 0:
        raise RetentionError(f"asked for {seconds!r} seconds; it is a time of at least 0, or None for ever")


def in_order(ranges: Iterable[Retention]) -> tuple[Retention, ...]:
    """Ranges, sorted. Raises `RetentionError` where two of them overlap."""
    found = tuple(sorted(ranges, key=lambda each: each.start))
    for first, second in pairwise(found):
        if first.end is None or first.end > second.start:
            raise RetentionError(
                f"asked for priorities of [{first.start}, {first.end}) and [{second.start}, {second.end}); ranges must "
                "not overlap"
            )
    return found


def words_of(ranges: Iterable[Retention], now: int) -> array[int]:
    """Ranges for compiled code: see `vmmkv.prefix.tables.RANGE_OF_TOKENS`. `now` is a time in nanoseconds."""
    words, most = array("q"), NO_END // NANOSECONDS
    for each in in_order(ranges):
        expires = 0 if each.seconds is None else max(now + int(min(each.seconds, most) * NANOSECONDS), 1)
        words.extend((each.start, NO_END if each.end is None else each.end, each.priority, expires))
    return words
