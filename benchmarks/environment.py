"""What a result file says of how its figures came about: code, machine, versions, inputs, and the state of GPUs."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from vmmkv import environment as code

PACKAGES = (
    *("numpy", "numba", "numba-cuda", "cuda-bindings", "cuda-core", "triton", "transformers"),
    *("fa3-fwd", "flashinfer-python", "vllm"),
)
"""Packages that a result names the versions of, where they are installed."""
INPUTS = (".csv", ".jsonl")
"""Files named on the command line that are hashed: traces."""
STATE = "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_event_reasons.active"
"""MHz, MHz, W, degrees Celsius, and why clocks are lower than they might be: a bit mask, as in `nvidia-smi`."""


def environment(device: torch.device) -> dict[str, Any]:
    """Facts that are known before anything is measured."""
    inputs = [path for path in map(Path, sys.argv[1:]) if path.suffix in INPUTS and path.is_file()]
    facts: dict[str, Any] = code.environment(device) | {
        "packages": {name: found for name in PACKAGES if (found := version_of(name))},
        "inputs": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in inputs},
    }
    return facts | ({"gpus_before": _gpus()} if device.type == "cuda" else {})


def complete(result: dict[str, Any]) -> dict[str, Any]:
    """Add the facts that are known when all has been measured."""
    if "gpus_before" in result["environment"]:
        result["environment"]["gpus_after"] = _gpus()
    return result


def version_of(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpus() -> list[dict[str, str]]:
    """The state of each GPU, and its driver; nothing where `nvidia-smi` does not tell."""
    names = "driver_version", *STATE
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []
    return [dict(zip(names, line.split(", "))) for line in lines]
