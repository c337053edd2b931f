"""A fence: the GPU work that must finish before memory goes to somebody else.

Unmapping or recycling a page that a running kernel still reads is the classic bug of every allocator
like this one. Here a page that leaves a sequence gets a fence: an event on each stream that may use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ..errors import ArgumentError, DeviceError, DeviceLostError, VmmkvError
from .driver import Driver, Event


def check_stream(stream: Any, device: torch.device) -> None:
    """Raises `ArgumentError` for what is no stream, and `DeviceError` for one of another device."""
    if not hasattr(stream, "device"):
        raise ArgumentError(f"got {stream!r}; it must be a torch.cuda.Stream")
    if stream.device != device:
        raise DeviceError(f"got a stream on {stream.device}; the memory that it is to use is on {device}")


def wait_for_device(driver: Driver) -> None:
    """Waits for all work on the device, before what it may use is unmapped.

    Raises:
        StreamCaptureError, DriverError: it cannot be waited for, so nothing may be unmapped. (What a lost context has
            left needs no waiting: its memory is lost, too.)
    """
    with suppress(DeviceLostError):
        driver.synchronize()


@contextmanager
def finished_on_error(driver: Driver) -> Iterator[None]:
    """Around what queues work, records a fence behind it and writes that down: where that fails, or is interrupted,
    waits for what no fence knows."""
    try:
        yield
    except BaseException:
        with suppress(VmmkvError):
            wait_for_device(driver)
        raise


class Fence:
    """Events that have to pass, at most one per stream; a fence without events has passed."""

    def __init__(self, events: dict[Any, Event] | None = None) -> None:
        self._events = events or {}

    @classmethod
    def after(cls, driver: Driver, streams: Iterable[Any]) -> Fence:
        """A fence after all work submitted to `streams` so far.

        Raises:
            StreamCaptureError: a CUDA graph is being captured.
        """
        return cls({stream: driver.record(stream) for stream in streams})

    @property
    def is_pending(self) -> bool:
        """Whether it had not passed when somebody last asked. Asks nobody."""
        return bool(self._events)

    def passed(self) -> bool:
        """Whether all of that work has finished. Does not wait."""
        if self._events:  # asked of every row with spare pages, and few have any
            self._events = {stream: event for stream, event in self._events.items() if not event.query()}
        return not self._events

    def passed_for(self, stream: Any) -> bool:
        """Whether work submitted to `stream` from now on comes after all of that work."""
        return not self._events or self._is_of(stream) or self.passed() or self._is_of(stream)

    def _is_of(self, stream: Any) -> bool:
        """Whether no other stream has anything to do with it: to ask the device costs more."""
        return all(each == stream for each in self._events)

    def order(self, stream: Any) -> None:
        """Makes work submitted to `stream` from now on come after all of that work; the host does not wait."""
        if not self.passed_for(stream):
            for event in self._events.values():
                event.wait(stream)

    def wait(self) -> None:
        """Waits until it has passed."""
        for event in self._events.values():
            event.synchronize()
        self._events = {}

    def __or__(self, other: Fence) -> Fence:
        """The fence that passes when both have; where both name a stream, `other` is the later."""
        return Fence({**self._events, **other._events})
