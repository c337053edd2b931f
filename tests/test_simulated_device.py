"""The simulated device, which tests believe."""

from __future__ import annotations

import weakref
from random import Random

from simulated_device import SimulatedDevice

from vmmkv.driver.fence import Fence


def test_who_ends_with_a_piece_of_work_may_wait_for_the_device() -> None:
    """As a cache does that nobody holds but a copy on its way: what comes behind the copy is not held up by its end."""
    device = SimulatedDevice(Random())
    stream, side = device.current, device.new_stream()
    ended: list[bool] = []

    class Holder:
        pass

    holder = Holder()
    weakref.finalize(holder, lambda: (device.finish(), ended.append(True)))
    stream.submit(lambda holder=holder: None)  # type: ignore[misc]
    fence = Fence.after(device, [stream])
    fence.order(side)
    del holder
    device.finish()
    assert ended == [True]
    assert fence.passed()
    assert not side.queue
