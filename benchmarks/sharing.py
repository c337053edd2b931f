"""Host time to fork a prompt, and the memory that its samples share.

    python -m benchmarks.sharing [--device cuda] [--tokens 8192] [--samples 64] [--new-tokens 256] [--json]

Forking: the host's time, the part of the driver's calls, and the same calls by hand, in turns; of a prompt that fills
its pages, of which all is shared, and of one that is a few tokens shorter, so that its end is copied. Samples: the
pages of all continuations of a prompt, beside the prompt's pages once and theirs, and beside separate sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import numpy as np
import torch
import typer
from rich.progress import track

from vmmkv import SHARED_PAGE, KVCache, KVLayout, Sequence
from vmmkv.cli.options import Device, JsonOutput
from vmmkv.cli.output import errors, format_bytes
from vmmkv.core.pool import LARGE
from vmmkv.driver.driver import Driver

from .environment import environment
from .geometry import LAYOUT, calls_of, calls_since, memory_of, open_geometry
from .host_time import ByHand, in_turns, microseconds, spread
from .output import Lines, Row, deliver

FRAMES = {True: "large frames", False: "single pages"}
SHORTER = 7
"""Tokens by which the second prompt is shorter than the first."""


def make_cache(driver: Driver, layout: KVLayout, tokens: int, sequences: int, own: int, large: bool) -> KVCache:
    """A cache without a mapper, for a prompt and sequences that have so many pages of their own beside it."""
    budget = (layout.pages(tokens, driver.page_size) + sequences * (own + LARGE)) * driver.page_size
    options: Row = {**memory_of(driver), "lookahead": 0, "large_frames": large}
    return KVCache(layout, sequences, tokens, max_bytes=budget, **options)


def forking(driver: Driver, layout: KVLayout, tokens: int, count: int, large: bool, rounds: int) -> Row:
    """Microseconds to fork a prompt so many times at once, and of the same driver calls by hand; all memory is made
    anew in each round."""
    figures = list[Row]()
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
            took = in_turns({"fork": ours, "raw": theirs}, rounds)
        cache.check()
    row = {"tokens": tokens, "large_frames": large, "forks": count, "calls": figures[0]["calls"]}
    row |= {"pages_shared": sum(shared), "pages_of_a_fork": sum(own), "bytes_copied": copied}
    row |= spread(took["fork"], "fork") | spread([each["driver_us"] for each in figures[2:]], "driver")
    row |= spread(took["raw"], "raw")
    return row | {"ratio": row["fork_us"] / row["raw_us"]}


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
    raw, size = ByHand(driver), driver.page_size
    split, stride = sum(shared) * size, (sum(shared) + sum(own)) * size
    base = driver.reserve(stride * (count + 1))  # the prompt's row comes first
    prompt = [raw.create(pages) for pages in [*shared, *own]]
    rows = range(base + stride, base + stride * (count + 1), stride)

    def put(address: int, handles: list[int], sizes: list[int]) -> None:
        for handle, pages in zip(handles, sizes):
            raw.map(address, handle, pages)
            address += pages * size

    def fork(made: list[int]) -> None:
        for row in rows:
            if shared:
                put(row, prompt, shared)
                raw.access(row, sum(shared), False)
            if own:
                frames = [raw.create(pages) for pages in own]
                made += frames
                put(row + split, frames, own)
                raw.access(row + split, sum(own))
            if copied:
                driver.copy(row + split, base + split, copied)

    def theirs() -> float:
        made: list[int] = []
        took = microseconds(fork, made)
        driver.synchronize()
        raw.unmap(rows.start, (sum(shared) + sum(own)) * count)
        for handle in made:
            raw.release(handle)
        return took

    put(base, prompt, [*shared, *own])
    raw.access(base, sum(shared) + sum(own))
    yield theirs
    raw.unmap(base, sum(shared) + sum(own))
    for handle in prompt:
        raw.release(handle)
    driver.free(base, stride * (count + 1))


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
        for _ in range(new_tokens):
            cache.extend(batch, 1)
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
    }


def main(
    device: Device = None,
    tokens: Annotated[int | None, typer.Option(min=SHORTER + 1, help="Of the prompt: 8,192, or 512 on a CPU.")] = None,
    samples: Annotated[int, typer.Option(min=2, help="Of the prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, help="Of each sample.")] = 256,
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
    result["sampling"] = [sampling(driver, layout, length, samples, new_tokens, large) for length, large in prompts]
    deliver(result, json_output, {"Forking a prompt, host time": table, "Pages of samples of one prompt": sample_table})


def table(result: Row) -> Lines:
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
