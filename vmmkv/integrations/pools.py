"""The frame pools of a cache for transformers: one on each device, for all of its layer groups."""

from __future__ import annotations

import weakref
from typing import Any, Self

import torch

from ..arguments import check_size
from ..budget import parse_bytes
from ..errors import ArgumentError, DeviceError
from ..pool import FramePool, check_given


def check_memory(pool: FramePool | None, *, max_bytes: float | str | None, page_size: int | None = None) -> None:
    """Checks the memory for K and V: a pool, or the limit and page size of one that is to be made.

    Raises:
        ArgumentError: `pool` is no pool, or another cache's own, or there is a limit or a page size beside it.
        BudgetError: the limit cannot be one, on any device.
    """
    if pool is not None:
        check_given(pool)
        asked = {"max_bytes": max_bytes, "page_size": page_size}
        told = [f"{name}={value!r}" for name, value in asked.items() if value is not None]
        if told:
            raise ArgumentError(
                f"got {' and '.join(told)} beside a pool, which has its own; give the FramePool what it is to have"
            )
    if max_bytes is not None:
        parse_bytes(max_bytes, free=0)


class Pools:
    """A pool for each device: the one that was given, or pools that live as long as something lies on them.

    Args:
        max_bytes: the limit of each pool that is made here; None is 80 % of the memory that is free then.
        page_size: bytes of a page; None is 2 MiB.
        given: the pool to use instead, which others may use as well.
    """

    def __init__(self, max_bytes: float | str | None, page_size: int | None, given: FramePool | None) -> None:
        check_memory(given, max_bytes=max_bytes, page_size=page_size)
        self._max_bytes, self._given = max_bytes, given
        self._page_size = None if page_size is None else check_size("page_size", page_size)
        self._made: weakref.WeakValueDictionary[torch.device, FramePool] = weakref.WeakValueDictionary()

    def on(self, device: torch.device) -> FramePool:
        """The pool of a device; raises `DeviceError` where the given one is on another."""
        if self._given is not None:
            if device != self._given.device:
                raise DeviceError(
                    f"got K and V on {device}; the pool of this cache is on {self._given.device}. Make a pool there, "
                    "or, for a model on several devices, the cache without one"
                )
            return self._given
        pool = self._made.get(device)
        if pool is None:
            limit = "80%" if self._max_bytes is None else self._max_bytes
            self._made[device] = pool = FramePool(limit, device=device, page_size=self._page_size)
        return pool

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The same pools: a copy of a cache shares pages."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles no memory: a cache on a given pool comes back on one of its own."""
        return type(self), (self._max_bytes, self._page_size, None)
