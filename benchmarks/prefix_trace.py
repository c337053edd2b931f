"""How much of a trace's prompts a prefix tree finds: with room for all, and under budgets beside an offline optimum.

    python -m benchmarks.prefix_trace TRACE [--pages N]... [--json]

The trace tells of each prompt the ids of its blocks; equal ids are equal content behind an equal beginning (Mooncake's
traces: JSON lines with `hash_ids`, blocks of 512 tokens). Here a block is a page of a few tokens, which makes hit rates
of the same blocks. Requests come one after another: each looks its prompt up, and makes all of it known.

The optimum is Belady's: it knows all requests, gives up the page that is needed last, and keeps none that is not needed
before those it has. A page is never needed before the one that it follows, so it, too, keeps prefixes only. No policy
finds more.
"""

from __future__ import annotations

import json
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from vmmkv.cli.options import JsonOutput
from vmmkv.cli.output import console, errors, make_table, print_json
from vmmkv.environment import environment
from vmmkv.reuse.node import Ids
from vmmkv.workload import TraceError

from .prefix_tree import Prefixes

BUDGETS = 1000, 4000, 16_000, 64_000


def read_blocks(path: Path) -> list[list[int]]:
    """By request the ids of its prompt's blocks.

    Raises:
        TraceError: it is no such trace, or empty.
    """
    try:
        requests = [[int(block) for block in json.loads(line)["hash_ids"]] for line in path.read_text().splitlines()]
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path} is no trace ({type(error).__name__}): it must be JSON lines with hash_ids") from None
    if not any(requests):
        raise TraceError(f"{path} holds no blocks")
    return requests


def known_blocks(requests: list[list[int]]) -> list[int]:
    """By request how many blocks, from its first on, are in a request before it."""
    seen: set[int] = set()
    known = []
    for blocks in requests:
        known.append(next((n for n, block in enumerate(blocks) if block not in seen), len(blocks)))
        seen.update(blocks)
    return known


def optimum(requests: list[list[int]], pages: int) -> list[int]:
    """By request how many blocks, from its first on, are there at best."""
    accesses = [block for blocks in requests for block in blocks]
    needed: list[float] = [inf] * len(accesses)
    last: dict[int, int] = {}
    for time in range(len(accesses) - 1, -1, -1):
        needed[time] = last.get(accesses[time], inf)
        last[accesses[time]] = time
    there: dict[int, float] = {}
    latest: list[tuple[float, int]] = []
    hits, time = [], 0
    for blocks in requests:
        found = [block in there for block in blocks]
        hits.append(sum(found))
        if not all(found[: hits[-1]]):
            raise AssertionError("the optimum keeps what is no prefix")
        for block in blocks:
            there.pop(block, None)
            if needed[time] < inf:
                there[block] = needed[time]
                heappush(latest, (-needed[time], block))
            while len(there) > pages:
                when, which = heappop(latest)
                if there.get(which) == -when:
                    del there[which]
            time += 1
    return hits


def replay(requests: list[list[int]], pages: int, page_tokens: int) -> dict[str, Any]:
    """All requests on a tree of so many pages."""
    prefixes = Prefixes(pages, page_tokens)
    hits, nodes = [], 0
    for blocks in requests:
        hits.append(prefixes.serve(tokens_of(blocks, page_tokens)).tokens)
        nodes = max(nodes, prefixes.tree.nodes)
    prefixes.tree.check()
    if prefixes.tree.pages + len(prefixes.free) != pages:
        raise AssertionError("pages were lost")
    return {"pages": pages, "hits": hits, "evicted": prefixes.evicted, "nodes": nodes}


def tokens_of(blocks: list[int], page_tokens: int) -> Ids:
    return (np.array(blocks, np.int64)[:, None] * page_tokens + np.arange(page_tokens)).reshape(-1)


def main(
    trace: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Mooncake JSON lines with hash_ids.")],
    pages: Annotated[
        list[int] | None, typer.Option(min=1, help="A budget, in pages of a block; may be given often.")
    ] = None,
    page_tokens: Annotated[int, typer.Option(min=1, help="Tokens that stand for a block.")] = 16,
    json_output: JsonOutput = False,
) -> None:
    """Replay a trace through a prefix tree."""
    requests = read_blocks(trace)
    blocks, distinct = sum(map(len, requests)), len({block for each in requests for block in each})
    known = known_blocks(requests)
    rows = []
    for budget in [*(pages or BUDGETS), distinct]:
        with errors.status(f"{budget:,} pages"):
            row = replay(requests, budget, page_tokens)
            best = optimum(requests, budget)
        found = row.pop("hits")
        rows.append(
            row
            | {
                "hit_tokens": sum(found),
                "hit_rate": sum(found) / (blocks * page_tokens),
                "optimal_hit_rate": sum(best) / blocks,
                "exact": found == [page_tokens * n for n in known],
            }
        )
    result = {
        "environment": environment(torch.device("cpu")),
        "trace": trace.name,
        "requests": len(requests),
        "blocks": blocks,
        "distinct_blocks": distinct,
        "known_blocks": sum(known),
        "known_rate": sum(known) / blocks,
        "page_tokens": page_tokens,
        "runs": rows,
    }
    if json_output:
        print_json(result)
    else:
        show(result)
    if not rows[-1]["exact"]:
        raise AssertionError("with room for all the tree does not find what the trace says was there before")


def show(result: dict[str, Any]) -> None:
    """Prints a line for each budget."""
    title = (
        f"{result['trace']}: {result['requests']:,} requests, {result['blocks']:,} blocks, of which "
        f"{result['known_rate']:.1%} were there before"
    )
    rows = [
        (
            f"{row['pages']:,}" + (" (all)" if row["pages"] == result["distinct_blocks"] else ""),
            f"{row['hit_rate']:.1%}",
            f"{row['optimal_hit_rate']:.1%}",
            f"{row['hit_rate'] / row['optimal_hit_rate']:.2f}" if row["optimal_hit_rate"] else "-",
            f"{row['evicted']:,}",
            f"{row['nodes']:,}",
        )
        for row in result["runs"]
    ]
    columns = "pages", "found", "optimum", "ratio", "pages evicted", "nodes at most"
    console.print(make_table(title, columns, rows))


if __name__ == "__main__":
    typer.run(main)
