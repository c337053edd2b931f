"""Each kernel under NVIDIA's `compute-sanitizer`: no access outside of a tensor, no race in shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import sanitized
from conftest import ROOT

PLACES = f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin", os.environ.get("PATH", "")
SANITIZER = shutil.which("compute-sanitizer", path=os.pathsep.join(PLACES))
TOOLS: dict[str, list[str]] = {"memcheck": ["--padding", "65536"], "racecheck": []}
"""And their options: memcheck leaves room between tensors, or what lies behind one may be another."""
AT_ONCE = 8
"""Processes, each with a context of its own: most of their time goes into starting and compiling."""


@pytest.mark.few(2)
@pytest.mark.parametrize("name", sanitized.CALLS)
def test_calls_are_as_they_should_be(name: str) -> None:
    """Those that are looked at under the sanitizer; without a GPU in the simulator, which finds other faults."""
    for written in sanitized.CALLS[name]():
        assert written.isfinite().all()


needs_sanitizer = pytest.mark.skipif(
    SANITIZER is None, reason="there is no compute-sanitizer, which is part of the CUDA toolkit"
)


def complaint(tool: str, name: str) -> str:
    """What the sanitizer says of our kernels in a call, if it complains."""
    assert SANITIZER
    command = [SANITIZER, "--tool", tool, *TOOLS[tool], "--kernel-name", "kns=vmmkv_", "--report-api-errors", "no"]
    command += ["--error-exitcode", "1", sys.executable, "-m", "tests.sanitized", name]
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    return "" if done.returncode == 0 else f"{name}:\n{done.stdout}{done.stderr}"


@pytest.mark.gpu
@needs_sanitizer
def test_the_sanitizer_sees_what_lies_beyond_a_tensor() -> None:
    assert "Invalid __global__" in complaint("memcheck", sanitized.BEYOND)


@pytest.mark.gpu
@needs_sanitizer
@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        complaints = [*filter(None, pool.map(lambda name: complaint(tool, name), sanitized.CALLS))]
    assert not complaints, "\n".join(complaints)
