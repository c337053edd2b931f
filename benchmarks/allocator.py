"""What the allocator costs: growth against the raw driver calls, a batch step, adoption, torch's allocator.

    python -m benchmarks.allocator [--device cuda] [--json]

Each figure is a median; what is compared is measured in turn, in the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch
import typer
from rich.progress import track

from vmmkv import KVCache, KVLayout, Sequence
from vmmkv.cli.options import Device, JsonOutput
from vmmkv.cli.output import console, errors, make_table, print_json
from vmmkv.environment import environment
from vmmkv.memory.driver import Driver, open_driver

ROUNDS = 50
BATCH = 256
TOKENS_PER_PAGE = 16
MOST_PAGES = 64


class RawCuda:
    """The CUDA driver's calls with nothing around them, on pages like the driver's own."""

    def __init__(self, driver: Any) -> None:
        import cuda.bindings.driver as cu

        self.cu, self.size = cu, driver.page_size
        self.property, self.access = driver._property, driver._access[True]

    def create(self) -> Any:
        return self.cu.cuMemCreate(self.size, self.property, 0)[1]

    def map(self, address: int, handle: Any) -> None:
        self.cu.cuMemMap(address, self.size, 0, handle, 0)

    def set_access(self, address: int, nbytes: int) -> None:
        self.cu.cuMemSetAccess(address, nbytes, self.access, 1)

    def unmap(self, address: int, nbytes: int) -> None:
        self.cu.cuMemUnmap(address, nbytes)

    def release(self, handle: Any) -> None:
        self.cu.cuMemRelease(handle)


def microseconds(operation: Callable[..., Any], *args: Any) -> float:
    start = perf_counter_ns()
    operation(*args)
    return (perf_counter_ns() - start) / 1e3


def make_cache(driver: Driver, pages: int, max_sequences: int = 2) -> KVCache:
    """A cache whose page holds 16 tokens."""
    head_dim = driver.page_size // TOKENS_PER_PAGE // (32 * 2 * 2)
    layout = KVLayout(num_layers=32, num_kv_heads=1, head_dim=head_dim, dtype=torch.bfloat16)
    budget = pages * driver.page_size
    return KVCache(layout, max_sequences, pages * TOKENS_PER_PAGE, max_bytes=budget, driver=driver, lookahead=0)


def growth_onto_new_pages(driver: Driver, pages: int) -> dict[str, float]:
    """Microseconds a page: `extend` by `pages` pages until there are 64, and the same calls by hand."""
    cache = make_cache(driver, MOST_PAGES)
    raw = RawCuda(driver) if driver.device.type == "cuda" else driver
    nbytes = MOST_PAGES * driver.page_size
    base = driver.reserve(nbytes)
    ours, theirs = [], []

    def grow(sequence: Sequence) -> None:
        for _ in range(MOST_PAGES // pages):
            sequence.extend(pages * TOKENS_PER_PAGE)

    def grow_by_hand(handles: list[Any]) -> None:
        for address in range(base, base + nbytes, pages * driver.page_size):
            for _ in range(pages):
                handles.append(raw.create())
            for index in range(pages):
                raw.map(address + index * driver.page_size, handles[index - pages])
            raw.set_access(address, pages * driver.page_size)

    for _ in range(ROUNDS):
        with cache.sequence() as sequence:
            ours.append(microseconds(grow, sequence))
        cache.trim()
        handles: list[Any] = []
        theirs.append(microseconds(grow_by_hand, handles))
        raw.unmap(base, nbytes)
        for handle in handles:
            raw.release(handle)
    driver.free(base, nbytes)
    return compared(pages, ours, theirs, MOST_PAGES)


def growth_onto_reclaimed_pages(driver: Driver, pages: int) -> dict[str, float]:
    """Microseconds a page: `extend` that takes its pages from a parked row, and the same calls by hand."""
    cache = make_cache(driver, pages)
    raw = RawCuda(driver) if driver.device.type == "cuda" else driver
    size = pages * driver.page_size
    source, target = (driver.reserve(size) for _ in range(2))
    handles = [raw.create() for _ in range(pages)]
    for index, handle in enumerate(handles):
        raw.map(source + index * driver.page_size, handle)
    ours, theirs = [], []

    def by_hand() -> None:
        raw.unmap(source, size)
        for index, handle in enumerate(handles):
            raw.map(target + index * driver.page_size, handle)
        raw.set_access(target, size)

    for _ in range(ROUNDS):
        gone, growing = cache.sequence(pages * TOKENS_PER_PAGE), cache.sequence()
        gone.free()
        driver.synchronize()
        ours.append(microseconds(growing.extend, pages * TOKENS_PER_PAGE))
        growing.free()
        theirs.append(microseconds(by_hand))
        source, target = target, source
    raw.unmap(source, size)
    for handle in handles:
        raw.release(handle)
    for address in (source, target):
        driver.free(address, size)
    return compared(pages, ours, theirs, pages)


def compared(step: int, ours: list[float], theirs: list[float], pages: int) -> dict[str, float]:
    a, b = median(ours) / pages, median(theirs) / pages
    return {"pages_a_step": step, "extend_us": a, "raw_us": b, "ratio": a / b}


def batch_step(driver: Driver, crossing: int) -> dict[str, float | None]:
    """Microseconds of one decode step over 256 sequences, of which `crossing` need a page, and of the same
    driver calls by hand."""
    cache = make_cache(driver, BATCH * 4, BATCH)
    raw = RawCuda(driver) if driver.device.type == "cuda" else driver
    stride = 4 * driver.page_size
    base = driver.reserve(BATCH * stride)
    ours, theirs = [], []

    def grow_by_hand(handles: list[Any]) -> None:
        for _ in range(crossing):
            handles.append(raw.create())
        for index, handle in enumerate(handles):
            raw.map(base + index * stride, handle)
            raw.set_access(base + index * stride, driver.page_size)

    for _ in range(ROUNDS):
        sequences = [cache.sequence(TOKENS_PER_PAGE - 3 if index < crossing else 1) for index in range(BATCH)]
        for _ in range(3):  # warm, as in a decode loop
            cache.extend(sequences, 1)
        ours.append(microseconds(cache.extend, sequences, 1))
        cache.free(sequences)
        cache.trim()
        handles: list[Any] = []
        theirs.append(microseconds(grow_by_hand, handles))
        for index, handle in enumerate(handles):
            raw.unmap(base + index * stride, driver.page_size)
            raw.release(handle)
    driver.free(base, BATCH * stride)
    a, b = median(ours), median(theirs)
    return {"crossing": crossing, "step_us": a, "raw_us": b, "ratio": a / b if crossing else None}


def free_and_adopt(driver: Driver, pages: int) -> dict[str, float]:
    """Microseconds to free a sequence and to start one of the same length on its row; and driver calls."""
    cache = make_cache(driver, pages * 2)
    sequence = cache.sequence(pages * TOKENS_PER_PAGE)
    before = driver_calls(cache)
    frees, adoptions = [], []
    for _ in range(ROUNDS):
        frees.append(microseconds(sequence.free))
        start = perf_counter_ns()
        sequence = cache.sequence(pages * TOKENS_PER_PAGE)
        adoptions.append((perf_counter_ns() - start) / 1e3)
    return {
        "pages": pages,
        "free_us": median(frees),
        "adopt_us": median(adoptions),
        "driver_calls": driver_calls(cache) - before,
    }


def driver_calls(cache: KVCache) -> int:
    return sum(call.count for call in cache.stats().driver_calls.values())


def torch_empty(driver: Driver, pages: int) -> dict[str, float]:
    """Microseconds for a tensor of as many bytes: from the system, and from torch's caching allocator.

    On the host the system only promises the memory; what it costs comes with the first write.
    """

    def allocate(kept: list[torch.Tensor]) -> None:
        kept.append(torch.empty(pages * driver.page_size, dtype=torch.uint8, device=driver.device))

    fresh, cached = [], []
    for _ in range(ROUNDS):
        if driver.device.type == "cuda":
            torch.cuda.empty_cache()
        kept: list[torch.Tensor] = []
        fresh.append(microseconds(allocate, kept))
        kept.clear()
        cached.append(microseconds(allocate, kept))
        kept.clear()
    return {"pages": pages, "fresh_us": median(fresh), "cached_us": median(cached)}


def main(
    device: Device = None,
    json_output: JsonOutput = False,
) -> None:
    """Measure what the allocator costs."""
    driver = open_driver(device)
    sizes = (1, 4, 16, MOST_PAGES)
    work: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        *(("growth_new", lambda n=n: growth_onto_new_pages(driver, n)) for n in sizes),
        *(("growth_reclaimed", lambda n=n: growth_onto_reclaimed_pages(driver, n)) for n in sizes),
        *(("batch_step", lambda n=n: batch_step(driver, n)) for n in (0, 1, BATCH // TOKENS_PER_PAGE, BATCH)),
        *(("adoption", lambda n=n: free_and_adopt(driver, n)) for n in sizes),
        *(("torch_empty", lambda n=n: torch_empty(driver, n)) for n in sizes),
    ]
    result: dict[str, Any] = {"environment": environment(driver.device)}
    for name, measure in track(work, "Measuring", console=errors, transient=True, disable=not errors.is_terminal):
        result.setdefault(name, []).append(measure())
    if json_output:
        print_json(result)
    else:
        show(result)


def show(result: dict[str, Any]) -> None:
    """Prints one table per part."""
    titles = {
        "growth_new": "extend onto new pages, µs a page",
        "growth_reclaimed": "extend onto pages of a parked row, µs a page",
        "batch_step": "one decode step over 256 sequences, µs",
        "adoption": "free, and a new sequence on the parked row, µs",
        "torch_empty": "torch.empty of as many bytes, µs",
    }
    for name, title in titles.items():
        rows = [
            [f"{value:.2f}" if isinstance(value, float) else value for value in row.values()] for row in result[name]
        ]
        console.print(make_table(title, result[name][0], rows))


if __name__ == "__main__":
    typer.run(main)
