"""What users hold of a pool, their own or a shared one: it may be used until it is closed, or is the parent's."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from typing import Self

import torch

from ..driver.fence import wait_for_device
from ..errors import ArgumentError, ForkError, UseAfterFreeError, VmmkvError
from .pool import FramePool


class Owner(ABC):
    """A cache, or a growable tensor.

    Args:
        pool: the physical memory that it lies on.
        owns_pool: whether that ends with it.
    """

    def __init__(self, pool: FramePool, owns_pool: bool) -> None:
        self.pool = pool
        """The physical memory that it lies on."""
        self._owns_pool = owns_pool
        self._driver = pool.driver
        self._is_open = True
        """The memory is ours to give back."""
        self._unusable: type[VmmkvError] | None = None
        if owns_pool:
            pool.is_shared = False

    @property
    def device(self) -> torch.device:
        """Where its memory is."""
        return self._driver.device

    @abstractmethod
    def _give_back(self) -> None:
        """Unmaps everything and ends the account, in whatever state the driver is; all work has finished."""

    def close(self) -> None:
        """Gives all memory back now, after all work on the device. To touch a view after this is a fault.

        Garbage collection does the same when nobody holds it or its views any more.

        Raises:
            StreamCaptureError: a CUDA graph is being captured; nothing was closed.
            DriverError: the device could not be waited for; nothing was closed.
            BusyError: another operation of this thread is not at its end.
        """
        monitor = self.pool.monitor
        if self._is_open:
            monitor.check_outside("close")
        with monitor.door, monitor.changing, monitor.lock:
            if not self._is_open:
                return
            monitor.check_outside("close", changing=True)
            with monitor.inside:
                wait_for_device(self._driver)
                self._unusable = UseAfterFreeError
                before, monitor.is_dirty = monitor.is_dirty, True  # who is interrupted leaves the rest to others
                self._give_back()
                if self._owns_pool:
                    self.pool.end()
                monitor.is_dirty = before
                self._is_open = False

    def check_open(self) -> None:
        """Raises what forbids even a look at it.

        Raises:
            UseAfterFreeError: it was closed.
            ForkError: it belongs to another process.
        """
        if self._unusable:
            raise self._unusable(_REASONS[self._unusable].format(type(self).__name__))

    def check_usable(self) -> None:
        """Raises what forbids any use.

        Raises:
            UseAfterFreeError: it was closed.
            InterruptedChangeError: an interruption has left what nobody can make right.
            ForkError: it belongs to another process.
        """
        self.check_open()
        self.pool.check_usable()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _after_fork(self) -> None:
        """In a forked child: the memory is the parent's, and a GPU cannot be used at all."""
        self._is_open = False
        self._unusable = ForkError


_REASONS: dict[type[VmmkvError], str] = {
    UseAfterFreeError: "this {} was closed; make a new one",
    ForkError: "this {} was made before fork(); its memory belongs to the parent. Make a new one in the child, or "
    "start processes with the 'spawn' method",
}

owners: weakref.WeakSet[Owner] = weakref.WeakSet()
"""Those of this process that are made in full."""


def _forget_owners() -> None:
    for owner in list(owners):
        owner._after_fork()


os.register_at_fork(after_in_child=_forget_owners)


def check_given(pool: object) -> None:
    """Raises `ArgumentError` where a pool that somebody was given is none, or is another's own."""
    if not isinstance(pool, FramePool):
        raise ArgumentError(f"got pool={pool!r}; it must be a vmmkv.FramePool")
    if not pool.is_shared:
        raise ArgumentError(
            f"got pool={pool!r}, which a cache, or a growable tensor, has made for itself, and which ends with it; "
            "make a vmmkv.FramePool, and give it to both"
        )


def check_pool_alone(pool: object, **others: object) -> None:
    """Raises what is wrong with a pool that somebody was given, and with what else it was given, which a pool has."""
    if pool is None:
        return
    check_given(pool)
    if any(other is not None for other in others.values()):
        raise ValueError(f"give a pool, or {', '.join(others)}; a pool has its own")
