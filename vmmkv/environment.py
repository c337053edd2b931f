"""Where and with what a figure was measured: what every result file says of itself."""

from __future__ import annotations

import platform
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
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(Path(word).name if word.startswith("/") else word for word in sys.orig_argv),
    }
    if device.type == "cuda":
        from .memory.driver.cuda import cuda_version

        facts |= {"device": torch.cuda.get_device_name(device), "cuda_driver": cuda_version()}
    return facts
