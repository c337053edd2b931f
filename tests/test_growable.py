"""Growable tensors on the core: against plain tensors, with failing calls, late streams, and views that live on."""

from __future__ import annotations

import gc
from random import Random

import pytest
import torch
from conftest import on_driver, randoms, small_driver
from faulty import FaultyDriver
from interruption import interrupted
from simulated_device import SimulatedDevice

import vmmkv
from vmmkv.cache import KVCache
from vmmkv.core.check import check
from vmmkv.layout import KVLayout
from vmmkv.pool import FramePool
from vmmkv.torch.growable_tensor import GrowableTensor

DTYPES = (torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.complex64)
PAGE, MIB = 4096, 1 << 20
BUDGET = 8
"""Pages."""


def random_rows(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, 2, (count, *like.shape[1:]), device=like.device).to(like.dtype)


class Grown:
    """A growable tensor beside a plain one, under random operations and failing calls."""

    def __init__(self, random: Random, device: str) -> None:
        self.random = random
        self.driver = FaultyDriver(small_driver(device))
        self.page = self.driver.page_size
        dtype, inner = random.choice(DTYPES), random.choice([1, 2, 3])
        width = max(int(self.page / random.uniform(0.3, 40) / dtype.itemsize / inner), 1)
        self.row_bytes = width * inner * dtype.itemsize
        self.max_rows = 10 * self.page // self.row_bytes + 1
        pool = FramePool(BUDGET * self.page, device=self.driver.inner)
        self.grown = GrowableTensor((self.max_rows, width, inner), dtype, pool=pool, max_bytes="100%")
        self.model, self.views = self.grown.tensor.clone(), [self.grown.tensor]

    def pages(self, length: int) -> int:
        return -(-length * self.row_bytes // self.page)

    def step(self) -> None:
        length, failures = self.random.randint(0, self.max_rows), self.driver.failures
        action = self.random.choice(["resize", "append", "trim"])
        if self.random.random() < 0.3:
            self.driver.fail(self.random.choice(["create", "map", "set_access", "unmap", "release"]), length % 4)
        try:
            getattr(self, action)(length)
        except vmmkv.OutOfPagesError:
            assert self.pages(length) > BUDGET
        except vmmkv.DriverError:
            assert self.driver.failures > failures
        self.driver.heal()
        self.verify()

    def trim(self, _: int) -> None:
        before = self.driver.num_pages
        assert self.grown.trim() == (before - self.driver.num_pages) * self.page
        assert self.driver.num_pages == self.pages(len(self.model))

    def append(self, length: int) -> None:
        rows = random_rows(max(length - len(self.model), 0), self.model)
        self.grown.append(rows)
        self.model = torch.cat([self.model, rows])

    def resize(self, length: int) -> None:
        self.grown.resize(length)
        new = random_rows(max(length - len(self.model), 0), self.model)
        self.grown.tensor[len(self.model) :] = new
        self.model = torch.cat([self.model[:length], new])

    def verify(self) -> None:
        grown, model = self.grown, self.model
        assert grown.shape == grown.tensor.shape == model.shape
        assert grown.tensor.is_contiguous()
        assert torch.equal(grown.tensor, model)
        assert len(grown) <= grown.capacity <= self.max_rows
        stats, size = grown.stats(), self.page
        assert stats.used_bytes == model.nbytes
        assert self.pages(len(model)) * size <= stats.physical_bytes <= self.driver.num_pages * size <= BUDGET * size
        assert stats.physical_bytes == len(self.driver.mapped) * size
        assert grown.mapped_pages() * size == stats.physical_bytes
        self.views = [view for view in self.views if len(view) <= len(model)] + [grown.tensor]
        assert all(torch.equal(view, model[: len(view)]) for view in self.views)
        assert len({view.data_ptr() for view in self.views if len(view)}) <= 1
        check(grown.pool, [*grown.pool.members])

    def end(self) -> None:
        self.grown.close()
        assert not self.driver.mapped
        self.grown.pool.close()
        assert not self.driver.handles
        self.views.clear()
        gc.collect()  # errors hold frames
        assert not self.driver.ranges


def test_a_growable_tensor_is_a_tensor(device: str) -> None:
    for random in randoms(40):
        each = Grown(random, device)
        for _ in range(25):
            each.step()
        each.end()


def test_a_growable_tensor_refuses_what_does_not_fit(device: str) -> None:
    grown = GrowableTensor((100, 3), torch.float32, device)
    grown.append(torch.ones(2, 3, device=device))
    address = grown.tensor.data_ptr()
    for error, rows in (
        (vmmkv.ShapeError, torch.ones(2, 4, device=device)),
        (vmmkv.ShapeError, torch.tensor(1.0, device=device)),
        (vmmkv.ShapeError, torch.ones(99, 3, device=device)),
        (vmmkv.DtypeError, torch.ones(2, 3, device=device, dtype=torch.float64)),
        (vmmkv.DeviceError, torch.ones(2, 3, device="meta")),
        (vmmkv.ArgumentError, torch.ones(2, 3, device=device).to_sparse()),
        (vmmkv.ArgumentError, torch.ones(2, 3).numpy()),
        (vmmkv.ArgumentError, [[1.0, 2.0, 3.0]]),
    ):
        with pytest.raises(error):
            grown.append(rows)
    for length in (-1, 101, 1 << 70):
        with pytest.raises(vmmkv.ShapeError, match="has 100"):
            grown.resize(length)
    with pytest.raises(TypeError):
        grown.resize(1.5)  # type: ignore[arg-type]
    with pytest.raises(vmmkv.ArgumentError):
        grown.record_stream("main")  # type: ignore[arg-type]
    assert grown.tensor.tolist() == [[1, 1, 1], [1, 1, 1]]
    assert grown.tensor.data_ptr() == address
    grown.append(torch.ones(1, 3, device=device, requires_grad=True))
    assert not grown.tensor.requires_grad
    for shape in ((), (0, 3), (4, 0), (1 << 47,)):
        with pytest.raises(vmmkv.LayoutError):
            GrowableTensor(shape, device=device)
    with pytest.raises(vmmkv.DtypeError):
        GrowableTensor((4,), "float32", device)  # type: ignore[arg-type]
    with pytest.raises(vmmkv.ShapeError, match=r"\[2, 5\]; it must be \[n, 3\]"):
        grown.append(torch.ones(2, 5, device=device))
    with pytest.raises(vmmkv.ArgumentError, match="has made for itself"):
        GrowableTensor((4,), pool=grown.pool)
    with pytest.raises(ValueError, match="a pool has its own"):
        GrowableTensor((4,), device="cpu", pool=FramePool("1MiB", device="cpu", page_size=PAGE))
    with pytest.raises(TypeError, match="cannot be copied"):
        grown.__reduce__()
    grown.close()
    grown.close()
    assert (len(grown), grown.capacity) == (0, 0)
    for use in (lambda: grown.resize(3), grown.trim, grown.stats, lambda: grown.tensor):
        with pytest.raises(vmmkv.UseAfterFreeError, match="GrowableTensor was closed"):
            use()


def test_new_rows_are_no_numbers_with_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMMKV_DEBUG", "1")
    grown = GrowableTensor((1000, 3), torch.float16, "cpu", page_size=PAGE, max_bytes="1MiB")
    for _ in range(2):
        grown.resize(500)
        assert grown.tensor.isnan().all()
        grown.tensor.fill_(1)
        grown.resize(0)


def test_pages_behind_a_shrunk_tensor_wait_for_every_stream() -> None:
    device = SimulatedDevice(Random())
    grown = on_driver(device, GrowableTensor, (1 << 20,), torch.uint8, pool=FramePool(MIB, device=device.inner))
    first, second, third = device.streams
    grown.resize(50_000)
    grown.record_stream(third)
    device.current = second
    grown.resize(49_999)
    assert not device.recorded, "no page was left behind"
    work = []
    for stream in device.streams:
        stream.submit(lambda stream=stream: work.append(stream))
    grown.resize(10_000)
    assert {*device.recorded} == {first, second, third}
    assert grown.trim() == 10 * PAGE
    assert len(work) == 3


@pytest.mark.gpu
def test_pages_behind_a_shrunk_tensor_wait_for_their_readers() -> None:
    grown = GrowableTensor((1 << 30,), torch.uint8, "cuda")
    stream = torch.cuda.Stream()
    grown.record_stream(stream)
    grown.append(torch.full((64 * MIB,), 3, dtype=torch.uint8, device="cuda"))
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)
        total = grown.tensor.sum(dtype=torch.int64)
    grown.resize(MIB)
    assert grown.trim() == 62 * MIB
    assert total.item() == 3 * 64 * MIB


# ---------------------------------------------------------------------- views


def test_views_keep_memory_until_the_last_dies_or_addresses_if_it_was_closed() -> None:
    for closed in (False, True):
        driver = FaultyDriver(small_driver("cpu"))
        pool = FramePool(90 * PAGE, device=driver.inner)
        staging = driver.ranges.copy()
        grown = GrowableTensor((100, 64), torch.float32, pool=pool)
        grown.append(torch.full((100, 64), 3.0))
        cache = KVCache(KVLayout(2, 1, 64, layers_per_range=1), 2, 100, pool=pool)
        sequence = cache.sequence(100)
        sequence.k(1).fill_(2)
        views = [grown.tensor[10:], sequence.k(1), grown.tensor[:3], sequence.v(1)[:5]]
        if closed:
            grown.close()
            cache.close()
            pool.close()
            assert not driver.handles
        del grown, sequence, cache
        gc.collect()
        if not closed:
            assert (views[0] == 3).all()
            assert (views[1] == 2).all()
            assert driver.mapped
        assert len(driver.ranges) == 3 + (not closed)
        del views[1:3]
        gc.collect()
        assert len(driver.ranges) == 3 + (not closed)
        views.clear()
        gc.collect()
        assert not driver.mapped
        assert driver.ranges == ({} if closed else staging)
        if not closed:
            pool.close()
        assert not driver.handles
        assert not driver.ranges


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # from a finalizer
@pytest.mark.parametrize("name", ["resize", "append", "trim"])
def test_a_call_that_is_interrupted_at_any_line(name: str) -> None:
    """The tensor is as before or after, and the call can be made again."""
    ended, line = None, 0
    while ended is None:
        line += Random().randint(1, 6)
        driver = FaultyDriver(small_driver("cpu"))
        pool = FramePool(90 * PAGE, device=driver.inner)
        grown = GrowableTensor((100, 512), torch.float64, pool=pool)
        grown.append(torch.full((10, 512), 3.0, dtype=torch.float64))
        rows = torch.full((5, 512), 4.0, dtype=torch.float64)
        calls = {
            "resize": lambda grown=grown: grown.resize(4),
            "append": lambda grown=grown, rows=rows: grown.append(rows),
            "trim": grown.trim,
        }
        if name == "trim":
            grown.resize(4)
        ended = interrupted(calls[name], line)
        pool.set_limit(80 * PAGE)  # books a journal that was left behind
        check(pool, [each for each in pool.members if not each.is_closed])
        assert len(grown.tensor) == len(grown) in {"resize": (4, 10), "append": (10, 15), "trim": (4,)}[name]
        assert (grown.tensor[:10] == 3).all()
        grown.resize(0)
        grown.append(rows)
        assert (grown.tensor == 4).all()
        grown.close()
        assert not driver.mapped
        pool.close()
        assert not driver.handles


def test_a_call_in_the_middle_of_another_of_its_thread_is_refused() -> None:
    """What a finalizer would do, as soon as rows are copied."""
    grown = GrowableTensor((100,), torch.uint8, "cpu", page_size=PAGE, max_bytes="1MiB")
    rows, refused = torch.ones(3, dtype=torch.uint8), []

    def finalizer() -> torch.Tensor:
        for call in (lambda: grown.resize(1), grown.trim, grown.close):
            with pytest.raises(vmmkv.BusyError):
                call()
            refused.append(len(grown))
        return torch.Tensor.detach(rows)

    rows.detach = finalizer  # type: ignore[method-assign]
    grown.append(rows)
    assert refused == [3, 3, 3]
    assert grown.tensor.tolist() == [1, 1, 1]
