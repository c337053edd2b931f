"""What the allocator costs: growth against the raw driver calls, a batch step, adoption, torch's allocator.

    python -m benchmarks.allocator [--device cuda] [--rounds 100] [--json]

Figures are medians, with the tenth and the ninetieth of a hundred beside them; what is compared takes turns, in the
same run. By hand are as many calls, of the same sizes, as vmmkv makes, without a mapper, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import track

from benchmarks.environment import environment, print_result
from vmmkv import KVCache, KVLayout, Sequence
from vmmkv.cli.options import Device, JsonOutput
from vmmkv.cli.output import console, errors, make_table
from vmmkv.core.pool import LARGE
from vmmkv.driver.driver import Driver, open_driver

from .geometry import memory_of

BATCH = 256
TOKENS_PER_PAGE = 16
MOST_PAGES = 64
GROWTHS = ((1, False), (4, False), (16, False), (16, True), (MOST_PAGES, False), (MOST_PAGES, True))
"""Pages of a step, and whether large frames may lie under them."""


class RawCuda:
    """The CUDA driver's calls with nothing around them, on pages like the driver's own."""

    def __init__(self, driver: Any) -> None:
        import cuda.bindings.driver as cu

        self.cu, self.size = cu, driver.page_size
        self.property, self.access = driver.allocation, driver.access

    def create(self, pages: int) -> Any:
        return self.cu.cuMemCreate(self.size * pages, self.property, 0)[1]

    def map(self, address: int, handle: Any, pages: int) -> None:
        self.cu.cuMemMap(address, self.size * pages, 0, handle, 0)

    def set_access(self, address: int, nbytes: int, writable: bool = True) -> None:
        self.cu.cuMemSetAccess(address, nbytes, self.access[writable], 1)

    def unmap(self, address: int, nbytes: int) -> None:
        self.cu.cuMemUnmap(address, nbytes)

    def release(self, handle: Any) -> None:
        self.cu.cuMemRelease(handle)


def raw_calls(driver: Driver) -> Any:
    """What makes calls by hand."""
    return RawCuda(driver) if driver.device.type == "cuda" else driver


def microseconds(operation: Callable[..., Any], *args: Any) -> float:
    start = perf_counter_ns()
    operation(*args)
    return (perf_counter_ns() - start) / 1e3


def in_turns(ours: Callable[[], float], theirs: Callable[[], float], rounds: int) -> tuple[list[float], list[float]]:
    """What both took in each round; who comes first changes. A round before them is not counted."""
    took: tuple[list[float], list[float]] = [], []
    for number in range(rounds + 1):
        for which in (0, 1) if number % 2 else (1, 0):
            took[which].append((ours, theirs)[which]())
    return took[0][1:], took[1][1:]


def spread(name: str, values: list[float]) -> dict[str, float]:
    """A median, and where most of the values lie."""
    p10, p50, p90 = np.percentile(values, (10, 50, 90)).tolist()
    return {f"{name}_us": p50, f"{name}_p10_us": p10, f"{name}_p90_us": p90}


def make_cache(driver: Driver, pages: int, max_sequences: int = 2, large_frames: bool = False) -> KVCache:
    """A cache whose page holds 16 tokens, without a mapper."""
    head_dim = driver.page_size // TOKENS_PER_PAGE // (32 * 2 * 2)
    layout = KVLayout(num_layers=32, num_kv_heads=1, head_dim=head_dim, dtype=torch.bfloat16)
    return KVCache(
        layout,
        max_sequences,
        pages * TOKENS_PER_PAGE,
        max_bytes=pages * driver.page_size,
        **memory_of(driver),
        lookahead=0,
        large_frames=large_frames,
    )


def growth_onto_new_pages(driver: Driver, pages: int, large: bool, rounds: int) -> dict[str, Any]:
    """Microseconds a page: `extend` by `pages` pages until there are 64, and the same calls by hand."""
    cache = make_cache(driver, MOST_PAGES, large_frames=large)
    raw, frame = raw_calls(driver), LARGE if large else 1
    step, size, nbytes = pages * driver.page_size, frame * driver.page_size, MOST_PAGES * driver.page_size
    base = driver.reserve(nbytes)

    def grow(sequence: Sequence) -> None:
        for _ in range(MOST_PAGES // pages):
            sequence.extend(pages * TOKENS_PER_PAGE)

    def grow_by_hand(handles: list[Any]) -> None:
        for begin in range(base, base + nbytes, step):
            new = [raw.create(frame) for _ in range(0, step, size)]
            for address, handle in zip(range(begin, begin + step, size), new):
                raw.map(address, handle, frame)
            raw.set_access(begin, step)
            handles += new

    def ours() -> float:
        with cache.sequence() as sequence:
            took = microseconds(grow, sequence)
        cache.trim()
        return took / MOST_PAGES

    def theirs() -> float:
        handles: list[Any] = []
        took = microseconds(grow_by_hand, handles)
        raw.unmap(base, nbytes)
        for handle in handles:
            raw.release(handle)
        return took / MOST_PAGES

    took = in_turns(ours, theirs, rounds)
    driver.free(base, nbytes)
    return compared(pages, large, *took)


def growth_onto_reclaimed_pages(driver: Driver, pages: int, large: bool, rounds: int) -> dict[str, Any]:
    """Microseconds a page: `extend` that takes its pages from a parked row, and the same calls by hand."""
    cache = make_cache(driver, pages, large_frames=large)
    raw, frame = raw_calls(driver), LARGE if large else 1
    step, size = pages * driver.page_size, frame * driver.page_size
    places = [driver.reserve(step) for _ in range(2)]
    handles = [raw.create(frame) for _ in range(0, step, size)]

    def map_at(begin: int) -> None:
        for address, handle in zip(range(begin, begin + step, size), handles):
            raw.map(address, handle, frame)
        raw.set_access(begin, step)

    def by_hand() -> None:
        raw.unmap(places[0], step)
        map_at(places[1])

    def ours() -> float:
        gone, growing = cache.sequence(pages * TOKENS_PER_PAGE), cache.sequence()
        gone.free()
        driver.synchronize()
        took = microseconds(growing.extend, pages * TOKENS_PER_PAGE)
        growing.free()
        return took / pages

    def theirs() -> float:
        took = microseconds(by_hand)
        places.reverse()
        return took / pages

    map_at(places[0])
    took = in_turns(ours, theirs, rounds)
    raw.unmap(places[0], step)
    for handle in handles:
        raw.release(handle)
    for address in places:
        driver.free(address, step)
    return compared(pages, large, *took)


def compared(pages: int, large: bool, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    row = {"pages_a_step": pages, "large_frames": large} | spread("extend", ours) | spread("raw", theirs)
    return row | {"ratio": row["extend_us"] / row["raw_us"]}


def batch_step(driver: Driver, crossing: int, rounds: int) -> dict[str, Any]:
    """Microseconds of one decode step over 256 sequences, of which `crossing` need a page, and of the same
    driver calls by hand."""
    cache = make_cache(driver, BATCH * 4, BATCH)
    raw = raw_calls(driver)
    stride = 4 * driver.page_size
    base = driver.reserve(BATCH * stride)

    def grow_by_hand(handles: list[Any]) -> None:
        for _ in range(crossing):
            handles.append(raw.create(1))
        for index, handle in enumerate(handles):
            raw.map(base + index * stride, handle, 1)
            raw.set_access(base + index * stride, driver.page_size)

    def ours() -> float:
        sequences = [cache.sequence(TOKENS_PER_PAGE - 3 if index < crossing else 1) for index in range(BATCH)]
        batch = cache.batch(sequences)
        for _ in range(3):  # warm, as in a decode loop
            batch.extend(1)
        took = microseconds(batch.extend, 1)
        cache.free(sequences)
        cache.trim()
        return took

    def theirs() -> float:
        handles: list[Any] = []
        took = microseconds(grow_by_hand, handles)
        for index, handle in enumerate(handles):
            raw.unmap(base + index * stride, driver.page_size)
            raw.release(handle)
        return took

    took = in_turns(ours, theirs, rounds)
    driver.free(base, BATCH * stride)
    row: dict[str, Any] = {"crossing": crossing} | spread("step", took[0]) | spread("raw", took[1])
    return row | {"ratio": row["step_us"] / row["raw_us"] if crossing else None}


def free_and_adopt(driver: Driver, pages: int, rounds: int) -> dict[str, Any]:
    """Microseconds to free a sequence and to start one of the same length on its row; and driver calls."""
    cache = make_cache(driver, pages * 2)
    sequence = cache.sequence(pages * TOKENS_PER_PAGE)
    before = driver_calls(cache)
    frees, adoptions = [], []
    for _ in range(rounds):
        frees.append(microseconds(sequence.free))
        start = perf_counter_ns()
        sequence = cache.sequence(pages * TOKENS_PER_PAGE)
        adoptions.append((perf_counter_ns() - start) / 1e3)
    return {
        "pages": pages,
        **spread("free", frees),
        **spread("adopt", adoptions),
        "driver_calls": driver_calls(cache) - before,
    }


def driver_calls(cache: KVCache) -> int:
    return sum(call.count for call in cache.stats().driver_calls.values())


def torch_empty(driver: Driver, pages: int, rounds: int) -> dict[str, Any]:
    """Microseconds for a tensor of as many bytes: from the system, and from torch's caching allocator.

    On the host the system only promises the memory; what it costs comes with the first write.
    """

    def allocate(kept: list[torch.Tensor]) -> None:
        kept.append(torch.empty(pages * driver.page_size, dtype=torch.uint8, device=driver.device))

    fresh, cached = [], []
    for _ in range(rounds):
        if driver.device.type == "cuda":
            torch.cuda.empty_cache()
        kept: list[torch.Tensor] = []
        fresh.append(microseconds(allocate, kept))
        kept.clear()
        cached.append(microseconds(allocate, kept))
        kept.clear()
    return {"pages": pages} | spread("fresh", fresh) | spread("cached", cached)


def main(
    device: Device = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of each figure.")] = 100,
    json_output: JsonOutput = False,
) -> None:
    """Measure what the allocator costs."""
    driver = open_driver(device)
    sizes = (1, 4, 16, MOST_PAGES)
    work: list[tuple[str, Callable[..., dict[str, Any]], tuple[Any, ...]]] = [
        *(("growth_new", growth_onto_new_pages, growth) for growth in GROWTHS),
        *(("growth_reclaimed", growth_onto_reclaimed_pages, growth) for growth in GROWTHS),
        *(("batch_step", batch_step, (crossing,)) for crossing in (0, 1, BATCH // TOKENS_PER_PAGE, BATCH)),
        *(("adoption", free_and_adopt, (pages,)) for pages in sizes),
        *(("torch_empty", torch_empty, (pages,)) for pages in sizes),
    ]
    result: dict[str, Any] = {"environment": environment(driver.device), "rounds": rounds}
    for name, measure, args in track(work, "Measuring", console=errors, transient=True, disable=not errors.is_terminal):
        result.setdefault(name, []).append(measure(driver, *args, rounds))
    if json_output:
        print_result(result)
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
