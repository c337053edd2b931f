"""What finding a prompt's beginning costs, in a tree of many pages, beside a dictionary of block hashes.

    python -m benchmarks.prefix_tree [--pages 100000] [--tokens 8192] [--json]

The tree holds conversations in turns that begin with one of a few system prompts. Prompts of the same length differ in
how much of them is there. The dictionary is the usual way with block tables: each block of a page's tokens is looked up
by a SHA-256 of its ids and of the block before. Both must find the same. All times are the host's; no memory is mapped.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.environment import environment, print_result
from vmmkv.cli.options import JsonOutput
from vmmkv.cli.output import console, errors, make_table
from vmmkv.reuse.node import Ids
from vmmkv.reuse.tree import Match, PrefixTree

PAGE_TOKENS = 16
"""As of a 2 MiB page and Llama-3.1-8B in bf16."""
VOCABULARY = 128_256
SYSTEM_PROMPTS, SYSTEM_TOKENS, TURN_TOKENS = 8, 512, 1024
KEY = "salt", "adapter"
TYPICAL = "all but the last turn"
BATCH = 1000
"""Pages evicted in a call."""


class Prefixes:
    """A prefix tree, and the numbers of at most so many pages, used as a server does.

    Args:
        pages: how many there are.
        page_tokens: tokens of a page.
    """

    def __init__(self, pages: int, page_tokens: int) -> None:
        self.tree = PrefixTree(page_tokens, [1])
        self.free = list(range(pages))

    def serve(self, ids: Ids) -> Match:
        """Looks a prompt up and makes all of it known, as far as there are pages; returns what was there."""
        found = self.tree.match(KEY, ids)
        held = self.tree.lock(found.node, found.tokens)
        missing = self.tree.geometry.pages(len(ids))[0] - len(found.pages[0])
        if missing > len(self.free):
            self.free += self.tree.evict(missing - len(self.free))[0]
        pages = found.pages[0] + [self.free.pop() for _ in range(min(missing, len(self.free)))]
        made = self.tree.insert(KEY, ids[: len(pages) * self.tree.geometry.page_size], [pages])
        end = self.tree.lock(made.node)
        self.tree.unlock(held)
        self.tree.unlock(end)
        return found


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
        prefixes, conversations = fill(pages, tokens, rng)
    tree, hashes = prefixes.tree, BlockHashes()
    for ids in conversations:
        hashes.insert(ids)
    result: dict[str, Any] = {
        "environment": environment(torch.device("cpu")),
        "pages": tree.pages,
        "nodes": tree.nodes,
        "tree_tokens": tree.tokens,
        "page_tokens": PAGE_TOKENS,
        "prompt_tokens": tokens,
    }
    with errors.status("matching"):
        result["matches"] = [
            {"prompt": name} | measure(prompts, tree, hashes, repeats)
            for name, prompts in make_prompts(conversations, tokens, rng).items()
        ]
    with errors.status("changing"):
        result["changes"] = changes(prefixes, conversations, rng)
    if json_output:
        print_result(result)
    else:
        show(result)


def fill(pages: int, tokens: int, rng: np.random.Generator) -> tuple[Prefixes, list[Ids]]:
    """A tree of so many pages, and the conversations in it."""
    prefixes = Prefixes(2 * pages, PAGE_TOKENS)  # with room for what is added later
    systems = [draw(rng, SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
    conversations: list[Ids] = []
    while prefixes.tree.pages < pages:
        ids = np.concatenate([systems[len(conversations) % SYSTEM_PROMPTS], draw(rng, tokens - SYSTEM_TOKENS)])
        for end in range(tokens % TURN_TOKENS + TURN_TOKENS, tokens + 1, TURN_TOKENS):
            prefixes.serve(ids[:end])
        conversations.append(ids)
    prefixes.tree.check()
    return prefixes, conversations


def draw(rng: np.random.Generator, tokens: int) -> Ids:
    return rng.integers(0, VOCABULARY, tokens)


def make_prompts(conversations: list[Ids], tokens: int, rng: np.random.Generator) -> dict[str, list[Ids]]:
    """By how much of it is known, a prompt for each conversation."""
    known = {"all": tokens, TYPICAL: tokens - TURN_TOKENS, "the system prompt": SYSTEM_TOKENS, "nothing": 0}
    return {
        name: [np.concatenate([ids[:end], VOCABULARY + draw(rng, tokens - end)]) for ids in conversations]
        for name, end in known.items()
    }


def measure(prompts: list[Ids], tree: PrefixTree, hashes: BlockHashes, repeats: int) -> dict[str, Any]:
    """Microseconds of a match, prompts taking turns; and of the same blocks in the dictionary, a tenth as often."""
    found = [tree.match(KEY, ids) for ids in prompts]
    blocks = [len(hashes.match(ids)) for ids in prompts]
    if [len(each.pages[0]) for each in found] != blocks:
        raise AssertionError("the tree and the dictionary do not find the same")
    times = clock(lambda ids: tree.match(KEY, ids), prompts, repeats)
    us = spread(times)
    return {
        "found_tokens": found[0].tokens,
        "us": us,
        "mb_per_s": found[0].tokens * found[0].node.ids.itemsize / us["median"],
        "hashes_us": spread(clock(hashes.match, prompts, max(repeats // 10, 1))),
    }


def clock(function: Callable[[Ids], object], prompts: list[Ids], repeats: int) -> list[float]:
    times = []
    for number in range(repeats):
        ids = prompts[number % len(prompts)]
        start = perf_counter()
        function(ids)
        times.append((perf_counter() - start) * 1e6)
    return times


def spread(times: list[float]) -> dict[str, float]:
    return dict(zip(("p10", "median", "p90"), np.percentile(times, (10, 50, 90)).tolist()))


def changes(prefixes: Prefixes, conversations: list[Ids], rng: np.random.Generator) -> dict[str, Any]:
    """Microseconds of a turn that is added to each conversation, of lock and unlock, and of a page that is evicted."""
    tree = prefixes.tree
    longer = [np.concatenate([ids, draw(rng, TURN_TOKENS)]) for ids in conversations]
    hold = clock(lambda ids: tree.unlock(tree.lock(tree.match(KEY, ids).node)), conversations, len(conversations))
    serve = clock(prefixes.serve, longer, len(longer))
    tree.check()
    evict = []
    while tree.pages:
        start = perf_counter()
        count = len(tree.evict(BATCH)[0])
        evict.append((perf_counter() - start) * 1e6 / count)
    return {
        "turn_us": spread(serve),
        "match_lock_unlock_us": spread(hold),
        "evict_us_a_page": spread(evict),
        "evicted_at_a_time": BATCH,
    }


def table(result: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns, and a line for each kind of prompt."""
    rows = [
        (
            row["prompt"],
            f"{row['found_tokens']:,}",
            f"{row['us']['median']:.1f} ({row['us']['p10']:.1f} to {row['us']['p90']:.1f})",
            f"{row['mb_per_s']:,.0f}",
            f"{row['hashes_us']['median']:,.1f}",
        )
        for row in result["matches"]
    ]
    return ("known", "tokens", "µs", "MB/s", "block hashes, µs"), rows


def show(result: dict[str, Any]) -> None:
    """Prints a line for each kind of prompt."""
    title = f"Prompts of {result['prompt_tokens']:,} tokens, {result['pages']:,} pages, {result['nodes']:,} nodes"
    console.print(make_table(title, *table(result)))
    for name, row in result["changes"].items():
        if isinstance(row, dict):
            console.print(f"{name}: {row['median']:.1f} ({row['p10']:.1f} to {row['p90']:.1f})")


if __name__ == "__main__":
    typer.run(main)
