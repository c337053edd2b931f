"""What a result file says of how its figures came about: code, machine, versions, inputs, and the state of GPUs."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from vmmkv import __version__
from vmmkv.driver.cuda import cuda_version

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
    facts: dict[str, Any] = {
        "device": f"cpu ({platform.machine()})",
        "vmmkv": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(Path(word).name if word.startswith("/") else word for word in sys.orig_argv),
        "packages": {name: found for name in PACKAGES if (found := version_of(name))},
        "inputs": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in inputs},
    }
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        facts |= {"device": name, "cuda_driver": cuda_version(), "gpus_before": _gpus()}
    return facts


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


def _commit() -> str:
    """The commit of this code, with `-dirty` if a Python file was changed since; `unknown` without a repository.
    `VMMKV_COMMIT` names it for a copy without its history."""
    root = Path(__file__).parent.parent
    told = os.environ.get("VMMKV_COMMIT")
    if told or not (root / ".git").exists():  # installed somewhere, perhaps within another repository
        return told or "unknown"
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        return f"{commit}-dirty" if _git(root, "diff", "--name-only", "HEAD", "--", "*.py") else commit
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout.strip()
