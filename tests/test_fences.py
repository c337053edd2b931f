"""No page goes to somebody else while work that may read it is still running."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch
from conftest import on_driver, small_driver
from faulty import CALLS, FaultyDriver

import vmmkv
import vmmkv.torch
from vmmkv.driver.fence import Fence
from vmmkv.driver.table import NOT_READY

LONG = 400_000_000  # GPU cycles: a few tenths of a second


class FakeStream:
    device = torch.device("cpu")

    def __init__(self, name: str, number: int) -> None:
        self.name, self.cuda_stream = name, number


class FakeEvent:
    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.done = False
        self.waited = False


class StreamedDriver(FaultyDriver):
    """A host driver that pretends to have streams: work on them ends when the test says so."""

    functions = (*CALLS, "make_event", "record", "query", "wait", "wait_for", "deallocate")
    stream = "main"

    def __init__(self) -> None:
        super().__init__(small_driver("cpu"))
        self.events: list[tuple[str, FakeEvent]] = []
        """In the order in which they were recorded."""
        self.latest: dict[int, FakeEvent] = {}
        """By the driver's event: as it was recorded last."""
        self.by_name: dict[str, FakeStream] = {}
        self.orders: list[tuple[str, str]] = []
        """Streams that wait, and for which other."""

    def __getitem__(self, name: str) -> FakeStream:
        return self.by_name.setdefault(name, FakeStream(name, 100 + len(self.by_name)))

    def current_stream(self) -> FakeStream:
        return self[self.stream]

    def current_handle(self) -> int:
        return self.current_stream().cuda_stream

    def _c_make_event(self, out: int, flags: int) -> None:
        ctypes.c_int64.from_address(out).value = len(self.latest) + 1
        self.latest[len(self.latest) + 1] = FakeEvent("")

    def _c_record(self, event: int, handle: int) -> None:
        name = self._name(handle)
        self.latest[event] = FakeEvent(name)
        self.events.append((name, self.latest[event]))

    def _c_query(self, event: int) -> int:
        return 0 if self.latest[event].done else NOT_READY

    def _c_wait(self, handle: int, event: int, flags: int) -> None:
        self.orders.append((self._name(handle), self.latest[event].stream))

    def _c_wait_for(self, event: int) -> None:
        self.latest[event].done = self.latest[event].waited = True

    def _name(self, handle: int) -> str:
        return next(stream.name for stream in self.by_name.values() if stream.cuda_stream == handle)

    def finish(self) -> None:
        for _, event in self.events:
            event.done = True


@pytest.fixture
def driver() -> StreamedDriver:
    return StreamedDriver()


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("fills", [0, 1, 2])
def test_a_failed_memset_leaves_no_page_unmapped_under_another(driver, make_cache, device: str, fills: int) -> None:
    cache = make_cache(driver=driver, layers_per_range=1, scrub=True)
    sequence = cache.sequence(1)
    mapped = len(driver.mapped)
    driver.fail("fill", skip=fills)
    with pytest.raises(vmmkv.DriverError):
        sequence.extend(80)
    assert sequence.length == 1
    cache.check()
    assert len(driver.mapped) > mapped, "pages may still be written to"
    driver.stream = "other"
    cache.trim()
    assert any(event.waited for _, event in driver.events)
    sequence.extend(80)


def test_a_fence_passes_when_all_its_events_have(driver) -> None:
    fence = Fence.after(driver, [driver["a"], driver["b"]]) | Fence.after(driver, [driver["c"]])
    for _, event in driver.events:
        assert not fence.passed()
        event.done = True
    assert fence.passed()
    assert Fence().passed()


def test_the_same_stream_adopts_at_once_another_behind_the_last_work(driver, make_cache) -> None:
    cache = make_cache(driver=driver)
    driver.stream = "side"
    with cache.sequence(50) as sequence:
        row = sequence.row
    sequence = cache.sequence(50)
    assert sequence.row == row
    assert not driver.orders
    driver.stream = "main"
    del sequence  # it ends on its own stream, too
    assert cache.sequence(50).row == row
    assert driver.orders == [("main", "side")]


@pytest.mark.usefixtures("undebugged")
def test_pages_are_reclaimed_from_idle_rows_first_and_waited_for_last(driver, make_cache) -> None:
    cache = make_cache(driver=driver, pages=20)
    busy, idle = cache.sequence(50), cache.sequence(50)
    idle.free()
    driver.finish()
    busy.free()
    driver.stream = "other"
    kept = [cache.sequence(50, row=2)]
    assert not any(event.waited for _, event in driver.events)
    kept.append(cache.sequence(50, row=3))
    assert [event.waited for _, event in driver.events] == [False, True]
    cache.check()


@pytest.mark.usefixtures("undebugged")
def test_one_fence_serves_a_batch(driver, make_cache) -> None:
    cache = make_cache(driver=driver)
    cache.free([cache.sequence(5) for _ in range(4)])
    assert len(driver.events) == 1


@pytest.mark.usefixtures("undebugged")
@pytest.mark.parametrize("finished", [False, True])
def test_a_sliding_window_has_its_pages_again_behind_their_fence(driver, make_cache, finished: bool) -> None:
    cache = make_cache(driver=driver, max_seq_len=1000, pages=12)
    sequence = cache.sequence(32)
    sequence.release_before(32)
    sequence.extend(32)
    if finished:
        driver.finish()
    sequence.extend(32)
    assert cache.stats().pages_created == 12
    assert [event.waited for _, event in driver.events] == [not finished]


class Stubborn(StreamedDriver):
    """Cannot be waited for, for a reason that the test gives."""

    reason: tuple[type[Exception], ...] = ()

    def _c_deallocate(self, address: int) -> None:
        for kind in self.reason:
            raise kind("cuMemFree", "CUDA_ERROR")


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("reason", [vmmkv.StreamCaptureError, vmmkv.DriverError])
def test_what_cannot_be_waited_for_is_not_unmapped(make_cache, device: str, reason: type[Exception]) -> None:
    """`close` says so and has done nothing; a cache that is collected goes when it can."""
    driver = Stubborn()
    cache = make_cache(driver=driver)
    sequence = cache.sequence(20)
    sequence.k(0).fill_(3)
    driver.reason = (reason,)
    with pytest.raises(reason):
        cache.close()
    assert (sequence.k(0) == 3).all()
    cache.sequence(5).free()
    cache.check()
    mapped = driver.mapped.copy()
    del cache, sequence
    assert driver.mapped == mapped
    make_cache()
    assert driver.mapped == mapped
    driver.reason = ()
    make_cache()
    assert not driver.mapped
    assert not driver.ranges


@pytest.mark.parametrize("device", ["cpu"])
def test_a_lost_device_needs_no_waiting(make_cache, device: str) -> None:
    driver = Stubborn()
    cache = make_cache(driver=driver)
    cache.sequence(20)
    driver.reason = (vmmkv.DeviceLostError,)
    cache.close()
    assert not driver.mapped
    other = Stubborn()
    cache = make_cache(driver=other)
    other.reason = driver.reason
    del cache
    assert not other.ranges


@pytest.mark.parametrize("device", ["cpu"])
def test_a_lost_device_of_which_every_call_fails_is_closed(make_cache, device: str) -> None:
    driver = StreamedDriver()
    cache = make_cache(driver=driver)
    live = cache.sequence(20)
    driver.fail(error=vmmkv.DeviceLostError, lasting=True)
    cache.close()
    assert not cache.is_open
    live.free()


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


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_streams_of_another_device_are_refused(gpu_cache, make_cache, device: str) -> None:
    host = make_cache(driver=small_driver("cpu")).sequence(1)
    with pytest.raises(vmmkv.DeviceError, match="is on cpu"):
        host.record_stream(torch.cuda.Stream())


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
@pytest.mark.parametrize("device", ["cuda"])
def test_another_context_may_be_current(gpu_cache, device: str) -> None:
    """Calls are made in the device's own, and leave the caller's as it was."""
    import cuda.bindings.driver as cu

    cache = gpu_cache(pages=60)
    use_everything(cache)
    _, gpu = cu.cuDeviceGet(0)
    status, context = cu.cuCtxCreate(None, 0, gpu)
    assert status == cu.CUresult.CUDA_SUCCESS
    try:
        driver = cache.pool.driver
        fence = Fence.after(driver, [driver.current_stream()])
        assert cu.cuCtxGetCurrent()[1].getPtr() != 0
        handle, address = driver.create(), driver.reserve(driver.page_size)
        driver.map(address, handle)
        driver.set_access(address, driver.page_size)
        driver.fill(address, driver.page_size, 7, driver.current_stream())
        fence.wait()
        driver.synchronize()
        driver.unmap(address, driver.page_size)
        driver.release(handle)
        driver.free(address, driver.page_size)
        assert int(cu.cuCtxGetCurrent()[1]) == int(context)
    finally:
        cu.cuCtxDestroy(context)
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
    failures: list[BaseException] = []

    def in_thread() -> None:
        try:
            use_both()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert not failures
