"""Memory that samples of one prompt share.

    python -m benchmarks.sharing [--device cuda] [--tokens 8192] [--samples 64] [--new-tokens 256] [--json]

The pages of all continuations of a prompt, beside the prompt's pages once and theirs, and beside separate sequences; of
a prompt that fills its pages, of which all is shared, and of one that is a few tokens shorter, so that its end is
copied. `benchmarks.core` measures the host time of a fork.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from vmmkv import SHARED_PAGE, KVCache, KVLayout, Sequence
from vmmkv.cli.output import Device, JsonOutput, format_bytes
from vmmkv.core.pool import LARGE
from vmmkv.driver.driver import Driver

from .environment import environment
from .geometry import LAYOUT, memory_of, open_geometry
from .output import Lines, Row, deliver

FRAMES = {True: "large frames", False: "single pages"}
SHORTER = 7
"""Tokens by which the second prompt is shorter than the first."""


def make_cache(driver: Driver, layout: KVLayout, tokens: int, sequences: int, own: int, large: bool) -> KVCache:
    """A cache without a mapper, for a prompt and sequences that have so many pages of their own beside it."""
    budget = (layout.pages(tokens, driver.page_size) + sequences * (own + LARGE)) * driver.page_size
    options: Row = {**memory_of(driver), "lookahead": 0, "large_frames": large}
    return KVCache(layout, sequences, tokens, max_bytes=budget, **options)


def fill(sequence: Sequence) -> torch.Tensor:
    """Writes random K of one layer; returns it."""
    k = sequence.k(0)
    k.copy_(torch.randn(k.shape, device=k.device))
    return k.clone()


def check(sequence: Sequence, content: torch.Tensor) -> None:
    """That a sequence begins with K of a prompt."""
    assert torch.equal(sequence.k(0)[: len(content)], content)


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
    json_output: JsonOutput = False,
) -> None:
    """Measure forks."""
    driver, layout = open_geometry(device)
    tokens = tokens or (8192 if layout is LAYOUT else 512)
    prompts = [(length, large) for large in FRAMES for length in (tokens, tokens - SHORTER)]
    result: Row = {"environment": environment(driver.device), "token_bytes": layout.token_bytes}
    result["sampling"] = [sampling(driver, layout, length, samples, new_tokens, large) for length, large in prompts]
    deliver(result, json_output, {"Pages of samples of one prompt": table})


def table(result: Row) -> Lines:
    """A line for each prompt."""
    columns = "prompt", "samples, new tokens", "memory used", "prompt once, and own", "separate"
    memory = "pages", "pages_once_and_own", "pages_separate"
    return columns, [
        (
            f"{row['tokens']:,} tokens, {FRAMES[row['large_frames']]}",
            f"{row['samples']} x {row['new_tokens']:,}",
            *(format_bytes(row[pages] * row["page_size"]) for pages in memory),
        )
        for row in result["sampling"]
    ]


if __name__ == "__main__":
    typer.run(main)
