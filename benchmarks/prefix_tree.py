"""Host time to find the beginning of a prompt in a tree of many pages, beside a dictionary of block hashes.

    python -m benchmarks.prefix_tree [--pages 100000] [--tokens 8192] [--json]

The tree holds conversations that begin with one of a few system prompts. Prompts of the same length differ in how much
of them is cached. The dictionary is the usual way with block tables: each block of a page's tokens is looked up by a
SHA-256 of its ids and of the block before. Both must find the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from hashlib import sha256
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer

from vmmkv import FramePool, KVCache
from vmmkv.cli.output import JsonOutput, errors
from vmmkv.driver.host import NullDriver
from vmmkv.prefix import entries
from vmmkv.prefix.prefixes import NO_NAMES, TOKENS, WORDS, Prefixes

from .environment import environment
from .geometry import LAYOUT
from .host_time import microseconds
from .output import Lines, Row, deliver

Ids = npt.NDArray[np.int64]

PAGE_TOKENS = 16
"""As of a 2 MiB page and Llama-3.1-8B in bf16."""
VOCABULARY = 128_256
SYSTEM_PROMPTS, SYSTEM_TOKENS, TURN_TOKENS = 8, 512, 1024
TYPICAL = "all but the last turn"
ROWS = 8


class BlockHashes:
    """A dictionary of blocks by the hash of all ids up to their end."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, int] = {}

    def insert(self, ids: Ids) -> None:
        for digest in self._digests(ids):
            self.blocks.setdefault(digest, len(self.blocks))

    def match(self, ids: Ids) -> list[int]:
        found = []
        for digest in self._digests(ids):
            if digest not in self.blocks:
                break
            found.append(self.blocks[digest])
        return found

    def _digests(self, ids: Ids) -> Any:
        digest = b""
        for start in range(0, len(ids) - PAGE_TOKENS + 1, PAGE_TOKENS):
            digest = sha256(digest + ids[start : start + PAGE_TOKENS].tobytes()).digest()
            yield digest


def main(
    pages: Annotated[int, typer.Option(min=1000, help="Of the tree.")] = 100_000,
    tokens: Annotated[int, typer.Option(min=2 * TURN_TOKENS, help="Of a prompt.")] = 8192,
    repeats: Annotated[int, typer.Option(min=1, help="Of each match.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Of the ids.")] = 0,
    json_output: JsonOutput = False,
) -> None:
    """Measure a prefix tree."""
    rng = np.random.default_rng(seed)
    with errors.status("filling the tree"):
        cache, conversations = fill(pages, tokens, rng)
    hashes = BlockHashes()
    for ids in conversations:
        hashes.insert(ids)
    result: Row = {
        "environment": environment(torch.device("cpu")),
        "pages": len(hashes.blocks),
        "page_tokens": PAGE_TOKENS,
        "prompt_tokens": tokens,
    }
    with errors.status("matching"):
        result["matches"] = [
            {"prompt": name} | measure(prompts, cache, hashes, repeats)
            for name, prompts in make_prompts(conversations, tokens, rng).items()
        ]
    title = f"Prompts of {tokens:,} tokens, {result['pages']:,} pages"
    deliver(result, json_output, {title: table})


def fill(pages: int, tokens: int, rng: np.random.Generator) -> tuple[KVCache, list[Ids]]:
    """A cache with so many cached pages, and the conversations in it."""
    nbytes = (pages + ROWS * -(-2 * tokens // PAGE_TOKENS)) * NullDriver(0).page_size  # later ones evict the first
    cache = KVCache(LAYOUT, ROWS, 2 * tokens, pool=FramePool(nbytes, device=NullDriver(nbytes)), lookahead=0)
    systems = [draw(rng, SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
    conversations: list[Ids] = []
    cached = 0
    while cached < pages:
        ids = np.concatenate([systems[len(conversations) % SYSTEM_PROMPTS], draw(rng, tokens - SYSTEM_TOKENS)])
        sequence = cache.sequence(token_ids=ids)
        sequence.commit(ids)
        cached += (tokens - sequence.cached_tokens) // PAGE_TOKENS
        sequence.free()
        conversations.append(ids)
    cache.check()
    return cache, conversations


def draw(rng: np.random.Generator, tokens: int) -> Ids:
    return rng.integers(0, VOCABULARY, tokens)


def make_prompts(conversations: list[Ids], tokens: int, rng: np.random.Generator) -> dict[str, list[Ids]]:
    """By how much of it is known, a prompt for each conversation."""
    known = {"all": tokens, TYPICAL: tokens - TURN_TOKENS, "the system prompt": SYSTEM_TOKENS, "nothing": 0}
    return {
        name: [np.concatenate([ids[:end], VOCABULARY + draw(rng, tokens - end)]) for ids in conversations]
        for name, end in known.items()
    }


def measure(prompts: list[Ids], cache: KVCache, hashes: BlockHashes, repeats: int) -> Row:
    """Microseconds of a look-up, prompts taking turns; and of the same blocks in the dictionary, a tenth as often."""
    prefixes = cache.prefixes
    assert prefixes is not None
    found = [look_up(prefixes, ids) for ids in prompts]
    blocks = [min(PAGE_TOKENS * len(hashes.match(ids)), len(ids) - 1) // PAGE_TOKENS for ids in prompts]
    if [tokens // PAGE_TOKENS for tokens in found] != blocks:
        raise AssertionError("the tree and the dictionary do not find the same")
    us = clock(lambda ids: look_up(prefixes, ids), prompts, repeats)
    return {
        "found_tokens": found[0],
        "us": us,
        "mb_per_s": found[0] * prompts[0].itemsize / us["median"],
        "hashes_us": clock(hashes.match, prompts, max(repeats // 10, 1)),
    }


def look_up(prefixes: Prefixes, ids: Ids) -> int:
    """How many of the first tokens of a prompt are cached."""
    found, ids = array("q", bytes(8 * WORDS)), np.ascontiguousarray(ids, np.int64)
    entries.look_up(prefixes.address, NO_NAMES.number, ids.ctypes.data, len(ids) - 1, found.buffer_info()[0])
    return found[TOKENS]


def clock(function: Callable[[Ids], object], prompts: list[Ids], repeats: int) -> dict[str, float]:
    """Microseconds of calls, prompts taking turns."""
    times = [microseconds(function, prompts[number % len(prompts)]) for number in range(repeats)]
    return dict(zip(("p10", "median", "p90"), np.percentile(times, (10, 50, 90)).tolist()))


def table(result: Row) -> Lines:
    """A line for each kind of prompt."""
    return ("known", "tokens", "µs", "MB/s", "block hashes, µs"), [
        (
            row["prompt"],
            f"{row['found_tokens']:,}",
            "{median:.1f} ({p10:.1f} to {p90:.1f})".format(**row["us"]),
            f"{row['mb_per_s']:,.0f}",
            f"{row['hashes_us']['median']:,.1f}",
        )
        for row in result["matches"]
    ]


if __name__ == "__main__":
    typer.run(main)
