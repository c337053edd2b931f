"""No page goes to somebody else while work that may read it is still running; and fences against a model that remembers
all work: more streams than slots, more events than a ring has."""

from __future__ import annotations

import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
import torch
from conftest import on_driver, randoms, small_driver
from faulty import FaultyDriver
from simulated_device import SimulatedDevice, Stream

import vmmkv
import vmmkv.torch
from vmmkv.driver.fence import Fence
from vmmkv.driver.fencing import EVENTS, SLOTS
from vmmkv.driver.table import CAPTURED_IMPLICITLY
from vmmkv.errors import DriverError, StreamCaptureError

LONG = 400_000_000  # GPU cycles: a few tenths of a second


@pytest.fixture
def simulated() -> SimulatedDevice:
    return SimulatedDevice(Random())


@pytest.mark.parametrize("device", ["cpu"])
def test_the_same_stream_adopts_at_once_another_behind_the_last_work(simulated, make_cache, device: str) -> None:
    cache = make_cache(driver=simulated)
    main, side, _ = simulated.streams
    simulated.current = side
    with cache.sequence(50) as sequence:
        row = sequence.row
        side.submit(lambda: None)
    sequence = cache.sequence(50)
    assert sequence.row == row
    assert main.submitted == 0
    simulated.current = main
    del sequence  # it ends on its own stream, too
    assert cache.sequence(50).row == row
    assert main.submitted == 1, "it waits for the other stream"


@pytest.mark.usefixtures("undebugged")
@pytest.mark.parametrize("device", ["cpu"])
def test_pages_are_reclaimed_from_idle_rows_first_and_waited_for_last(simulated, make_cache, device: str) -> None:
    cache = make_cache(driver=simulated, pages=20)
    busy, idle = cache.sequence(50), cache.sequence(50)
    idle.free()
    simulated.finish()
    main, other, _ = simulated.streams
    main.submit(lambda: None)
    busy.free()
    simulated.current = other
    kept = [cache.sequence(50, row=2)]
    assert main.queue
    kept.append(cache.sequence(50, row=3))
    assert not main.queue
    cache.check()


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("reason", [vmmkv.StreamCaptureError, vmmkv.DriverError])
def test_what_cannot_be_waited_for_is_not_unmapped(simulated, make_cache, device: str, reason: type[Exception]) -> None:
    """`close` says so and has done nothing; a cache that is collected goes when it can."""
    cache = make_cache(driver=simulated)
    sequence = cache.sequence(20)
    sequence.k(0).fill_(3)
    simulated.fail("synchronize", error=reason, lasting=True)
    with pytest.raises(reason):
        cache.close()
    assert (sequence.k(0) == 3).all()
    cache.sequence(5).free()
    cache.check()
    mapped = simulated.mapped.copy()
    del cache, sequence
    make_cache()
    assert simulated.mapped == mapped
    simulated.heal()
    make_cache()
    assert not simulated.mapped
    assert not simulated.ranges


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("way", ["close", "collect", "close, and every call fails"])
def test_a_lost_device_needs_no_waiting(simulated, make_cache, device: str, way: str) -> None:
    cache = make_cache(driver=simulated)
    cache.sequence(20)
    call = "any" if way.endswith("fails") else "synchronize"
    simulated.fail(call, error=vmmkv.DeviceLostError, lasting=True)
    if way != "collect":
        cache.close()
        assert not cache.is_open
    del cache
    assert call == "any" or not simulated.mapped | simulated.ranges


# ---------------------------------------------------------------------- on a GPU


@pytest.fixture
def gpu_cache(make_cache):
    return lambda **kwargs: make_cache(driver=small_driver("cuda"), **kwargs)


def reader(sequence: vmmkv.Sequence, stream: torch.cuda.Stream) -> torch.Tensor:
    """Reads the sequence on a stream, much later."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        return sequence.k(0).clone()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("then", ["adopt", "reclaim", "trim", "close"])
def test_a_reader_on_a_side_stream_sees_its_data(gpu_cache, device: str, then: str) -> None:
    cache = gpu_cache(max_sequences=2, pages=20)
    side = torch.cuda.Stream()
    sequence = cache.sequence(100)
    sequence.k(0).fill_(3)
    sequence.record_stream(side)
    read = reader(sequence, side)
    sequence.free()
    if then == "trim":
        cache.trim()
    elif then == "close":
        cache.close()
    else:
        other = cache.sequence(100 if then == "adopt" else 1)
        other.extend(0 if then == "adopt" else 99)
        other.k(0).fill_(9)
    torch.cuda.synchronize()
    assert (read == 3).all()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_a_captured_graph_reads_what_was_mapped_after_the_capture(gpu_cache, device: str) -> None:
    cache = gpu_cache()
    sequence = cache.sequence(10)
    keys, _ = cache.kv(0)
    row = sequence.row
    length = torch.zeros(1, dtype=torch.int64, device="cuda")
    out = torch.zeros(100, device="cuda")
    positions = torch.arange(100, device="cuda")

    def read() -> None:
        inside = torch.minimum(positions, length - 1)
        out.copy_(keys[row, :, 0, 0].gather(0, inside))

    def step(tokens: int) -> torch.Tensor:
        sequence.k(0)[...] = torch.rand_like(sequence.k(0))
        length.fill_(tokens)
        graph.replay()
        torch.cuda.synchronize()
        return out[:tokens]

    length.fill_(10)
    read()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read()
    assert torch.equal(step(10), sequence.k(0)[:, 0, 0])
    sequence.extend(90)
    assert torch.equal(step(100), sequence.k(0)[:, 0, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_during_a_capture_sequences_grow_and_no_cache_is_closed(gpu_cache, device: str) -> None:
    cache = gpu_cache(pages=25)
    kept, gone = cache.sequence(10), cache.sequence(60)
    gone.free()
    value = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value += 1
        kept.extend(90)  # has to reclaim, which asks an event
        with pytest.raises(vmmkv.StreamCaptureError, match="before the capture"):
            cache.close()
    graph.replay()
    torch.cuda.synchronize()
    assert value.item() == 1
    assert kept.length == 100
    kept.k(0).fill_(1)
    cache.check()


class Captured:
    """A graph that another thread captures while the `with` block runs, and that is right after it."""

    def __init__(self, mode: str) -> None:
        self.mode, self.stream, self.value = mode, torch.cuda.Stream(), torch.zeros(1, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        self.begun, self.end = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        torch.cuda.synchronize()

    def _capture(self) -> None:
        try:
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode=self.mode):
                self.value += 1
                self.begun.set()
                self.end.wait(60)
        except BaseException as error:
            self.error = error
            self.begun.set()

    def __enter__(self) -> Captured:
        self.thread = threading.Thread(target=self._capture)
        self.thread.start()
        self.begun.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.end.set()
        self.thread.join()
        assert self.error is None, "the capture was broken"
        self.graph.replay()
        torch.cuda.synchronize()
        assert self.value.item() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_a_stream_that_another_thread_captures_is_not_asked(gpu_cache, device: str) -> None:
    """An event on it would belong to the graph, and could never be queried again."""
    cache = gpu_cache(max_sequences=2)
    captured = Captured("thread_local")
    sequence, abandoned = cache.sequence(5), cache.sequence(5)
    for each in (sequence, abandoned):
        each.record_stream(captured.stream)
    with captured:
        with pytest.raises(vmmkv.StreamCaptureError, match="is being captured"):
            sequence.free()
        assert sequence.length == 5
        del each, abandoned
        with pytest.raises(vmmkv.OutOfRowsError):
            cache.sequence(5)
    assert cache.sequence(5).length == 5
    sequence.free()
    cache.check()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_a_cache_collected_in_a_capture_is_freed_later(gpu_cache, device: str) -> None:
    driver = FaultyDriver(small_driver("cuda"))
    cache = on_driver(driver, vmmkv.KVCache, vmmkv.KVLayout(1, 1, 64), 1, 64, max_bytes="4MiB")
    cache.sequence(5)
    graph, value = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        value += 1
        del cache
    assert driver.mapped
    gpu_cache()
    assert not driver.mapped
    assert not driver.ranges


def use_everything(cache: vmmkv.KVCache) -> None:
    """Grows, shares, truncates, trims and ends, on streams, and checks what was written."""
    first = cache.sequence(30)
    first.k(0).fill_(3)
    side = torch.cuda.Stream(cache.device)
    first.record_stream(side)
    side.wait_stream(torch.cuda.current_stream(cache.device))
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG // 20)
        read = first.k(0).clone()
    fork = first.fork()
    first.truncate(2)
    first.free()
    cache.trim()
    fork.extend(20)
    side.synchronize()
    assert (read == 3).all()
    assert (fork.k(0)[:30] == 3).all()
    fork.free()
    cache.trim()
    cache.check()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("current", [0, 1])
def test_another_device_may_be_current(current: int) -> None:
    """In this thread, and in one that is new to both."""
    layout = vmmkv.KVLayout(num_layers=2, num_kv_heads=2, head_dim=4096, dtype=torch.float32)
    options = {"max_bytes": "400MiB", "lookahead": 0, "large_frames": False}
    caches = [vmmkv.KVCache(layout, 4, 100, device=f"cuda:{index}", **options) for index in range(2)]

    def use_both() -> None:
        with torch.cuda.device(current):
            for cache in caches:
                use_everything(cache)
            assert torch.cuda.current_device() == current

    use_both()
    with ThreadPoolExecutor(1) as other:
        other.submit(use_both).result()


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
    for random in randoms(6 + 100 // streams):
        Model(random, streams).run(250)


def test_fences_of_different_drivers_are_not_merged() -> None:
    one, other = (Fence.after(device, device.streams) for device in (Device(Random(), 1), Device(Random(), 1)))
    assert (one | Fence()).passed()
    with pytest.raises(ValueError, match="different drivers"):
        one | other
