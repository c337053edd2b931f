"""Host time of operations that are measured in turns."""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import numpy as np


def microseconds(operation: Callable[..., Any], *args: Any) -> float:
    """How long an operation takes."""
    start = perf_counter_ns()
    operation(*args)
    return (perf_counter_ns() - start) / 1e3


def in_turns(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each side returns in each round. The side that begins changes from round to round, and the first round is
    not counted. Garbage is collected before, and not meanwhile."""
    took: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds + 1):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                took[name].append(sides[name]())
    finally:
        gc.enable()
    return {name: values[1:] for name, values in took.items()}


def spread(values: list[float], name: str = "") -> dict[str, float]:
    """The median in microseconds, and between which figures four of five values lie."""
    low, middle, high = np.percentile(values, (10, 50, 90)).tolist()
    name += "_" if name else ""
    return {f"{name}us": middle, f"{name}p10_us": low, f"{name}p90_us": high}


def ranged(row: dict[str, float], name: str = "", digits: int = 0) -> str:
    """A cell of what `spread` gave: the median, and the range in brackets."""
    name += "_" if name else ""
    middle, low, high = (row[f"{name}{part}us"] for part in ("", "p10_", "p90_"))
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"
