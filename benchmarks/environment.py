"""Where and with what a figure was measured: what every result file says of itself."""

from __future__ import annotations

import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch

from vmmkv.driver import Driver


def environment(driver: Driver) -> dict[str, Any]:
    """Device, versions, date and command."""
    on_gpu = driver.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(driver.device) if on_gpu else f"cpu ({platform.machine()})",
        "cuda_driver": getattr(driver, "cuda_version", None),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda_bindings": version("cuda-bindings") if on_gpu else None,
        "page_size": driver.page_size,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", __package__ + "." + sys.argv[0].rsplit("/", 1)[-1][:-3], *sys.argv[1:]]),
    }
