"""The command `vmmkv info`: what this machine's memory system can do."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from ..driver.driver import Driver, open_driver
from .output import Device, JsonOutput, console, format_bytes, make_table, print_json


def info(device: Device = None, json_output: JsonOutput = False) -> None:
    """Say what this machine's memory system can do."""
    driver = open_driver(device)
    free, total = driver.memory_info()
    facts = {
        "device": str(driver.device),
        "cuda_device_seen": torch.cuda.is_available(),
        "torch": torch.__version__,
        **_facts(driver),
        "granularity_size": driver.granularity,
        "page_size": driver.page_size,
        "free_bytes": free,
        "total_bytes": total,
    }
    if json_output:
        print_json(facts)
        return
    console.print(
        make_table("Memory system", ("what", "value"), [(name, _format(name, facts[name])) for name in facts])
    )
    if not facts["cuda_device_seen"]:
        console.print("No CUDA device was seen: this is the host driver, the same behaviour on ordinary memory.")


def _facts(driver: Driver) -> dict[str, Any]:
    """What only one kind of memory systems has."""
    if driver.device.type == "cpu":
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        return {"kind": "host", "name": platform.processor() or platform.machine(), "max_map_count": limit}
    from ..driver.cuda import CudaDriver, cuda_version

    assert isinstance(driver, CudaDriver)
    name = torch.cuda.get_device_name(driver.device)
    return {"kind": "cuda", "name": name, "cuda_driver": cuda_version(), **driver.features}


def _format(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_bytes(value) if name.endswith(("_bytes", "_size")) else str(value)
