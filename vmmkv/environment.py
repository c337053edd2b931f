"""The environment of a measurement, which every result file has."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from . import __version__


def environment(device: torch.device) -> dict[str, str]:
    """Device, versions, date and command."""
    facts = {
        "device": f"cpu ({platform.machine()})",
        "vmmkv": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(Path(word).name if word.startswith("/") else word for word in sys.orig_argv),
    }
    if device.type == "cuda":
        from .driver.cuda import cuda_version

        facts |= {"device": torch.cuda.get_device_name(device), "cuda_driver": cuda_version()}
    return facts


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
