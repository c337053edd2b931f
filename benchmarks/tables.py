"""The tables in the documents: for each name the result files, and the function that makes the table of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median
from typing import NamedTuple

from . import (
    batching,
    check_kernels,
    core,
    eight_bits,
    fragmentation,
    mapper,
    pools,
    prefix_tree,
    prefixes,
    rollouts,
    sharing,
    swap,
    transfer,
)
from .attention import tables as attention
from .generate import tables as generate
from .output import Lines, Row
from .serve import report as serve


class Table(NamedTuple):
    """A table.

    Attributes:
        sources: files of `benchmarks/results/`; see `newest` for `_gpu`.
        write: Markdown, or columns and rows, of the results.
    """

    sources: tuple[str, ...]
    write: Callable[..., str | Lines]


def markdown(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    columns = tuple(columns)
    head, *lines = (f"| {' | '.join(cells)} |" for cells in (columns, *rows))
    return "\n".join([head, "|---" * len(columns) + "|", *lines])


def headline(large: Row, small: Row, generated: Row, replayed: Row) -> Lines:
    """The main figures beside those of others; for each transformers cache the fastest way to decode with it."""
    steps = generate.headline(generated)
    waste = {row["scheme"]: f"{row['waste']:.1%}" for row in replayed["runs"] if row["model"] == "Llama-3.1-8B"}
    rows = [
        *map(served_line, (large, small)),
        (
            "milliseconds of a decode step of `generate`, 8 prompts of 32,768 tokens, Llama-3.1-8B",
            f"{steps['VmmCache']:.1f}",
            f"{steps['StaticCache']:.1f} with `StaticCache`; {steps['DynamicCache']:.1f} with `DynamicCache`",
        ),
        (
            "waste: share of the used memory without tokens, requests of the Azure trace",
            waste["token-major"],
            f"{waste['block 16']} with a block table; {waste['static']} with room for 8,192 tokens each",
        ),
    ]
    return ("one GPU", "vmmkv", "others"), [(what, f"**{ours}**", theirs) for what, ours, theirs in rows]


def served_line(result: Row) -> tuple[str, str, str]:
    """Tokens a second of compiled continuous batching on rows, and of others with the same requests and memory."""
    served = {row["system"]: f"{row['tokens_per_s']:,.0f}" for row in result["served"]}
    of_vllm = [row["tokens_per_s"] for row in result["vllm"]["served"]]
    vllm = f"{median(of_vllm):,.0f} by vLLM {result['vllm']['version']}" if of_vllm else "vLLM not run"
    what = f"output tokens a second, many requests at a time, {result['model']}"
    return what, served["rows, compiled"], f"{vllm}; {served['blocks, sdpa']} by transformers with its own cache"


def checked_kernels(result: Row) -> str:
    return f"{markdown(*check_kernels.table(result))}\n\n{check_kernels.told_versions(result)}"


def serving(result: Row) -> str:
    """All tables of a result of serving."""
    return "\n\n".join(markdown(*lines) for lines in serve.tables(result).values())


TABLES = {
    "headline": Table(
        ("batching_gpu.json", "batching_qwen3_gpu.json", "generate_gpu.json", "fragmentation.json"), headline
    ),
    "core": Table(("core_gpu.json",), core.table),
    "core-null": Table(("core_null_gpu.json",), core.table),
    "mapper-decode": Table(("mapper_gpu.json",), mapper.decode_table),
    "mapper-launches": Table(("mapper_gpu.json",), mapper.launch_table),
    "mapper-prompts": Table(("mapper_gpu.json",), mapper.prompt_table),
    "static-reservation": Table(("fragmentation.json",), fragmentation.reservation_table),
    "fragmentation-waste": Table(("fragmentation.json",), fragmentation.waste_table),
    "fragmentation-batch": Table(("fragmentation.json",), fragmentation.batch_table),
    "generate-step": Table(
        ("generate_gpu.json",), generate.table("ms a decode step", generate.step_ms, shapes=generate.SHAPES)
    ),
    "generate-memory": Table(
        ("generate_gpu.json",), generate.table("peak of K and V over live K and V", generate.peak)
    ),
    "generate-copies": Table(("generate_gpu.json",), generate.table("bytes copied in a step", generate.copied)),
    "batching": Table(("batching_gpu.json",), batching.table),
    "batching-qwen3": Table(("batching_qwen3_gpu.json",), batching.table),
    "batching-first-tokens": Table(("batching_gpu.json",), batching.first_tokens_table),
    "rows-beside-blocks": Table(
        ("serve_rounds_gpu.json", "serve_rounds_qwen3_gpu.json", "serve_reuse_gpu.json"), serve.rows_beside_blocks
    ),
    **{
        f"serve-{name.replace('_', '-')}": Table((f"serve_{name}_gpu.json",), serving)
        for name in ("rounds", "rounds_qwen3", "reuse", "vllm")
    },
    "attention-decode": Table(("attention_gpu.json",), attention.decode_table),
    "attention-prefill": Table(("attention_gpu.json",), attention.prefill_table),
    "attention-shapes": Table(("attention_shapes_gpu.json",), attention.shapes_table),
    "attention-prompts": Table(("attention_prompts_gpu.json",), attention.prompts_table),
    "checked-kernels": Table(("check_kernels_gpu.json",), checked_kernels),
    "samples": Table(("sharing_gpu.json",), sharing.table),
    "beginnings": Table(("prefixes_gpu.json",), prefixes.table),
    "prefix-matches": Table(("prefix_tree.json",), prefix_tree.table),
    "swapping": Table(("swap_gpu.json",), swap.table),
    "handing-over": Table(("transfer_gpu.json",), transfer.table),
    "pools": Table(("pools_gpu.json",), pools.table),
    "pool-moves": Table(("pools_gpu.json",), pools.move_table),
    "rollouts": Table(("rollouts_gpu.json",), rollouts.table),
    "eight-bits": Table(("eight_bits.json",), eight_bits.table),
}
