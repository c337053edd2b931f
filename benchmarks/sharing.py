"""What it takes to fork a prompt, and what its samples share.

    python -m benchmarks.sharing [--device cuda] [--tokens 8192] [--samples 64] [--new-tokens 256] [--json]

Forking: the host's time for it, the part that the driver's calls take, and the same calls made by hand, in turns; of a
prompt that fills its pages, of which all is shared, and of one that is a few tokens shorter, whose end is copied.
Kernels: how long a queue of them takes, and a launch, while somebody forks and frees all the time. Samples: the pages
that all continuations of a prompt use, against the prompt's once and theirs, and against separate sequences.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import track

from benchmarks.environment import environment, print_result
from vmmkv import SHARED_PAGE, KVCache, KVLayout, Sequence
from vmmkv.cli.options import Device, JsonOutput
from vmmkv.cli.output import console, errors, format_bytes, make_table
from vmmkv.core.pool import LARGE
from vmmkv.driver.driver import Driver

from .allocator import in_turns, microseconds, raw_calls, spread
from .geometry import LAYOUT, memory_of, open_geometry

Row = dict[str, Any]
FRAMES = {True: "large frames", False: "single pages"}
SHORTER = 7
"""Tokens that the second prompt has less than the first."""
QUEUE = 500
"""Kernels that wait in a queue on a GPU."""


def make_cache(driver: Driver, layout: KVLayout, tokens: int, sequences: int, own: int, large: bool) -> KVCache:
    """A cache without a mapper, for a prompt and sequences that have so many pages of their own beside it."""
    budget = (layout.pages(tokens, driver.page_size) + sequences * (own + LARGE)) * driver.page_size
    options: Row = {**memory_of(driver), "lookahead": 0, "large_frames": large}
    return KVCache(layout, sequences, tokens, max_bytes=budget, **options)


# ------------------------------------------------------------------ forking


def forking(driver: Driver, layout: KVLayout, tokens: int, count: int, large: bool, rounds: int) -> Row:
    """Microseconds to fork a prompt so many times at once, and of the same driver calls by hand; all memory is made
    anew in each round."""
    figures: list[Row] = []
    with make_cache(driver, layout, tokens, count + 1, LARGE, large) as cache:

        def ours() -> float:
            prompt, children = cache.sequence(tokens), list[Sequence]()
            content = fill(prompt)
            driver.synchronize()
            before, seconds = calls_of(cache), cache.stats().driver_seconds
            took = microseconds(lambda: children.extend(cache.fork_many(prompt, count)))
            figures.append(
                {
                    "driver_us": (cache.stats().driver_seconds - seconds) * 1e6,
                    "calls": calls_since(cache, before),
                    "shared": frames_of(cache, SHARED_PAGE),
                    "own": frames_of(cache, children[-1].number),
                }
            )
            check(children[-1], content)
            cache.free([prompt, *children])
            driver.synchronize()
            cache.trim()
            return took

        ours()
        shared, own = figures[0]["shared"], figures[0]["own"]
        copied = tokens * layout.token_bytes - sum(shared) * driver.page_size
        with by_hand(driver, shared, own, copied, count) as theirs:
            took = in_turns(ours, theirs, rounds)
        cache.check()
    row = {"tokens": tokens, "large_frames": large, "forks": count, "calls": figures[0]["calls"]}
    row |= {"pages_shared": sum(shared), "pages_of_a_fork": sum(own), "bytes_copied": copied}
    row |= spread("fork", took[0]) | spread("driver", [each["driver_us"] for each in figures[2:]])
    row |= spread("raw", took[1])
    return row | {"ratio": row["fork_us"] / row["raw_us"]}


def calls_of(cache: KVCache) -> dict[str, int]:
    return {name: call.count for name, call in cache.stats().driver_calls.items()}


def calls_since(cache: KVCache, before: dict[str, int]) -> dict[str, int]:
    """How often each call was made since it had been made so often."""
    counts = {name: count - before.get(name, 0) for name, count in calls_of(cache).items()}
    return {name: count for name, count in counts.items() if count}


def fill(sequence: Sequence) -> torch.Tensor:
    """Writes random K of one layer; returns it."""
    k = sequence.k(0)
    k.copy_(torch.randn(k.shape, device=k.device))
    return k.clone()


def check(sequence: Sequence, content: torch.Tensor) -> None:
    """That a sequence begins with K of a prompt."""
    assert torch.equal(sequence.k(0)[: len(content)], content)


def frames_of(cache: KVCache, owner: int) -> list[int]:
    """Of the frames that the page map says to be somebody's, how many pages each has."""
    owners = cache.page_map()
    pages = cache.pool.frames["pages"][: cache.pool.word("fresh")]
    sizes = pages[owners[np.cumsum(pages) - 1] == owner]
    return sorted(sizes.tolist(), reverse=True)


@contextmanager
def by_hand(
    driver: Driver, shared: list[int], own: list[int], copied: int, count: int
) -> Iterator[Callable[[], float]]:
    """What forks a prompt without any books: frames of these sizes are mapped once more, others are made, and what is
    in the last ones is copied. Returns its microseconds."""
    raw, size = raw_calls(driver), driver.page_size
    split, stride = sum(shared) * size, (sum(shared) + sum(own)) * size
    base = driver.reserve(stride * (count + 1))  # the prompt's row comes first
    prompt = [raw.create(pages) for pages in [*shared, *own]]
    rows = range(base + stride, base + stride * (count + 1), stride)

    def put(address: int, handles: list[Any], sizes: list[int]) -> None:
        for handle, pages in zip(handles, sizes):
            raw.map(address, handle, pages)
            address += pages * size

    def fork(made: list[Any]) -> None:
        for row in rows:
            if shared:
                put(row, prompt, shared)
                raw.set_access(row, split, False)
            if own:
                frames = [raw.create(pages) for pages in own]
                made += frames
                put(row + split, frames, own)
                raw.set_access(row + split, stride - split)
            if copied:
                driver.copy(row + split, base + split, copied)

    def theirs() -> float:
        made: list[Any] = []
        took = microseconds(fork, made)
        driver.synchronize()
        raw.unmap(rows.start, stride * count)
        for handle in made:
            raw.release(handle)
        return took

    put(base, prompt, [*shared, *own])
    raw.set_access(base, stride)
    yield theirs
    raw.unmap(base, stride)
    for handle in prompt:
        raw.release(handle)
    driver.free(base, stride * (count + 1))


# ------------------------------------------------------------------ kernels meanwhile


def kernels(driver: Driver, layout: KVLayout, tokens: int, launches: int, rounds: int) -> Row:
    """Microseconds from a launch of a small kernel until it is done, and milliseconds of a queue of kernels on a
    stream of its own: alone, and while forks of a prompt come and go."""
    found: dict[str, list[float]] = {}
    with make_cache(driver, layout, tokens, 9, LARGE, large=True) as cache:
        prompt = cache.sequence(tokens)
        forks = 0

        def fork() -> None:
            nonlocal forks
            cache.free(cache.fork_many(prompt, 1))
            forks += 1

        for number in range(rounds + 1):
            for name, meanwhile in (("alone", None), ("beside", fork))[:: -1 if number % 2 else 1]:
                with repeating(meanwhile):
                    launch = launch_us(driver, launches)
                queue = queue_ms(driver, meanwhile) if driver.device.type == "cuda" else None
                if number:  # a round before them is not counted
                    found.setdefault(f"launch_us_{name}", []).append(launch)
                    found.setdefault(f"queue_ms_{name}", []).extend([queue] if queue is not None else [])
        cache.check()
    return {name: median(values) for name, values in found.items() if values} | {"forks": forks}


@contextmanager
def repeating(work: Callable[[], None] | None) -> Iterator[None]:
    """A thread that works all the time, at least once; without work there is none."""
    stop, failures = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            while work:
                work()
                if stop.is_set():
                    return
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]


def launch_us(driver: Driver, launches: int) -> float:
    """The median of so many launches, each waited for."""
    x = torch.zeros(16, device=driver.device)
    stream = torch.cuda.Stream(driver.device) if driver.device.type == "cuda" else None

    def launch() -> None:
        x.add_(1)
        if stream:
            stream.synchronize()

    with torch.cuda.stream(stream):
        return median(microseconds(launch) for _ in range(launches))


def queue_ms(driver: Driver, meanwhile: Callable[[], None] | None) -> float:
    """How long the device takes for kernels that wait on a stream of their own, while the host does something."""
    x = torch.zeros(64 << 20, device=driver.device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    driver.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(driver.device)):
        start.record()
        for _ in range(QUEUE):
            x.add_(1)
        end.record()
    while not end.query():
        if meanwhile:
            meanwhile()
    return start.elapsed_time(end)


# ------------------------------------------------------------------ samples of one prompt


def sampling(driver: Driver, layout: KVLayout, tokens: int, samples: int, new_tokens: int, large: bool) -> Row:
    """Pages of so many continuations of a prompt, one of which is the prompt's own sequence."""
    size, most = driver.page_size, tokens + new_tokens
    separate, full = layout.pages(most, size), tokens * layout.token_bytes // size
    own = separate - full  # from the first page on that the prompt does not fill
    with make_cache(driver, layout, most, samples, own, large) as cache:
        prompt = cache.sequence(tokens)
        content = fill(prompt)
        batch = [prompt, *cache.fork_many(prompt, samples - 1)]
        forked = cache.stats().pages["used"]
        start = perf_counter()
        for _ in range(new_tokens):
            cache.extend(batch, 1)
        seconds = perf_counter() - start
        used, shared = cache.stats().pages["used"], int((cache.page_map() == SHARED_PAGE).sum())
        for number, sample in enumerate(batch):
            sample.k(0)[tokens:] = number
        for sample in batch:
            check(sample, content)
        cache.check()
    return {
        "tokens": tokens,
        "large_frames": large,
        "samples": samples,
        "new_tokens": new_tokens,
        "page_size": size,
        "pages_when_forked": forked,
        "pages": used,
        "pages_shared": shared,
        "pages_once_and_own": full + samples * own,
        "pages_separate": samples * separate,
        "extend_ms_a_step": seconds / new_tokens * 1e3,
    }


# ------------------------------------------------------------------ the whole


def main(
    device: Device = None,
    tokens: Annotated[int | None, typer.Option(min=SHORTER + 1, help="Of the prompt: 8,192, or 512 on a CPU.")] = None,
    samples: Annotated[int, typer.Option(min=2, help="Of the prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, help="Of each sample.")] = 256,
    launches: Annotated[int, typer.Option(min=1, help="Of small kernels, in a round.")] = 2000,
    rounds: Annotated[int, typer.Option(min=1, help="Of each figure.")] = 20,
    json_output: JsonOutput = False,
) -> None:
    """Measure forks."""
    driver, layout = open_geometry(device)
    tokens = tokens or (8192 if layout is LAYOUT else 512)
    prompts = [(length, large) for large in FRAMES for length in (tokens, tokens - SHORTER)]
    cases = [(*prompt, count) for prompt in prompts for count in (1, samples)]
    result: Row = {"environment": environment(driver.device), "rounds": rounds, "token_bytes": layout.token_bytes}
    result["forking"] = [
        forking(driver, layout, length, count, large, rounds)
        for length, large, count in track(cases, "Forking", console=errors, disable=not errors.is_terminal)
    ]
    result["kernels"] = kernels(driver, layout, tokens, launches, rounds)
    result["sampling"] = [sampling(driver, layout, length, samples, new_tokens, large) for length, large in prompts]
    if json_output:
        print_result(result)
    else:
        show(result)


def show(result: Row) -> None:
    """Prints a table for each part."""
    device = result["environment"]["device"]
    for title, table in (
        (f"Forking a prompt, host time, {device}", fork_table),
        ("Kernels, alone and while forks come and go", kernel_table),
        ("Pages of samples of one prompt", sample_table),
    ):
        console.print(make_table(title, *table(result)))


Lines = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Columns of a table, and its rows."""


def fork_table(result: Row) -> Lines:
    """A line for each prompt and number of forks; what is shared, and copied, is of one fork."""
    columns = "prompt", "forks", "µs", "driver's part", "by hand", "ratio", "calls", "shared", "copied"
    return columns, [
        (
            prompt(row),
            f"{row['forks']}",
            *(f"{row[name]:,.0f}" for name in ("fork_us", "driver_us", "raw_us")),
            f"{row['ratio']:.2f}",
            f"{sum(row['calls'].values()):,}",
            f"{row['pages_shared']:,} pages",
            format_bytes(row["bytes_copied"]),
        )
        for row in result["forking"]
    ]


def kernel_table(result: Row) -> Lines:
    """A line for launches, and one for a queue where there was one."""
    names = {"launch_us": "a launch until it is done, µs", "queue_ms": f"a queue of {QUEUE} kernels, ms"}
    found = result["kernels"]
    return ("", "alone", "beside forks"), [
        (what, f"{found[f'{name}_alone']:.2f}", f"{found[f'{name}_beside']:.2f}")
        for name, what in names.items()
        if f"{name}_alone" in found
    ]


def sample_table(result: Row) -> Lines:
    """A line for each prompt."""
    columns = "prompt", "samples, new tokens", "memory used", "prompt once, and own", "separate"
    memory = "pages", "pages_once_and_own", "pages_separate"
    return columns, [
        (
            prompt(row),
            f"{row['samples']} x {row['new_tokens']:,}",
            *(format_bytes(row[pages] * row["page_size"]) for pages in memory),
        )
        for row in result["sampling"]
    ]


def prompt(row: Row) -> str:
    """What is forked."""
    return f"{row['tokens']:,} tokens, {FRAMES[row['large_frames']]}"


if __name__ == "__main__":
    typer.run(main)
