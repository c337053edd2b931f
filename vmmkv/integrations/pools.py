"""The pools of a cache for transformers: on each device one, for all of its layer groups.

Invariant: a pool that was made here lives as long as something lies on it, no longer.
"""

from __future__ import annotations

import weakref
from typing import Any, Self

import torch

from ..arguments import check_size
from ..budget import parse_bytes
from ..errors import ArgumentError, DeviceError
from ..pool import FramePool, check_given


def check_memory(pool: FramePool | None, *, max_bytes: float | str | None, page_size: int | None = None) -> None:
    """Checks what K and V are to lie on: a pool, or one that is made with a limit, and pages.

    Raises:
        ArgumentError: the pool is none, or another cache's own, or has others beside it, of which it has its own.
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
    """See above.

    Args:
        max_bytes: the limit of each that is made here; None is 80 % of the memory that is free then.
        page_size: bytes of a page; None is 2 MiB.
        given: the one to use instead, which others may use as well.

    Raises:
        ArgumentError: what must be a number, or a pool, is none, or the pool is another cache's own; or there is a
            limit, or a page, beside a pool.
        LayoutError, BudgetError: it is a number that cannot be, on any device.
    """

    def __init__(self, max_bytes: float | str | None, page_size: int | None, given: FramePool | None) -> None:
        check_memory(given, max_bytes=max_bytes, page_size=page_size)
        self._max_bytes = max_bytes
        self._page_size = None if page_size is None else check_size("page_size", page_size)
        self._given = given
        self._made: weakref.WeakValueDictionary[torch.device, FramePool] = weakref.WeakValueDictionary()

    def on(self, device: torch.device) -> FramePool:
        """The pool of a device.

        Raises:
            DeviceError: it is not where the given one is, or there is none.
            BudgetError: as in `FramePool`.
        """
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
        """Of a copy: the same ones, on which it shares pages."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """What is pickled: no memory. Who lay on a given pool comes back on one of its own."""
        return type(self), (self._max_bytes, self._page_size, None)
