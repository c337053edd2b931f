"""Prepared launches against a driver of our own: what it reads is what the call said, whoever else calls meanwhile."""

from __future__ import annotations

import ctypes
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from enum import IntEnum
from typing import Any, NamedTuple

import pytest
import torch
from conftest import ROUNDS

from vmmkv.kernels import launches
from vmmkv.kernels.compiler import Kernel
from vmmkv.kernels.launches import Launch

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
        self.device, self.devices, self.streams, self.entered = 0, [], {0: 0, 1: 1 << 40}, []
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
        self.devices.append(index)
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
    for _ in range(20 * ROUNDS):
        launch, grid, arguments, changing = some_launch()
        for _ in range(3):
            fake.streams[0] = random.randrange(1 << 63)
            for place in changing:
                arguments[place] = some_arguments()[place]
            launch.run(*[arguments[place] for place in changing])
            assert fake.seen.pop() == (*grid, fake.streams[0], arguments)


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


def test_a_launch_goes_to_its_own_device(fake: FakeDriver) -> None:
    launch, grid, arguments, changing = some_launch(index=1)
    launch.run(*[arguments[place] for place in changing])
    assert (fake.devices, fake.seen) == ([1], [(*grid, 1 << 40, arguments)])


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
