"""Plans of calls, found again by one look at all tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch._C._dynamo.guards import TensorGuards

from .checks import Key, keys

Plan = TypeVar("Plan")

RECENT = 4
"""Plans that are found at one look: of layers that take turns there are few kinds."""


class Known(NamedTuple):
    """A plan, and what it was made for."""

    options: tuple[Any, ...]
    kinds: list[type]
    """Of the tensors, of which some may be missing."""
    guards: Any
    geometry: tuple[Key | None, ...]
    plan: Any


class Plans(Generic[Plan]):
    """The plans of a function's calls.

    To make the key of ten tensors takes longer than to launch a kernel. torch compares tensors with others that it has
    seen, in all that a key says and more, in a fraction of the time: so it is asked first, and where it knows none of
    the last plans, the key is made.

    Args:
        make: checks a geometry, given options and `keys`, and makes its plan, or has it.
    """

    def __init__(self, make: Callable[..., Plan]) -> None:
        self._make = make
        self._recent: tuple[Known, ...] = ()

    def find(self, tensors: tuple[torch.Tensor | None, ...], *options: Any) -> tuple[Plan, tuple[Key | None, ...]]:
        """The plan for tensors, some of which may be missing, and their geometry; raises what `make` does."""
        kinds = [*map(type, tensors)]
        present = [tensor for tensor in tensors if tensor is not None]
        for known in self._recent:  # replaced as a whole: another thread sees what was, or what is
            if known.options == options and known.kinds == kinds and known.guards.check(*present):
                return known.plan, known.geometry
        geometry = keys(tensors)
        plan = self._make(*options, geometry)
        if len({*map(id, present)}) < len(present):  # torch finds no such call, as of queries rotated in place
            return plan, geometry
        guards = TensorGuards(*present, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        self._recent = Known(options, kinds, guards, geometry, plan), *self._recent[: RECENT - 1]
        return plan, geometry
