"""Plans of calls, found again by one look at all tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch._C._dynamo.guards import TensorGuards

from .checks import keys

Plan = TypeVar("Plan")
Tensors = tuple[torch.Tensor | None, ...]
Picker = Callable[[Tensors], tuple[torch.Tensor, ...]]

RECENT = 4
"""Plans that are found at one look: of layers that take turns there are few kinds."""


class Known(NamedTuple):
    """A plan, and how to see whether it is that of a call."""

    options: tuple[Any, ...]
    check: Callable[..., bool]
    """Whether tensors look like those that there were."""
    distinct: Picker
    """Those: torch compares none that is there twice."""
    twins: list[tuple[int, int]]
    """Where one is again, and where it was first."""
    missing: Picker
    nones: frozenset[tuple[None, ...]]
    """One tuple of as many as are missing: asked for by its hash, since tensors are slow to say that they are not None.
    """
    plan: Any


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
        """The plan for tensors, some of which may be missing, and the others' addresses; raises what `make` does."""
        for known in self._recent:  # replaced as a whole: another thread sees what was, or what is
            if (
                known.options == options
                and known.check(*known.distinct(tensors))
                and known.missing(tensors) in known.nones
                and (not known.twins or same(tensors, known.twins))
            ):
                break
        else:
            known = know(tensors, options, self._make(*options, keys(tensors)))
            self._recent = known, *self._recent[: RECENT - 1]
        return known.plan, [each.data_ptr() for each in tensors if each is not None]


def know(tensors: Tensors, options: tuple[Any, ...], plan: Any) -> Known:
    """A plan, to be found for tensors like these."""
    given = [place for place, tensor in enumerate(tensors) if tensor is not None]
    missing = [place for place, tensor in enumerate(tensors) if tensor is None]
    first = {id(tensors[place]): place for place in reversed(given)}
    twins = [(place, first[id(tensors[place])]) for place in given if first[id(tensors[place])] != place]
    distinct = pick(sorted(first.values()))
    guards = TensorGuards(*distinct(tensors), dynamic_dims_sizes=None, dynamic_dims_strides=None)
    nones = frozenset([(None,) * len(missing)])
    return Known(options, guards.check, distinct, twins, pick(missing), nones, plan)


def same(tensors: Tensors, twins: list[tuple[int, int]]) -> bool:
    """Whether tensors that were the same are again."""
    return all(tensors[again] is tensors[first] for again, first in twins)


def pick(places: Sequence[int]) -> Picker:
    """A function that picks what is at some places, in a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda tensors: tuple([tensors[place] for place in places])  # type: ignore[misc]
