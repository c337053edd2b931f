"""The geometry of benchmarks: Llama-3.1-8B's on a GPU, a small one on the host; a page holds 16 tokens of either."""

from __future__ import annotations

import gc
from typing import Any

import torch

from vmmkv import KVCache, KVLayout
from vmmkv.driver.driver import Driver, open_driver

LAYOUT = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
SMALL = KVLayout(num_layers=2, num_kv_heads=2, head_dim=64, dtype=torch.float32)


def layout_on(on_gpu: bool) -> KVLayout:
    """The layout of a token."""
    return LAYOUT if on_gpu else SMALL


def open_geometry(device: str | None) -> tuple[Driver, KVLayout]:
    """A memory system, and the layout of a token, of which 16 fill a page."""
    driver = open_driver(device)
    if driver.device.type == "cpu":
        driver = open_driver(device, 16 * SMALL.token_bytes)
    return driver, layout_on(driver.device.type == "cuda")


def memory_of(driver: Driver) -> dict[str, Any]:
    """Arguments that give a cache a memory system like this one."""
    return {"device": driver.device, "page_size": driver.page_size}


def calls_of(cache: KVCache) -> dict[str, int]:
    """By name, the driver calls so far."""
    return {name: call.count for name, call in cache.stats().driver_calls.items()}


def calls_since(cache: KVCache, before: dict[str, int]) -> dict[str, int]:
    """By name, the driver calls since `calls_of` returned `before`."""
    counts = {name: count - before.get(name, 0) for name, count in calls_of(cache).items()}
    return {name: count for name, count in counts.items() if count}


def free_memory() -> None:
    """Give unused memory of torch back to the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait for all work of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
