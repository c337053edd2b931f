"""Fences against a model that remembers all work: more streams than slots, more events than a ring has."""

from __future__ import annotations

import re
from collections import Counter
from random import Random

import pytest
from simulated_device import SimulatedDevice, Stream

from vmmkv.driver.fence import Fence
from vmmkv.driver.fencing import EVENTS, SLOTS
from vmmkv.driver.table import CAPTURED_IMPLICITLY
from vmmkv.errors import DriverError, StreamCaptureError

Points = dict[Stream, int]
"""How much work of each stream a fence stands for."""


class Device(SimulatedDevice):
    """A device whose streams can be captured."""

    functions = (*SimulatedDevice.functions, "is_capturing")

    def __init__(self, random: Random, streams: int) -> None:
        super().__init__(random, streams)
        self.capturing: set[int] = set()
        self.by_handle = {stream.cuda_stream: stream for stream in self.streams}

    def stream_of(self, handle: int) -> Stream:
        return self.by_handle[handle]

    def _c_is_capturing(self, handle: int, out: int) -> int:
        return CAPTURED_IMPLICITLY if handle in self.capturing else 0

    def _c_query(self, event: int) -> int:
        assert self.events[event - 1].stream, "asked for an event that was never recorded"
        return super()._c_query(event)


class Model:
    """Random fences, and for each what it must wait for."""

    def __init__(self, random: Random, streams: int) -> None:
        self.random = random
        self.device = Device(random, streams)
        self.fences: list[tuple[Fence, Points]] = []
        self.exact: dict[Fence, int] = {}
        """Fences that were not merged, and how many events had been recorded before."""

    def run(self, steps: int) -> None:
        often, seldom = [self.record], [self.merge, self.ask_for, self.order, self.wait, self.capture, self.fail]
        actions = often * self.random.randint(4, 40) + [self.work, self.ask] * self.random.randint(1, 4) + seldom
        for _ in range(steps):
            self.random.choice(actions)()
            if len(self.fences) > 40:
                self.fences.pop(self.random.randrange(40))
        self.device.finish()
        for fence, _ in self.fences:
            assert fence.passed()
            assert not fence.slots

    def some_streams(self) -> list[Stream]:
        most = self.random.choice([1, 2, len(self.device.streams)])
        return self.random.sample(self.device.streams, self.random.randint(1, most))

    def a_stream(self) -> Stream:
        return self.random.choice(self.device.streams)

    def is_done(self, points: Points) -> bool:
        return all(stream.done >= position for stream, position in points.items())

    def record(self) -> None:
        busy = self.random.random() < 0.9
        named = self.some_streams()
        for stream in named:
            for _ in range(self.random.randint(1, 3) if busy else 0):
                stream.submit(lambda: None)
        points = {stream: stream.submitted for stream in named}
        fence = Fence.after(self.device, named)
        self.fences.append((fence, points))
        self.exact[fence] = len(self.device.recorded)

    def work(self) -> None:
        self.device.run(self.random.choice([1, 10, 10 * len(self.device.streams)]))

    def merge(self) -> None:
        if len(self.fences) > 1:
            (one, here), (other, there) = self.random.sample(self.fences, 2)
            points = {stream: max(here.get(stream, 0), there.get(stream, 0)) for stream in here | there}
            self.fences.append((one | other, points))

    def ask(self) -> None:
        """A fence that waits for more than it stands for was merged, or has lost its event to a later one."""
        for fence, points in self.fences:
            assert not fence.passed() or self.is_done(points)
            assert fence.slots or self.is_done(points)
            later = Counter(self.device.recorded[self.exact.get(fence, 0) :])
            if fence in self.exact and all(later[stream] < EVENTS for stream in points):
                assert fence.passed() == self.is_done(points)

    def ask_for(self) -> None:
        for fence, points in self.fences:
            before = [dict(vars(each)) for each in self.device.streams]
            assert not fence.passed() or self.is_done(points)
            assert before == [vars(each) for each in self.device.streams], "asking waits for nothing"

    def order(self) -> None:
        for fence, points in self.random.sample(self.fences, min(3, len(self.fences))):
            stream = self.a_stream()
            others = {each: position for each, position in points.items() if each is not stream}
            fence.order(stream)
            stream.submit(lambda others=others: self.check(others))  # type: ignore[misc]

    def check(self, points: Points) -> None:
        assert self.is_done(points), "work has overtaken a fence"

    def wait(self) -> None:
        if self.fences:
            fence, points = self.random.choice(self.fences)
            fence.wait()
            assert self.is_done(points)
            assert fence.passed()

    def capture(self) -> None:
        """A captured stream is named, and nothing is recorded on any."""
        named = self.some_streams()
        captured = self.random.choice([self.device.current, *named])
        self.device.capturing = {captured.cuda_stream}
        recorded = len(self.device.recorded)
        with pytest.raises(StreamCaptureError, match=re.escape(repr(captured))):
            Fence.after(self.device, named)
        assert len(self.device.recorded) == recorded
        self.device.capturing = set()

    def fail(self) -> None:
        """A call that fails is told, and what is there waits as long as before."""
        name, named = self.random.choice(["record", "query", "wait", "wait_for"]), self.some_streams()
        fault, told = self.device.fail(name, self.random.randrange(3)), False
        try:
            if name == "record":
                Fence.after(self.device, named)
            for fence, _ in self.fences[-3:] if name != "record" else []:
                fence.order(named[0])
                fence.wait()
        except DriverError as error:
            told = error.call == name
        assert told == fault.was_met
        self.device.heal()


@pytest.mark.parametrize("streams", [2, 5, SLOTS + 20])
def test_fences_wait_for_all_work_that_they_stand_for(streams: int) -> None:
    for _ in range(6 + 100 // streams):
        seed = Random().randrange(1 << 32)
        print(f"seed {seed}")
        Model(Random(seed), streams).run(250)


def test_an_event_that_has_passed_is_not_asked_for_again() -> None:
    device = Device(Random(), 1)
    fences = []
    for _ in range(4):
        device.current.submit(lambda: None)
        fences.append(Fence.after(device, device.streams))
    device.finish()
    assert fences[2].passed()
    device.fail("query", lasting=True)
    assert fences[0].passed()
    assert fences[1].passed()
    with pytest.raises(DriverError):
        fences[3].passed()


def test_the_host_waits_for_all_streams_of_a_fence() -> None:
    device = Device(Random(), 2)
    one, other = device.streams
    other.submit(lambda: None)
    both = Fence.after(device, device.streams)
    assert Fence.after(device, [one]).passed()
    both.wait()
    assert not other.queue


def test_fences_of_different_drivers_are_not_merged() -> None:
    one, other = (Fence.after(device, device.streams) for device in (Device(Random(), 1), Device(Random(), 1)))
    assert (one | Fence()).passed()
    with pytest.raises(ValueError, match="different drivers"):
        one | other
