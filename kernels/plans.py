"""Plans of calls, found again by one look at all tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from numbers import Number
from operator import is_, itemgetter
from types import NoneType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch._C._dynamo.guards import TensorGuards

from .checks import keys

Plan = TypeVar("Plan")
Tensors = tuple[torch.Tensor | None, ...]
Picker = Callable[[Tensors], tuple[torch.Tensor, ...]]

RECENT = 4
"""Plans that are found at one look: of layers that take turns there are few kinds."""


class Places(NamedTuple):
    """Which of a call's tensors are missing, and which are the same."""

    distinct: Picker
    """Those that are there, each once: torch compares none that is there twice."""
    twins: list[tuple[int, int]]
    """Where one is again, and where it was first."""
    missing: Picker
    nones: tuple[None, ...]
    """As many as are missing."""


@cache
def places(firsts: tuple[int, ...], nothing: int) -> Places:
    """Of tensors of which each is first at one of `firsts`, and None at `nothing`."""
    missing = [place for place, first in enumerate(firsts) if first == nothing]
    distinct = [place for place, first in enumerate(firsts) if first == place != nothing]
    twins = [(place, first) for place, first in enumerate(firsts) if first not in (place, nothing)]
    return Places(pick(distinct), twins, pick(missing), (None,) * len(missing))


def pick(where: Sequence[int]) -> Picker:
    """A function that picks what is at some places, in a tuple."""
    if len(where) > 1:
        return itemgetter(*where)
    return lambda tensors: tuple([tensors[place] for place in where])  # type: ignore[misc]


def same(tensors: Tensors, twins: list[tuple[int, int]]) -> bool:
    """Whether tensors that were the same are again."""
    return all(tensors[again] is tensors[first] for again, first in twins)


class Known(NamedTuple):
    """A plan, and how to see whether it is that of a call."""

    options: tuple[Any, ...]
    places: Places
    check: Callable[..., bool]
    """Whether distinct tensors look like those that there were."""
    plan: Any


def addresses_of(tensors: Tensors) -> list[int]:
    """Of those that are there."""
    return [each.data_ptr() for each in tensors if each is not None]


def check_memory(tensors: Tensors) -> None:
    """Raises `TypeError` for one that has numbers, and no address: to kernels it would be one that is not given."""
    for each in tensors:
        if each is not None and each.numel() and not each.data_ptr():
            raise TypeError(
                f"got {type(each).__name__} {list(each.shape)} without memory of its own; tensors must be plain ones: "
                "of a DTensor its to_local()"
            )


def know(tensors: Tensors, options: tuple[Any, ...], plan: Any) -> Known:
    """A plan, to be found for tensors like these."""
    names = [*map(id, (*tensors, None))]
    *firsts, nothing = map(names.index, names)
    of_tensors = places(tuple(firsts), nothing)
    guards = TensorGuards(*of_tensors.distinct(tensors), dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return Known(options, of_tensors, guards.check, plan)


class Plans(Generic[Plan]):
    """The plans of a function's calls.

    To make the key of ten tensors takes longer than to launch a kernel. torch compares tensors with others that it has
    seen, in all that a key says and more, in a fraction of the time: so it is asked first, and where it knows none of
    the last plans, the key is made.

    Args:
        make: checks given options and a geometry, which is `keys`, and makes their plan, or has it.
    """

    def __init__(self, make: Callable[..., Plan]) -> None:
        self._make = make
        self._recent: tuple[Known, ...] = ()

    def find(self, tensors: Tensors, *options: Any) -> tuple[Plan, list[int]]:
        """The plan for tensors, some of which may be missing, and the others' addresses; raises what `make` does.

        Args:
            options: numbers, strings and None.
        """
        for known, places, check, plan in self._recent:  # replaced as a whole: another thread sees what was, or what is
            distinct, twins, missing, nones = places
            given = distinct(tensors)
            is_missing = map(is_, missing(tensors), nones)  # to ask torch whether a tensor equals None takes long
            if known == options and check(*given) and all(is_missing) and (not twins or same(tensors, twins)):
                return plan, addresses_of(tensors if twins else given)
        if not all(isinstance(option, (int, float, str, NoneType, Number)) for option in options):
            raise TypeError(f"got {options}; each must be a number or a string: others may change unseen")
        plan, addresses = self._make(*options, keys(tensors)), addresses_of(tensors)
        if not all(addresses):
            check_memory(tensors)
        self._recent = know(tensors, options, plan), *self._recent[: RECENT - 1]
        return plan, addresses
