"""Kernels beside captures: what is made at a first launch must neither break another's graph nor become part of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import DEVICE, int32

from vmmkv.kernels import append, compiler, decode, launches


class Recorder:
    """Stands for the bindings of the CUDA driver: notes calls and the capture mode that they are made in."""

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING="non-blocking")

    def __init__(self, failing: str) -> None:
        self.failing = failing
        self.mode = "global"
        self.calls: dict[str, str] = {}

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[None, str]:  # noqa: N802
        self.mode, before = mode, self.mode
        return None, before

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls[name] = self.mode
            status = SimpleNamespace(name="CUDA_ERROR_MADE_UP") if name == self.failing else None
            return (status, 4096) if name in ("cuMemAlloc", "cuStreamCreate") else (status,)

        return call


@pytest.mark.parametrize("failing", ["", "cuMemAlloc", "cuStreamCreate", "cuMemsetD8Async", "cuStreamSynchronize"])
def test_workspace_is_made_in_relaxed_mode_on_a_stream_of_its_own(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """With nothing that waits for other streams; and where a call fails nothing is left."""
    recorder = Recorder(failing)
    monkeypatch.setattr(compiler, "driver", lambda: recorder)
    monkeypatch.setattr(compiler, "enter_context", lambda index: None)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    with pytest.raises(RuntimeError, match="MADE_UP") if failing else nullcontext():
        assert compiler.allocate_zeroed(0, 512) == 4096
    calls = ["cuMemAlloc", "cuStreamCreate", "cuMemsetD8Async", "cuStreamSynchronize"]
    made = calls[: calls.index(failing) + 1] if failing else calls
    assert {*recorder.calls} - {"cuStreamDestroy"} == {*made} | ({"cuMemFree"} if failing in calls[1:] else set())
    assert ({*recorder.calls.values()}, recorder.mode) == ({"relaxed"}, "global")


class Step:
    """One token more for two sequences, and attention to all; nothing is allocated when it runs."""

    def __init__(self, kv_heads: int, group: int) -> None:
        self.k, self.v = (torch.randn(2, 5000, kv_heads, 64, device=DEVICE, dtype=torch.bfloat16) for _ in "kv")
        self.new_k, self.new_v = (torch.empty(2, kv_heads, 64, device=DEVICE, dtype=torch.bfloat16) for _ in "kv")
        self.q = torch.empty(2, 1, kv_heads * group, 64, device=DEVICE, dtype=torch.bfloat16)
        self.out = torch.empty_like(self.q)
        self.rows, self.starts, self.lens = int32([1, 0]), int32([0, 0]), int32([0, 0])

    def renew(self) -> None:
        for tensor in (self.q, self.new_k, self.new_v):
            tensor.normal_()
        self.starts.copy_(torch.randint(2000, 5000, (2,)))
        self.lens.copy_(self.starts + 1)
        self.out.fill_(torch.nan)

    def run(self) -> None:
        append(self.new_k, self.new_v, self.k, self.v, self.rows, self.starts)
        decode(self.q, self.k, self.v, self.lens, self.rows, out=self.out)

    def check(self) -> None:
        for index, (row, length) in enumerate(zip(self.rows.tolist(), self.lens.tolist())):
            assert torch.equal(self.k[row, length - 1], self.new_k[index])
            k, v = (cache[row, :length].double().transpose(0, 1) for cache in (self.k, self.v))
            q = self.q[index, 0].double().unflatten(0, (k.shape[0], -1))
            exact = (torch.softmax(q @ k.mT / 8, -1) @ v).flatten(0, 1)
            assert (self.out[index, 0] - exact).norm() < 0.02 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_first_launches_beside_a_capture_and_in_it(mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A thread that is new to the GPU compiles, loads, makes a workspace and launches; another captures the same."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for books in ("_rooms", "_counters", "_slabs"):
        monkeypatch.setattr(launches, books, {})
    kv_heads, group = {"global": (3, 11), "thread_local": (5, 13), "relaxed": (7, 9)}[mode]  # of this test alone
    captured, beside, stream = Step(kv_heads, group), Step(kv_heads + 6, group + 1), torch.cuda.Stream()
    beside.renew()

    def launch_beside() -> None:
        with torch.cuda.stream(stream):
            beside.run()

    graph = torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as thread, torch.cuda.graph(graph, capture_error_mode=mode):
        captured.run()
        thread.submit(launch_beside).result()
        captured.run()
    assert len(list(tmp_path.rglob("*.ptx"))) == 4, "all four kernels were new"
    for _ in range(3):
        captured.renew()
        graph.replay()
        captured.check()
    torch.cuda.synchronize()
    beside.check()
