"""Launches against a driver of our own: what it reads is what the call said, whoever else calls meanwhile; plans, which
are found at a look; and memory of launches, which those that may run beside each other do not share."""

from __future__ import annotations

import ctypes
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from enum import IntEnum
from itertools import combinations
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from conftest import ROUNDS

from vmmkv.kernels import launches
from vmmkv.kernels.checks import Plans, keys
from vmmkv.kernels.compiler import Kernel
from vmmkv.kernels.launches import Launch, Workspace

HANDLE = 4711


class Maps(NamedTuple):
    first: bytes
    second: bytes


class Numbers(NamedTuple):
    a: int
    b: int
    weight: float
    c: int


class Scoring(NamedTuple):
    inner: float
    d: int
    outer: float


STRUCTS = Maps, Numbers, Scoring
KINDS = bytes, bytes, int, int, float, int, float, int, float


class Config(ctypes.Structure):
    """`CUlaunchConfig`, as cuda.h has it."""

    _fields_ = [
        *[(f"{name}_{axis}", ctypes.c_uint) for name in ("grid", "block") for axis in "xyz"],
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


class FakeDriver:
    """`cuLaunchKernelEx`, and what else a launch asks for.

    Attributes:
        seen: grid, block, shared bytes, stream and arguments of each launch.
        answers: what the next calls return.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.answers: list[int] = []
        self.device, self.streams, self.entered = 0, {0: 0, 1: 1 << 40}, []
        signature = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
        callback = signature(self.launch)
        monkeypatch.setattr(launches, "_driver_launch", lambda: callback)
        monkeypatch.setattr(launches, "SIMULATED", False)
        monkeypatch.setattr(launches, "driver", lambda: self)
        monkeypatch.setattr(launches, "enter_context", self.entered.append)
        monkeypatch.setattr(Kernel, "handle", lambda kernel, index: HANDLE)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.device, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", self.streams.__getitem__, raising=False)
        monkeypatch.setattr(torch.cuda, "device", self.enter_device)

    class CUresult(IntEnum):
        CUDA_ERROR_INVALID_CONTEXT = 201
        CUDA_ERROR_ILLEGAL_ADDRESS = 700

    def cuCtxGetCurrent(self) -> tuple[int, int]:  # noqa: N802
        return 0, len(self.entered)

    def enter_device(self, index: int) -> Any:
        self.device = index
        return nullcontext()

    def launch(self, config_at: int, handle: int, pointers_at: int, extra: int | None) -> int:
        time.sleep(0)  # so that another thread goes on
        config = Config.from_address(config_at)
        assert (handle, extra, config.attributes, config.num_attributes) == (HANDLE, None, None, 0)
        pointers = (ctypes.c_void_p * len(KINDS)).from_address(pointers_at)
        arguments = []
        for kind, at in zip(KINDS, pointers):
            if kind is bytes:
                assert at % 64 == 0
            arguments.append(
                ctypes.string_at(at, 128)
                if kind is bytes
                else (ctypes.c_int64 if kind is int else ctypes.c_float).from_address(at).value
            )
        grid = config.grid_x, config.grid_y, config.grid_z, config.block_x, config.block_y, config.block_z
        self.seen.append((*grid, config.shared_bytes, config.stream or 0, arguments))
        return self.answers.pop(0) if self.answers else 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return FakeDriver(monkeypatch)


def some_arguments() -> list[Any]:
    def one(kind: type) -> Any:
        if kind is bytes:
            return random.randbytes(128)
        return random.randrange(-(1 << 63), 1 << 63) if kind is int else random.randrange(-1000, 1000) / 8

    return [one(kind) for kind in KINDS]


def some_launch(index: int = 0) -> tuple[Launch, tuple[int, ...], list[Any], list[int]]:
    """A launch, its grid, and all arguments, of which some places change: maps are among them."""
    grid, threads, shared = (random.randint(1, 1 << 20), random.randint(1, 1 << 15)), random.randint(1, 1024), 1 << 15
    arguments = some_arguments()
    changing = sorted({0, 1, *random.sample(range(2, len(KINDS)), random.randint(0, len(KINDS) - 2))})
    kernel = Kernel(some_launch, (), STRUCTS, threads, shared_bytes=shared)
    given = tuple(None if place in changing else each for place, each in enumerate(arguments))
    return Launch(kernel, grid, index, given), (*grid, 1, threads, 1, 1, shared), arguments, changing


def test_the_driver_reads_what_a_call_says(fake: FakeDriver) -> None:
    for number in range(20 * ROUNDS):
        fake.device = random.randrange(2)
        launch, grid, arguments, changing = some_launch(index=number % 2)
        for _ in range(3):
            fake.streams[number % 2] = random.randrange(1 << 63)
            for place in changing:
                arguments[place] = some_arguments()[place]
            launch.run(*[arguments[place] for place in changing])
            assert fake.seen.pop() == (*grid, fake.streams[number % 2], arguments)
        assert fake.device == number % 2, "it goes to its own device"


def test_threads_that_launch_the_same(fake: FakeDriver) -> None:
    launch, grid, arguments, changing = some_launch()
    calls = [[some_arguments()[place] for place in changing] for _ in range(400)]
    with ThreadPoolExecutor(4) as pool:
        [*pool.map(lambda values: launch.run(*values), calls)]
    expected = []
    for values in calls:
        for place, value in zip(changing, values):
            arguments[place] = value
        expected.append((*grid, 0, [*arguments]))
    assert sorted(fake.seen) == sorted(expected)


def test_what_the_driver_refuses(fake: FakeDriver) -> None:
    """A thread without a context gets one, once; whatever else the driver says is an error."""
    launch, _, arguments, changing = some_launch()
    values = [arguments[place] for place in changing]
    fake.answers = [FakeDriver.CUresult.CUDA_ERROR_INVALID_CONTEXT]
    launch.run(*values)
    assert (len(fake.seen), fake.entered) == (2, [0])
    assert fake.seen[0] == fake.seen[1]
    for answer in FakeDriver.CUresult:
        fake.answers = [answer]
        with pytest.raises(RuntimeError, match=f"{answer.name} for some_launch"):
            launch.run(*values)
    fake.answers = []
    launch.run(*values)
    assert fake.entered == [0]


MAKE = (
    lambda: torch.empty(4, 3, 8),
    lambda: torch.empty(4, 3, 8, dtype=torch.float16),
    lambda: torch.empty(4, 3, 8, device="meta"),
    lambda: torch.empty(3, 4, 8).transpose(0, 1),
    lambda: torch.empty(4, 6, 8)[:, ::2],
    lambda: torch.empty(4, 1, 8).expand(4, 3, 8),
    lambda: torch.empty(5, 3, 8)[:4],
    lambda: torch.empty(5, 3, 8),
    lambda: torch.empty(4, 24),
    lambda: torch.nn.Parameter(torch.empty(4, 3, 8)),
    lambda: None,
)


def addresses(tensors: tuple[torch.Tensor | None, ...]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors if tensor is not None]


def test_any_calls_in_any_order() -> None:
    """Whatever differs makes another plan: shapes, strides, dtypes, devices, what is missing or the same, options."""
    made: list[Any] = []

    def make(*given: Any) -> Any:
        made.append(given)
        return given

    plans: Plans[Any] = Plans(make)
    kinds = random.sample(MAKE, 4)  # few, so that calls come again
    for _ in range(300):
        some = [random.choice(kinds)() for _ in range(2)]
        tensors = *some, random.choice([*some, None])
        option, mode = random.random() < 0.1, random.choice([torch.no_grad, torch.inference_mode, torch.enable_grad])
        with mode():
            if any(each is not None and each.is_meta for each in tensors):
                with pytest.raises(TypeError, match="without memory"):
                    plans.find(tensors, option)
            else:
                assert plans.find(tensors, option) == ((option, keys(tensors)), addresses(tensors))
    assert len(made) < 300, "nothing was found"


class Wrapper(torch.Tensor):
    """A tensor whose numbers are another's, as a DTensor's are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, *arguments: Any) -> Any:
        raise NotImplementedError


def test_a_tensor_without_memory_is_refused() -> None:
    """Not taken for one that is not given: also after one that looks like it. An empty one has nothing to be read."""
    plans = Plans(str)
    plain, empty = torch.empty(2, 3), torch.empty(2, 0)
    for _ in range(2):
        assert plans.find((plain, plain, empty))[1] == [plain.data_ptr(), plain.data_ptr(), 0]
        assert plans.find((plain, torch.empty(2, 3), empty))
        with pytest.raises(TypeError, match="got Wrapper"):
            plans.find((plain, Wrapper(plain), empty))


@pytest.mark.parametrize("option", [torch.tensor(0.5), [1]])
def test_what_may_change_unseen_is_no_option(option: Any) -> None:
    with pytest.raises(TypeError, match="must be a number"):
        Plans(str).find((torch.empty(2, 3), torch.empty(2, 3)), "auto", option)


SIZES = [(1 << 10, 256), (5000, 700), (1 << 16, 64), (1 << 16, 65)]
"""Bytes and counters of plans; of the first both take as much, so that what is given back is given again."""


@pytest.mark.parametrize("slab", [1024, 1 << 20])
def test_what_may_run_at_once_shares_nothing(monkeypatch: pytest.MonkeyPatch, slab: int) -> None:
    """Of streams no room and no counters, whichever plans use them; of captures, which have torch's room, none of both,
    and no counters of others. A slab that is used up cannot be replaced in a capture."""
    for books in ("_rooms", "_counters", "_slabs"):
        monkeypatch.setattr(launches, books, {})
    kept: list[torch.Tensor] = []
    now = {"stream": 0, "capture": 0}

    def allocate(index: int, nbytes: int) -> int:
        kept.append(torch.zeros(nbytes, dtype=torch.uint8))
        return kept[-1].data_ptr()

    on_host = SimpleNamespace(
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda index: now["stream"]),
        empty=lambda nbytes, dtype, device: torch.empty(nbytes, dtype=dtype),
        zeros=lambda count, dtype, device: torch.zeros(count, dtype=dtype),
        uint8=torch.uint8,
        int32=torch.int32,
    )
    monkeypatch.setattr(launches, "torch", on_host)
    monkeypatch.setattr(launches, "_capture_of", lambda index, stream: now["capture"])
    monkeypatch.setattr(launches, "_allocate", allocate)
    monkeypatch.setattr(launches, "SLAB", slab)
    plans = [(Workspace(0, *sizes), *sizes) for sizes in SIZES]
    used: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for _ in range(60 * ROUNDS):
        stream, capture = random.choice([(0, 0), (16, 0), (32, 0), (32, 1), (32, 2)])
        now |= {"stream": stream, "capture": capture}
        plan, nbytes, count = random.choice(plans)
        room, counters = plan.room()
        assert room + nbytes <= counters or counters + 4 * count <= room
        lasting = {(room, room + nbytes), (counters, counters + 4 * count)}
        if capture:
            ours = [range(each.data_ptr(), each.data_ptr() + len(each)) for each in kept]
            lasting = {(first, end) for first, end in lasting if any(first in each for each in ours)}
        else:
            assert plan.room() == (room, counters)
        used.setdefault((stream, capture), set()).update(lasting)
    for mine, others in combinations(used.values(), 2):
        assert all(end <= begin or last <= first for first, end in mine for begin, last in others)
