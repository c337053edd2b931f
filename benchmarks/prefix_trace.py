"""Prefix hits of a trace on a cache with room for all, and under budgets beside an offline optimum.

    python -m benchmarks.prefix_trace --trace FILE [--pages N]... [--json]

The trace tells of each prompt the ids of its blocks; equal ids are equal content behind an equal beginning (Mooncake's
traces: `hash_ids`, blocks of 512 tokens). Here a block is a page of a few tokens, and each prompt ends with one more
token, which must be computed. Requests come one after another on one `KVCache` in host memory, without and with a host
tier: each begins with the known tokens, writes K of the others, and commits them. K of known tokens is compared.

The optimum is Belady's: it knows all requests, and evicts the page that is needed last. A page is never needed before
the one that it follows, so it keeps prefixes only, and no policy finds more. It has the pages of a host tier as well.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
import typer

from vmmkv import KVCache, KVLayout, Sequence
from vmmkv.cli.options import JsonOutput
from vmmkv.cli.output import errors
from vmmkv.events import EventLog, Removed
from vmmkv.workload import TraceError, read_trace

from .environment import environment
from .output import Lines, Row, deliver

Ids = npt.NDArray[np.int64]
Blocks = tuple[int, ...]
"""Ids of a prompt's blocks."""
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=128, dtype=torch.int8)
PAGE_TOKENS = 16
"""Tokens that stand for a block, and fill a page of 4 KiB."""
PAGE_BYTES = PAGE_TOKENS * LAYOUT.token_bytes
ROWS = 8
"""Of the cache. One sequence lives at a time; the other rows are kept, as long as they may be."""
BUDGETS = 1000, 4000, 16_000, 64_000
HOST = 4
"""Pages of the host tier for each page of the budget."""


def known_blocks(requests: list[Blocks]) -> list[int]:
    """By request how many blocks, from its first on, are in a request before it."""
    seen: set[int] = set()
    known = []
    for blocks in requests:
        known.append(next((n for n, block in enumerate(blocks) if block not in seen), len(blocks)))
        seen.update(blocks)
    return known


def optimum(requests: list[Blocks], pages: int) -> list[int]:
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


def prompts_of(requests: list[Blocks]) -> list[Ids]:
    """Token ids of each prompt: those of its blocks, and one that no other has."""
    names: dict[int, int] = {}
    named = [[names.setdefault(block, len(names)) for block in blocks] for blocks in requests]
    starts = [np.array(each, np.int64)[:, None] * PAGE_TOKENS for each in named]
    own = len(names) * PAGE_TOKENS
    return [np.append(start + np.arange(PAGE_TOKENS), own + index) for index, start in enumerate(starts)]


def replay(prompts: list[Ids], pages: int, host_pages: int) -> Row:
    """All prompts on a cache of so many pages, and one more for the token that is a prompt's own."""
    log, evicted, cached = EventLog(PAGE_TOKENS), 0, []
    with KVCache(
        LAYOUT,
        ROWS,
        max(map(len, prompts)),
        max_bytes=(pages + 1) * PAGE_BYTES,
        device="cpu",
        page_size=PAGE_BYTES,
        large_frames=False,
        host_bytes=host_pages * PAGE_BYTES,
        event_log=log,
    ) as cache:
        for ids in prompts:
            with cache.sequence(token_ids=ids) as sequence:
                check_and_write(sequence, ids)
                sequence.commit(ids)
                cached.append(sequence.cached_tokens)
            evicted += sum(len(event.hashes) for event in log.events() if isinstance(event, Removed))
        cache.check()
        if cache.stats().events_dropped:
            raise AssertionError("events were dropped")
    return {"pages": pages, "host_pages": host_pages, "cached": cached, "evicted": evicted}


def check_and_write(sequence: Sequence, ids: Ids) -> None:
    """Checks K of what a sequence begins with, and writes the rest: each token's is its id."""
    k = sequence.k(0)[:, 0].view(torch.int64)
    expected = torch.from_numpy(ids)[:, None]
    if not (k[: sequence.cached_tokens] == expected[: sequence.cached_tokens]).all():
        raise AssertionError("a sequence begins with K of other tokens")
    k[sequence.cached_tokens :] = expected[sequence.cached_tokens :]


def measure(requests: list[Blocks], prompts: list[Ids], pages: int, host_pages: int) -> Row:
    """What was found with so many pages, and what could be at best."""
    with errors.status(f"{pages:,} pages, {host_pages:,} on the host"):
        row, best = replay(prompts, pages, host_pages), optimum(requests, pages + host_pages)
    blocks, cached = sum(map(len, requests)), row.pop("cached")
    return row | {
        "hit_tokens": sum(cached),
        "hit_rate": sum(cached) / (blocks * PAGE_TOKENS),
        "optimal_hit_rate": sum(best) / blocks,
        "exact": cached == [PAGE_TOKENS * known for known in known_blocks(requests)],
    }


def main(
    trace: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="Mooncake JSON lines with hash_ids.")],
    pages: Annotated[
        list[int] | None, typer.Option(min=1, help="A budget, in pages of a block; may be given often.")
    ] = None,
    json_output: JsonOutput = False,
) -> None:
    """Replay a trace's prompts through a cache."""
    requests = [request.blocks for request in read_trace(trace)]
    blocks, distinct, known = sum(map(len, requests)), len(set().union(*requests)), sum(known_blocks(requests))
    if not blocks:
        raise TraceError(f"{trace} tells of no blocks: its lines must have hash_ids")
    longest, least = max(map(len, requests)), min(pages or BUDGETS)
    if least < longest:
        raise typer.BadParameter(f"--pages {least}: the longest prompt has {longest} blocks")
    budgets = [(each, host * each) for each in pages or BUDGETS for host in (0, HOST)]
    # Room for all, for the own tokens of prompts whose rows are kept, and for a beginning that is there twice,
    # while it is copied from another row.
    budgets.append((distinct + ROWS + longest, 0))
    prompts = prompts_of(requests)
    result: Row = {
        "environment": environment(torch.device("cpu")),
        "trace": trace.name,
        "requests": len(requests),
        "blocks": blocks,
        "distinct_blocks": distinct,
        "known_blocks": known,
        "known_rate": known / blocks,
        "page_tokens": PAGE_TOKENS,
        "runs": [measure(requests, prompts, *budget) for budget in budgets],
    }
    title = f"{trace.name}: {len(requests):,} requests, {blocks:,} blocks, of which {known:,} were there before"
    deliver(result, json_output, {title: table})
    if not result["runs"][-1]["exact"]:
        raise AssertionError("with room for all the cache does not find what the trace says was there before")


def table(result: Row) -> Lines:
    """A line for each budget."""
    return ("pages", "on the host", "found", "optimum", "ratio", "evicted"), [
        (
            "room for all" if row["pages"] > result["distinct_blocks"] else f"{row['pages']:,}",
            f"{row['host_pages']:,}",
            f"{row['hit_rate']:.1%}",
            f"{row['optimal_hit_rate']:.1%}",
            f"{row['hit_rate'] / row['optimal_hit_rate']:.2f}" if row["optimal_hit_rate"] else "-",
            f"{row['evicted']:,}",
        )
        for row in result["runs"]
    ]


if __name__ == "__main__":
    typer.run(main)
