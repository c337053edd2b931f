"""How long what is cached is to be kept: a priority for ranges of tokens, for good or for a time.

The semantics are those of TensorRT-LLM's `KvCacheRetentionConfig`: priorities from 0 to 100, 35 by default; ranges are
of a prompt's tokens, and what is generated has a priority of its own; a page goes with the range that its first token
is in; what is given for some seconds falls back to the default after them. Of what nothing is said stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from operator import index

from ..errors import RetentionError

MIN_PRIORITY, DEFAULT_PRIORITY, MAX_PRIORITY = 0, 35, 100


@dataclass(frozen=True)
class Retention:
    """Tokens `[start, end)` of a sequence are evicted after all of lower priority, and before all of higher.

    Args:
        start: the first token.
        end: the token behind the last; None is the sequence's end.
        priority: from 0, the first to go, to 100.
        seconds: after that many, counted from when the tokens became known, the priority is the default again; None is
            never.

    Raises:
        RetentionError: the range is empty, reversed or begins before token 0, the priority is out of range, or the
            time is negative.
    """

    start: int = 0
    end: int | None = None
    priority: int = DEFAULT_PRIORITY
    seconds: float | None = None

    def __post_init__(self) -> None:
        start, end = _whole(self.start), None if self.end is None else _whole(self.end)
        if start < 0:
            raise RetentionError(f"asked for tokens from {self.start!r} on; the first token is 0")
        if end is not None and end <= start:
            raise RetentionError(f"asked for tokens [{self.start}, {self.end!r}); the end is behind the start, or None")
        _check(self.priority, self.seconds)
        for name, number in ("start", start), ("end", end), ("priority", index(self.priority)):  # not numpy's
            object.__setattr__(self, name, number)

    def __str__(self) -> str:
        return f"[{self.start}, {'end' if self.end is None else self.end})"


@dataclass(frozen=True)
class RetentionConfig:
    """How long a request's tokens are kept: ranges of its prompt, and what it generates.

    Args:
        ranges: of the prompt's tokens, in any order; they do not overlap.
        decode_priority: of what is generated.
        decode_seconds: how long that has this priority; None is forever.

    Raises:
        RetentionError: ranges overlap, the priority is out of range, or the time is negative.
    """

    ranges: tuple[Retention, ...] = ()
    decode_priority: int = DEFAULT_PRIORITY
    decode_seconds: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranges", in_order(self.ranges))
        _check(self.decode_priority, self.decode_seconds)

    def of_sequence(self, prompt: int) -> tuple[Retention, ...]:
        """Ranges of a sequence whose first `prompt` tokens are its prompt."""
        found = [
            Retention(each.start, prompt if each.end is None else min(each.end, prompt), each.priority, each.seconds)
            for each in self.ranges
            if each.start < prompt
        ]
        if self.decode_priority != DEFAULT_PRIORITY:
            found.append(Retention(prompt, None, self.decode_priority, self.decode_seconds))
        return tuple(found)


def in_order(ranges: Iterable[Retention]) -> tuple[Retention, ...]:
    """Ranges, sorted.

    Raises:
        RetentionError: they are none, or one is none, or two of them overlap.
    """
    if isinstance(ranges, tuple) and not ranges:  # as of most
        return ()
    if not isinstance(ranges, Iterable):
        raise RetentionError(
            f"got {ranges!r}; give a list of vmmkv.Retention, or what RetentionConfig.of_sequence returns"
        )
    given = list(ranges)
    for each in given:
        if not isinstance(each, Retention):
            raise RetentionError(f"got {each!r} among the ranges to be kept; each is a vmmkv.Retention")
    found = tuple(sorted(given, key=lambda each: each.start))
    for first, second in pairwise(found):
        if first.end is None or first.end > second.start:
            raise RetentionError(f"asked for priorities of {first} and {second}; ranges must not overlap")
    return found


def is_priority(value: object) -> bool:
    """Whether it is a priority."""
    return MIN_PRIORITY <= _whole(value) <= MAX_PRIORITY


def _check(priority: object, seconds: object) -> None:
    if not is_priority(priority):
        raise RetentionError(f"asked for priority {priority!r}; it is a number from {MIN_PRIORITY} to {MAX_PRIORITY}")
    if seconds is not None and (not isinstance(seconds, Real) or not float(seconds) >= 0):
        raise RetentionError(f"asked for {seconds!r} seconds; it is a time of at least 0, or None for ever")


def _whole(value: object) -> int:
    """A whole number, or -1 for what is none."""
    try:
        return -1 if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        return -1
