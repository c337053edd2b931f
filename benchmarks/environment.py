"""What a result file says of how its figures came about: code, machine, versions, inputs, and the state of GPUs."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from vmmkv import environment as code
from vmmkv.cli.output import print_json

PACKAGES = (
    *("numpy", "numba", "numba-cuda", "cuda-bindings", "cuda-core", "triton", "transformers"),
    *("fa3-fwd", "flashinfer-python", "vllm"),
)
"""Whose versions matter, where they are installed."""
INPUTS = (".csv", ".jsonl")
"""Files named on the command line that are hashed: traces."""
STATE = "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_event_reasons.active"
"""MHz, MHz, W, degrees Celsius, and why clocks are lower than they might be: a bit mask, as in `nvidia-smi`."""


def environment(device: torch.device) -> dict[str, Any]:
    """What is known before anything is measured."""
    inputs = [path for path in map(Path, sys.argv[1:]) if path.suffix in INPUTS and path.is_file()]
    facts: dict[str, Any] = code.environment(device) | {
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "inputs": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in inputs},
    }
    return facts | ({"gpus_before": _gpus()} if device.type == "cuda" else {})


def complete(result: dict[str, Any]) -> dict[str, Any]:
    """A result, with what is known when all has been measured."""
    if "gpus_before" in result["environment"]:
        result["environment"]["gpus_after"] = _gpus()
    return result


def to_json(result: dict[str, Any]) -> str:
    """A result as JSON, with lists of numbers each on one line."""
    return re.sub(r"\[[\d\s.,eE+\-\[\]]+\]", lambda found: "".join(found[0].split()), json.dumps(result, indent=2))


def print_result(result: dict[str, Any]) -> None:
    """Prints a result as JSON."""
    print_json(complete(result))


def _version(package: str) -> str | None:
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
