"""The command `vmmkv info`: what this machine's memory system can do, and what a page costs on it."""

from __future__ import annotations

import platform
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Annotated, Any

import torch
import typer

from ..core.pool import LARGE
from ..driver.driver import Driver, open_driver
from .options import JsonOutput
from .output import console, format_bytes, make_table, print_json

FRAMES = {1: 64, LARGE: 8}
"""How many frames are tried, by the pages of one: 128 MiB of single pages, and 256 MiB of large ones."""
PAGE_LIFE = {
    "create": "take its memory from the system",
    "map": "put it under an address",
    "set_access": "let it be read and written",
    "unmap": "take it away from the address",
    "release": "give its memory back",
}


def info(
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1 or cpu; cuda where there is a GPU.")] = None,
    json_output: JsonOutput = False,
) -> None:
    """Say what this machine's memory system can do, and what a page costs on it: alone, and as part of a large frame.

    Takes up to 256 MiB for a moment.
    """
    driver = open_driver(device)
    free, total = driver.memory_info()
    facts = {
        "device": str(driver.device),
        "cuda_device_seen": torch.cuda.is_available(),
        "torch": torch.__version__,
        **(_cuda_facts(driver) if driver.device.type == "cuda" else _host_facts()),
        "granularity_size": driver.granularity,
        "page_size": driver.page_size,
        "free_bytes": free,
        "total_bytes": total,
    }
    page_life = {pages: measure_page_life(driver, pages, count) for pages, count in FRAMES.items()}
    if json_output:
        print_json({**facts, "page_life_us": page_life})
        return
    console.print(
        make_table("Memory system", ("what", "value"), [(name, _format(name, facts[name])) for name in facts])
    )
    if not facts["cuda_device_seen"]:
        console.print("No CUDA device was seen: this is the host driver, the same behaviour on ordinary memory.")
    lives = page_life.values()
    console.print(
        make_table(
            f"Microseconds for a page of {format_bytes(driver.page_size)}, medians",
            ("what", "frames of one page", f"of {LARGE} pages"),
            [
                *((f"{call}: {what}", *(f"{life[call]:.1f}" for life in lives)) for call, what in PAGE_LIFE.items()),
                ("all of these", *(f"{sum(life.values()):.1f}" for life in lives)),
            ],
        )
    )


def measure_page_life(driver: Driver, pages: int, count: int) -> dict[str, float]:
    """Microseconds of each call in a frame's life, for each of its pages: medians of so many frames."""
    times: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, *args: Any) -> Any:
        call = getattr(driver, name)
        start = perf_counter_ns()
        result = call(*args)
        times[name].append((perf_counter_ns() - start) / 1e3)
        return result

    size = pages * driver.page_size
    # The second half of a frame's life is what undoes the first: also where a call fails half way.
    with ExitStack() as undo:
        base = driver.reserve(count * size)
        undo.callback(driver.free, base, count * size)
        for address in range(base, base + count * size, size):
            frame = timed("create", pages)
            undo.callback(timed, "release", frame)
            timed("map", address, frame, pages)
            undo.callback(timed, "unmap", address, size)
            timed("set_access", address, size)
    return {call: median(times[call]) / pages for call in PAGE_LIFE}


def _cuda_facts(driver: Driver) -> dict[str, Any]:
    from ..driver.cuda import CudaDriver, cuda_version

    assert isinstance(driver, CudaDriver)
    name = torch.cuda.get_device_name(driver.device)
    return {"kind": "cuda", "name": name, "cuda_driver": cuda_version(), **driver.features}


def _host_facts() -> dict[str, Any]:
    return {
        "kind": "host",
        "name": platform.processor() or platform.machine(),
        "max_map_count": int(Path("/proc/sys/vm/max_map_count").read_text()),
    }


def _format(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_bytes(value) if name.endswith(("_bytes", "_size")) else str(value)
