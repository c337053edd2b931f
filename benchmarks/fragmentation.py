"""Waste and admitted sequences of each way to lay out a KV cache: a whole trace in virtual time.

    python -m benchmarks.fragmentation [--trace FILE] [--requests N] [--json]

All requests wait from the beginning; as many run as the allocator has memory for, and where it runs short the newest
are preempted. Needs no GPU and no memory: allocators keep books only. Rows are a real `KVCache` on a driver without
memory; static reservation and block tables are a pool with a free list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import track

from vmmkv import FramePool, KVCache, KVLayout, OutOfPagesError
from vmmkv.cli.batching import Batching
from vmmkv.cli.output import JsonOutput, TraceFile, errors
from vmmkv.core.addresses import ADDRESS_LIMIT
from vmmkv.driver.host import NullDriver
from vmmkv.workload import Request, conversations, read_trace

from .environment import environment
from .output import Lines, Row, deliver, name_of

MODELS = {
    "Llama-2-7B": KVLayout(num_layers=32, num_kv_heads=32, head_dim=128),
    "Llama-3.1-8B": KVLayout(num_layers=32, num_kv_heads=8, head_dim=128),
    "Llama-3.1-70B, TP 8": KVLayout(num_layers=80, num_kv_heads=1, head_dim=128),
    "Qwen3-0.6B": KVLayout(num_layers=28, num_kv_heads=8, head_dim=128),
}
"""K and V in bf16; of eight GPUs each has one of the 70B's eight KV heads."""
GIB = 80
"""Of the GPU that holds K and V."""
RESERVATIONS = (2048, 4096, 8192)
"""Tokens that static reservation keeps for a sequence; its waste depends on nothing as much as on this."""
SCHEMES = ("static", "block 16", "block 64", "block 256", "per layer", "token-major")
"""`static` reserves the maximum for each sequence. `per layer` has a range of 2 MiB pages for K and for V of each
layer, `token-major` one for all of them: both are a `KVCache`."""
SAMPLE_STEPS = 20


@dataclass(slots=True, eq=False)
class BlockSequence:
    """A sequence: its tokens and its blocks."""

    length: int = 0
    blocks: int = 0


class BlockPool:
    """Counts the blocks of sequences; with blocks of `max_seq_len` tokens it is static reservation."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks, self.block_tokens, self.used_blocks = num_blocks, block_tokens, 0

    def sequence(self, tokens: int) -> BlockSequence:
        sequence = BlockSequence()
        self.extend([sequence], tokens)
        return sequence

    def extend(self, sequences: Sequence[BlockSequence], tokens: int) -> None:
        """Extend all of the sequences or none, as `KVCache.extend`."""
        size, available = self.block_tokens, self.num_blocks - self.used_blocks
        missing = [-(-(sequence.length + tokens) // size) - sequence.blocks for sequence in sequences]
        requested = sum(missing)
        if requested > available:
            what = f"asked for {requested} more blocks of {size} tokens; {available} of {self.num_blocks} are free"
            raise OutOfPagesError(what, requested=requested, available=available)
        for sequence, count in zip(sequences, missing):
            sequence.length, sequence.blocks = sequence.length + tokens, sequence.blocks + count
        self.used_blocks += requested

    def free(self, sequences: Sequence[BlockSequence]) -> None:
        self.used_blocks -= sum(sequence.blocks for sequence in sequences)


def make_allocator(
    scheme: str, layout: KVLayout, budget: int, max_seq_len: int, max_sequences: int
) -> KVCache | BlockPool:
    """An allocator of one of `SCHEMES` over `budget` bytes."""
    if scheme == "per layer":
        # K and V of each layer as layers of their own, which have no V.
        heads, width = layout.num_kv_heads, layout.head_dim
        layout = KVLayout(2 * layout.num_layers, heads, width, layout.dtype, v_head_dim=0, layers_per_range=1)
    if scheme in ("per layer", "token-major"):
        pool = FramePool(budget, device=NullDriver(budget))
        # One row more than there could be pages for: memory runs out, not rows.
        rows = min(max_sequences, budget // pool.page_size // len(layout.record_bytes) + 1)
        large = scheme == "token-major"  # a range for each layer has pages of one size
        return KVCache(layout, rows, max_seq_len, pool=pool, large_frames=large, lookahead=0)
    block_tokens = max_seq_len if scheme == "static" else int(scheme.removeprefix("block "))
    return BlockPool(budget // (block_tokens * layout.token_bytes), block_tokens)


def used_bytes(allocator: KVCache | BlockPool, layout: KVLayout) -> int:
    """Bytes that live sequences keep from others."""
    if isinstance(allocator, BlockPool):
        return allocator.used_blocks * allocator.block_tokens * layout.token_bytes
    return allocator.stats().pages["used"] * allocator.page_size


def simulate(model: str, scheme: str, requests: list[Request], max_seq_len: int) -> Row:
    """One trace on one allocator.

    Means are over the steps in which requests wait. `waste` is the part of the used bytes that holds no token,
    `unused_tokens` the same in tokens a sequence.
    """
    layout = MODELS[model]
    max_sequences = min(len(requests), ADDRESS_LIMIT // (max_seq_len * layout.token_bytes))
    allocator = make_allocator(scheme, layout, GIB << 30, max_seq_len, max_sequences)
    batching = Batching(allocator, requests, max_sequences)
    row: Row = {"model": model, "budget_gib": GIB, "scheme": scheme, "max_seq_len": max_seq_len}
    row["requests"] = len(requests)
    crowded: list[tuple[float, ...]] = []  # sequences, their tokens, and the tokens that there would be room for
    peak = 0
    try:
        while batching.waiting or batching.running:
            batching.admit()
            peak = max(peak, len(batching.running))
            if batching.steps % SAMPLE_STEPS == 0:
                tokens = sum(running.length for running in batching.running)
                sample = len(batching.running), tokens, used_bytes(allocator, layout) / layout.token_bytes
                if batching.waiting or not crowded:
                    crowded.append(sample)
            batching.decode(SAMPLE_STEPS - batching.steps % SAMPLE_STEPS)
            batching.retire()
    except OutOfPagesError as error:  # the largest request alone does not fit
        return row | {"error": str(error), "sequences": 0, "peak_sequences": 0, "waste": None, "unused_tokens": None}
    sequences, tokens, used = map(sum, zip(*crowded))
    return row | {
        "sequences": sequences / len(crowded),
        "peak_sequences": peak,
        "waste": 1 - tokens / used,
        "unused_tokens": (used - tokens) / sequences,
        "steps": batching.steps,
        "preemptions": batching.preemptions,
    }


def run(requests: list[Request], max_seq_len: int) -> Row:
    """All models and schemes, and static reservation of several lengths, in one process per processor."""
    jobs: list[tuple[str, tuple[Any, ...]]] = [
        ("runs", (model, scheme, fitting(requests, max_seq_len), max_seq_len)) for model in MODELS for scheme in SCHEMES
    ]
    jobs += [("reservations", ("Llama-3.1-8B", "static", fitting(requests, tokens), tokens)) for tokens in RESERVATIONS]
    # Not forked: torch's threads would not be there.
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(simulate, *arguments) for _, arguments in jobs]
        finished = as_completed(futures)
        for _ in track(
            finished, "Replaying", len(jobs), console=errors, transient=True, disable=not errors.is_terminal
        ):
            pass
    result: Row = {}
    for (part, _), future in zip(jobs, futures):
        result.setdefault(part, []).append(future.result())
    return result


def fitting(requests: list[Request], max_seq_len: int) -> list[Request]:
    """The requests that a server with this limit takes."""
    return [request for request in requests if request.total <= max_seq_len]


def main(
    trace: TraceFile = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="How many; the whole trace by default, 2,000 without one.")
    ] = None,
    max_seq_len: Annotated[int, typer.Option(min=1, help="Longer requests are left out.")] = 8192,
    seed: Annotated[int, typer.Option(min=0, help="Of lengths, without a trace.")] = 0,
    json_output: JsonOutput = False,
) -> None:
    """Measure waste and admitted sequences of each way to lay out a KV cache."""
    work = read_trace(trace)[:requests] if trace else conversations(requests or 2000, np.random.default_rng(seed))
    served = len(fitting(work, max_seq_len))
    if not served:
        raise typer.BadParameter(f"--max-seq-len {max_seq_len}: every request is longer")
    result: Row = {
        "environment": environment(torch.device("cpu")),
        "trace": name_of(trace),
        "requests": served,
        "left_out": len(work) - served,
        "max_seq_len": max_seq_len,
    }
    result |= run(work, max_seq_len)
    tables = {f"{served:,} requests, waste": waste_table, "Static reservation": reservation_table}
    deliver(result, json_output, {**tables, f"Sequences in {GIB} GiB": batch_table})


def waste_table(result: Row) -> Lines:
    """Waste at the largest budget, on which it does not depend: a column for each model, a line for each scheme."""

    def cell(row: Row) -> str:
        unused = row["unused_tokens"]
        return f"{row['waste']:.1%}, {unused:,.{0 if unused > 100 else 1}f} tokens"

    return schemes_by_models(result, cell)


def batch_table(result: Row) -> Lines:
    """Sequences at a time at the largest budget, and how many times those of static reservation."""
    runs = [row for row in result["runs"] if row["budget_gib"] == GIB]
    static = {row["model"]: row["sequences"] for row in runs if row["scheme"] == "static"}

    def cell(row: Row) -> str:
        gain = row["sequences"] / static[row["model"]] if static[row["model"]] else 0
        of_static = f", {gain:.1f} x" if row["scheme"] != "static" and gain else ""
        return f"{row['sequences']:,.0f} (most {row['peak_sequences']:,}){of_static}"

    return schemes_by_models(result, cell)


def schemes_by_models(result: Row, cell: Callable[[Row], str]) -> Lines:
    labels = {
        "static": f"static reservation of {result['max_seq_len']:,} tokens",
        "block 16": "block table, 16 tokens",
        "block 64": "block table, 64 tokens",
        "block 256": "block table, 256 tokens",
        "per layer": "2 MiB pages, a range per layer and K/V",
        "token-major": "**vmmkv**: 2 MiB pages, token-major",
    }
    runs = {(row["scheme"], row["model"]): row for row in result["runs"] if row["budget_gib"] == GIB}
    return (f"{GIB} GiB", *MODELS), [
        (
            labels[scheme],
            *("does not fit" if "error" in row else cell(row) for row in (runs[scheme, model] for model in MODELS)),
        )
        for scheme in SCHEMES
    ]


def reservation_table(result: Row) -> Lines:
    """A line for each length of a static reservation."""
    return ("reserved for each sequence", "requests that fit", "waste"), [
        (f"{row['max_seq_len']:,} tokens", f"{row['requests']:,}", f"{row['waste']:.1%}")
        for row in result["reservations"]
    ]


if __name__ == "__main__":
    typer.run(main)
