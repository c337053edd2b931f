"""A fence: the GPU work that must finish before memory goes to somebody else.

Unmapping or recycling a page that a running kernel still reads is the classic bug of every allocator
like this one. Here a page that leaves a sequence gets a fence: an event on each stream that may use it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ..errors import ArgumentError, DeviceError, DeviceLostError, VmmkvError
from . import entries
from .driver import Driver, handle_of, new_scratch
from .fencing import FAILED, FULL, SLOTS
from .running import CAPTURED
from .table import STATUS, WAIT_FOR


def check_stream(stream: Any, device: torch.device) -> None:
    """Raises `ArgumentError` for what is no stream, and `DeviceError` for one of another device."""
    if not hasattr(stream, "device"):
        raise ArgumentError(f"got {stream!r}; it must be a torch.cuda.Stream")
    if stream.device != device:
        raise DeviceError(f"got a stream on {stream.device}; the memory that it is to use is on {device}")


def wait_for_device(driver: Driver) -> None:
    """Waits for all work on the device, before what it may use is unmapped."""
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
    """Work on some streams up to a point: the streams' slots, and a tick (see `vmmkv.driver.fencing`). A fence without
    streams has passed."""

    __slots__ = "driver", "slots", "tick"

    def __init__(self, driver: Driver | None = None, slots: int = 0, tick: int = 0) -> None:
        self.driver, self.slots, self.tick = driver, slots, tick

    @classmethod
    def after(cls, driver: Driver, streams: Iterable[Any]) -> Fence:
        """A fence after all work submitted to `streams` so far."""
        named = {handle_of(stream): stream for stream in streams if stream is not None}
        if not named:
            return cls()
        current, (scratch, at), tick = driver.current_stream(), new_scratch(), FULL
        while tick == FULL:
            words = array("q", named)
            tick = entries.record(driver.address, words.buffer_info()[0], len(words), handle_of(current), at)
            if tick == FULL:
                cls(driver, (1 << SLOTS) - 1, int(driver.table["tick"])).wait()
        if tick == CAPTURED:
            raise driver.captured("record", named.get(scratch[STATUS], current))
        if tick == FAILED:
            raise driver.error("record", scratch[STATUS])
        slots = 0
        for slot, stream in zip(words, named.values()):
            slots |= 1 << slot
            driver.slot_streams[slot] = stream
        return cls(driver, slots, tick)

    def passed(self) -> bool:
        """Whether all of that work has finished. Does not wait."""
        if self.slots and self.driver:  # asked of every row with spare pages, and few have any
            scratch, at = new_scratch()
            left = entries.pending(self.driver.address, self.slots, self.tick, at)
            if left == FAILED:
                raise self.driver.error("query", scratch[STATUS])
            self.slots = left
        return not self.slots

    def order(self, stream: Any) -> None:
        """Makes work submitted to `stream` from now on come after all of that work; the host does not wait."""
        if self.driver and not self.passed():
            _scratch, at = new_scratch()
            status = entries.order(self.driver.address, self.slots, self.tick, handle_of(stream), at)
            if status:
                raise self.driver.error("wait", status)

    def wait(self) -> None:
        """Waits until it has passed."""
        while self.driver and (event := entries.first_event(self.driver.address, self.slots, self.tick)):
            self.driver.make_step(WAIT_FOR, event)
            self.passed()
        self.slots = 0

    def __or__(self, other: Fence) -> Fence:
        """The fence that passes when both have. They are of one driver: slots of another are other streams."""
        if self.driver and other.driver and self.driver is not other.driver:
            raise ValueError("fences of different drivers were merged")
        return Fence(self.driver or other.driver, self.slots | other.slots, max(self.tick, other.tick))
