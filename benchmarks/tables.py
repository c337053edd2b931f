"""The tables that `benchmarks.report` writes: a function for each, from result files to Markdown.

A function's name, with hyphens, is the table's name. To add one, write it under `@table` with the files that it reads;
one of several results goes into `TABLES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from vmmkv import KVLayout
from vmmkv.cli.output import format_bytes
from vmmkv.schemes import BLOCK_TOKENS

from . import (
    batching_tables,
    check_kernels,
    comparisons,
    counters_tables,
    eight_bits_tables,
    fragmentation,
    idle,
    mapper,
    overread,
    pools,
    prefix_trace,
    prefix_tree,
    prefixes,
    reuse,
    room,
    scale,
    sharing,
    sleeping,
    step_times,
    swap,
    transfer,
)
from .attention import comparisons as kernel_comparisons
from .attention import tables as attention_tables
from .layout_order import tables as layout_order_tables
from .serve import report as serving
from .virtual import SCHEMES

Result = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Writes Markdown from the results in `sources`, files of `benchmarks/results/`; see `newest` for `_gpu`."""

    sources: tuple[str, ...]
    write: Callable[..., str | None]
    """Returns None if the result lacks the table; the text on the page then stays."""


TABLES: dict[str, Table] = {}


def table(*sources: str) -> Callable[[Callable[..., str | None]], Callable[..., str | None]]:
    def register(write: Callable[..., str | None]) -> Callable[..., str | None]:
        TABLES[write.__name__.replace("_", "-")] = Table(sources, write)
        return write

    return register


NOT_MEASURED = "Not measured yet."
"""The cell for measurements that a result lacks."""


def markdown(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table, or `NOT_MEASURED` without rows."""
    rows = list(rows)
    if not rows:
        return NOT_MEASURED
    head, *lines = (f"| {' | '.join(cells)} |" for cells in (columns, *rows))
    return "\n".join([head, "|---" * len(columns) + "|", *lines])


def comparisons_table(rows: Iterable[Result]) -> str:
    return markdown(comparisons.COLUMNS, comparisons.lines(rows))


# ------------------------------------------------------------------ the first screen


@table("batching_gpu.json", "batching_qwen3_gpu.json", "generate_gpu.json", "demo_azure_gpu.json")
def headline(large: Result, small: Result, generated: Result, replayed: Result) -> str:
    """The main figures beside those of others; for each transformers cache the fastest way to decode with it."""
    steps = {
        cache: min(float(step_ms(cell)) for cell in cells)
        for cache in ("VmmCache", "StaticCache", "DynamicCache")
        if (
            cells := [
                cell for cell in generated["cells"] if is_long_batch(cell) and cell["contender"].startswith(cache)
            ]
        )
    }
    waste = {scheme: f"{part:.1%}" for scheme, part in replayed["waste"].items()}
    rows = [
        *map(batching_line, (large, small)),
        (
            "milliseconds of a decode step of `generate`, 8 prompts of 32,768 tokens, Llama-3.1-8B",
            str(steps["VmmCache"]),
            f"{steps['StaticCache']} with `StaticCache`; {steps['DynamicCache']} with `DynamicCache`",
        ),
        (
            "waste: share of the used memory without tokens, requests of the Azure trace",
            waste["vmmkv"],
            f"{waste['block_table_16']} with a block table; {waste['static']} with room for 8,192 tokens each",
        ),
    ]
    return markdown(("one GPU", "vmmkv", "others"), ((what, f"**{ours}**", theirs) for what, ours, theirs in rows))


def batching_line(result: Result) -> tuple[str, str, str]:
    """Tokens a second of compiled continuous batching on rows, and of others with the same requests and memory."""
    served = {row["system"]: f"{row['tokens_per_s']:,.0f}" for row in result["served"]}
    of_vllm = [row["tokens_per_s"] for row in result["vllm"]["served"]]
    vllm = f"{median(of_vllm):,.0f} by vLLM {result['vllm']['version']}" if of_vllm else "vLLM not run"
    what = f"output tokens a second, many requests at a time, {result['model']}"
    return what, served["rows, compiled"], f"{vllm}; {served['blocks, sdpa']} by transformers with its own cache"


def is_long_batch(cell: Result) -> bool:
    return (cell["model"], cell["batch"], cell["prompt"]) == ("Llama-3.1-8B", 8, 32_768)


# ------------------------------------------------------------------ the demo and the allocator


@table("demo_azure_gpu.json")
def demo(result: Result) -> str:
    labels = {
        "static": "static reservation of 8192 tokens",
        "per_layer": "2 MiB pages, a tensor per layer and K/V",
        "block_table_16": "block table, 16 tokens",
        "vmmkv": "**vmmkv**",
    }
    rows = [(label, f"{result['waste'][scheme]:.1%}") for scheme, label in labels.items()]
    label, waste = rows[-1]
    rows[-1] = label, f"**{waste}**"
    return markdown(("scheme, same live sequences", "allocated bytes without a token"), rows)


@table("demo_azure_gpu.json")
def demo_pages(result: Result) -> str:
    return (
        "{pages_created:,} pages were created and served {page_uses:,} times ({reuse_factor:.0f} uses a page); "
        "{adoptions:,} sequences started on a\nrow that was mapped already. All driver calls together took "
        "{driver_seconds:.1f} s of the {seconds:.0f} s that the replay took (it writes\nK and V, but runs no model). "
        "The worst of {checks:,} attention outputs was off by {max_error:.1%} of its norm from float64: bf16."
    ).format(**result)


@table("allocator_gpu.json")
def allocator(result: Result) -> str:
    rows = []
    for part, what in (("growth_new", "new pages"), ("growth_reclaimed", "pages of a parked row")):
        for row in sorted(result[part], key=lambda row: -row["pages_a_step"]):
            pages = row["pages_a_step"]
            name = f"`extend` onto {what}, {'one' if pages == 1 else pages} at a time"
            if row.get("large_frames"):  # older results have none
                name += ", large frames"
            ours, by_hand = ranged(row, "extend"), ranged(row, "raw")
            rows.append((name, f"{ours} µs a page", f"{by_hand} µs", f"{row['ratio']:.2f}"))
    steps = {row["crossing"]: row for row in result["batch_step"]}
    rows.append(("decode step of 256 sequences, none needs a page", duration(steps[0]["step_us"]), "", ""))
    for crossing, name in ((16, "16 of them need one"), (256, "all of them")):
        row = steps[crossing]
        rows.append((name, duration(row["step_us"]), duration(row["raw_us"]), f"{row['ratio']:.2f}"))
    one, empty = result["adoption"][0], result["torch_empty"][0]
    assert not one["driver_calls"]
    rows.append(("free a sequence", f"{duration(one['free_us'])}, no driver call", "", ""))
    rows.append(("start one on a parked row", f"{duration(one['adopt_us'])}, no driver call", "", ""))
    both = f"{duration(empty['fresh_us'])} new, {empty['cached_us']:.1f} µs from torch's cache"
    rows.append(("for comparison, `torch.empty` of 2 MiB", both, "", ""))
    return markdown(("operation", "vmmkv", "the same driver calls by hand", "ratio"), rows)


@table("fences_gpu.json")
def fences(result: Result) -> str:
    rows = [
        (row["call"], f"{row['us']:.2f} µs ({row['p10_us']:.2f} to {row['p90_us']:.2f})") for row in result["calls"]
    ]
    return markdown(("call", "takes"), rows)


@table("core_gpu.json")
def core(result: Result) -> str:
    return books(result)


@table("core_null_gpu.json")
def core_null(result: Result) -> str:
    return books(result)


def books(result: Result) -> str:
    """The allocator beside the same driver calls by hand, in microseconds."""
    rows = [
        (case["case"], *(among(case["sides"].get(name)) for name in ("core", "by hand")))
        for case in result["cases"]
        if "core" in case["sides"]
    ]
    return markdown(("µs", "core", "the same driver calls by hand"), rows)


def among(took: Result | None) -> str:
    """Microseconds, and in brackets the range of four rounds in five."""
    return f"{took['us']:,.1f} ({took['p10_us']:,.1f} to {took['p90_us']:,.1f})" if took else ""


def ranged(row: Result, name: str) -> str:
    """Microseconds, and in brackets the range of four rounds in five, which older results lack."""
    low, high = (row.get(f"{name}_{quantile}_us") for quantile in ("p10", "p90"))
    return f"{row[f'{name}_us']:.1f}" + (f" ({low:.1f} to {high:.1f})" if low is not None else "")


def duration(microseconds: float) -> str:
    return f"{microseconds:.0f} µs" if microseconds < 1000 else f"{microseconds / 1000:.1f} ms"


# ------------------------------------------------------------------ attention

LAYOUTS = {"contiguous": "contiguous", "token-major": "token-major", "paged-16": "blocks of 16"}
KERNELS = {
    "vmmkv, auto": "**vmmkv**",
    "SDPA, cuDNN": "cuDNN through SDPA",
    "FlashAttention-3": "FlashAttention-3",
    "FlashInfer, tensor cores": "FlashInfer, tensor cores",
    "FlashInfer": "FlashInfer",
}
ABSENT = {
    ("SDPA, cuDNN", "paged-16"): "cannot",
    ("FlashAttention-3", "token-major"): "not run: it reads past a sequence's end",
    ("FlashAttention-3", "paged-16"): "not in this build",
}


@table("attention_gpu.json")
def attention_decode(result: Result) -> str:
    cases = {
        "16 x 4096": "16 x 4,096 tokens",
        "64 x 4096": "64 x 4,096 tokens",
        "ragged": "256 sequences of the Azure trace",
    }
    rows = kernel_rows(result["decode"], cases, "gb_per_s")
    rows.append(("for comparison, a device copy", f"{result['bandwidth']['copy_gb_per_s']:.0f}", "", ""))
    return markdown(("decode, GB/s of K and V read", *LAYOUTS.values()), rows)


@table("attention_gpu.json")
def attention_prefill(result: Result) -> str:
    cases = {"1 x 16384": "1 x 16,384 tokens", "2048 after 30000": "2,048 tokens after 30,000"}
    columns = ("prefill, causal, TFLOP/s", *LAYOUTS.values())
    return markdown(columns, kernel_rows(result["prefill"], cases, "tflops"))


@table("attention_shapes_gpu.json")
def attention_shapes(result: Result) -> str:
    cases = list(dict.fromkeys(row["case"] for row in result["shapes"]))
    found = {(row["shape"], row["case"]): row for row in result["shapes"]}
    shapes = dict.fromkeys(row["shape"] for row in result["shapes"])
    columns = [column for case in cases for column in (f"{grouped(case)} tokens, GB/s", "time of the first line's")]
    rows = [(shape, *(cell for case in cases for cell in shape_cells(found[shape, case]))) for shape in shapes]
    return markdown(("decode, heads", *columns), rows)


@table("attention_prompts_gpu.json")
def attention_prompts(result: Result) -> str:
    rows = [(row["shape"], *attention_tables.prompt_cells(row)) for row in result["prompts"]]
    return markdown(("prefill of 8,192 tokens, heads", "TFLOP/s", "of the first line's"), rows)


@table("attention_prompts_gpu.json")
def attention_mixed(result: Result) -> str:
    rows = [(row["call"], f"{row['microseconds']:.0f}", f"{row['host_microseconds']:.1f}") for row in result["mixed"]]
    return markdown(("2 chunks of 1,024 tokens and 64 single ones", "µs", "µs of the host, of a small step"), rows)


@table("attention_gpu.json")
def attention_cascade(result: Result) -> str:
    rows = [
        (row["case"], row["kernel"], row["layout"], f"{row['microseconds']:.0f}", f"{row['gain']:.2f}")
        for row in result.get("cascade", [])
    ]
    columns = "groups x sequences, tokens", "kernel", "layout", "µs", "times as fast as `decode`"
    return markdown(columns, rows) if rows else NOT_MEASURED


@table("attention_small_gpu.json")
def attention_rotary(result: Result) -> str:
    rows = [
        (row["kernel"], f"{row['sequences']:,}", f"{row['microseconds']:.1f}", f"{row['host_microseconds']:.1f}")
        for row in result.get("rotary", [])
    ]
    return markdown(("kernel", "sequences", "µs", "µs of the host"), rows) if rows else NOT_MEASURED


@table("attention_gpu.json", "attention_small_gpu.json")
def attention_comparisons(result: Result, small: Result) -> str:
    return comparisons_table(kernel_comparisons.compare(result, small))


def grouped(case: str) -> str:
    """The numbers of a case with thousands separators."""
    return " x ".join(f"{int(number):,}" for number in case.split(" x "))


def shape_cells(row: Result) -> tuple[str, str]:
    return f"{row['gb_per_s']:.0f}", f"{row['of_first_time']:.2f}"


def kernel_rows(measured: list[Result], cases: dict[str, str], figure: str) -> list[tuple[str, ...]]:
    """A row for each case and each kernel that ran in it, a cell for each layout."""
    found = {(row["case"], row["kernel"], row["layout"]): f"{row[figure]:.0f}" for row in measured}
    rows = []
    for case, label in cases.items():
        for kernel, name in KERNELS.items():
            cells = [found.get((case, kernel, layout)) for layout in LAYOUTS]
            if any(cells):
                name += f", {label}" if kernel == "vmmkv, auto" else ""
                rows.append((name, *(cell or ABSENT.get((kernel, layout), "") for cell, layout in zip(cells, LAYOUTS))))
    return rows


@table("sleeping_gpu.json")
def sleep_mode(result: Result) -> str:
    return markdown(*sleeping.table(result))


for name in ("conv", "reuse", "mooncake", "wait", "8b"):
    TABLES[f"step-times-{name}"] = Table(
        (f"step_times_{name}_gpu.json",), lambda result: markdown(*step_times.table(result))
    )


@table("overread_gpu.json")
def overread_decode(result: Result) -> str:
    return markdown(*overread.table(result))


@table("overread_gpu.json")
def overread_nan(result: Result) -> str:
    return overread.verdict(result)


@table("check_kernels_gpu.json")
def checked_kernels(result: Result) -> str:
    return f"{markdown(*check_kernels.table(result))}\n\n{check_kernels.told_versions(result)}"


@table("check_kernels_cpu.json")
def checked_kernels_on_the_host(result: Result) -> str:
    return f"{markdown(*check_kernels.table(result))}\n\n{check_kernels.told_versions(result)}"


@table("counters_gpu.json")
def kernel_bounds(result: Result) -> str:
    return markdown(*counters_tables.bounds(result))


@table("counters_gpu.json")
def kernel_stalls(result: Result) -> str:
    return markdown(*counters_tables.stalls(result))


@table("layout_order_waste.json")
def layout_order_waste(result: Result) -> str:
    return markdown(*layout_order_tables.waste_table(result))


@table("layout_order_gpu.json")
def layout_order_speed(result: Result) -> str:
    return markdown(*layout_order_tables.speed_table(result))


# ------------------------------------------------------------------ transformers


@table("generate_gpu.json")
def generate_step(result: Result) -> str:
    shapes = [(1, 512), (1, 8192), (1, 32_768), (8, 512), (8, 32_768), (32, 8192)]
    return generate_table(result["cells"], "ms a decode step", shapes, step_ms)


@table("generate_qwen3_gpu.json")
def generate_step_qwen(result: Result) -> str:
    measured = {(cell["batch"], cell["prompt"]) for cell in result["cells"] if cell["status"] == "measured"}
    return generate_table(result["cells"], "ms a decode step", sorted(measured), step_ms, "Qwen3-0.6B")


def step_ms(cell: Result) -> str:
    return f"{cell['step_ms']:.1f}"


@table("generate_gpu.json")
def generate_memory(result: Result) -> str:
    shapes = [(1, 8192), (8, 32_768), (32, 8192)]
    return generate_table(
        result["cells"],
        "peak of K and V over live K and V",
        shapes,
        lambda cell: f"{cell['kv_peak_bytes'] / cell['live_bytes']:.3f}",
    )


@table("generate_gpu.json")
def generate_copies(result: Result) -> str:
    shapes = [(1, 512), (1, 32_768), (8, 32_768), (32, 8192)]
    plain = [cell for cell in result["cells"] if not cell["compiled"]]
    return generate_table(plain, "bytes copied in a step", shapes, lambda cell: format_bytes(cell["copied_bytes"]))


def generate_table(
    cells: list[Result],
    what: str,
    shapes: list[tuple[int, int]],
    figure: Callable[[Result], str],
    model: str = "Llama-3.1-8B",
) -> str:
    """A figure by batch size and prompt, a row for each way to decode a model, ours in bold."""
    cells = [cell for cell in cells if cell["model"] == model]
    rows = []
    for name in dict.fromkeys(cell["contender"] for cell in cells):
        of = {(cell["batch"], cell["prompt"]): cell for cell in cells if cell["contender"] == name}
        figures = [figure(of[shape]) if of[shape]["status"] == "measured" else of[shape]["status"] for shape in shapes]
        rows.append((f"**{name}**" if name.startswith("VmmCache") else name, *figures))
    return markdown((what, *(f"{batch} x {prompt:,}" for batch, prompt in shapes)), rows)


# ------------------------------------------------------------------ memory


@table("fragmentation.json")
def fragmentation_waste(result: Result) -> str:
    """Waste at the largest budget; it does not depend on the budget."""

    def cell(row: Result) -> str:
        if "error" in row:
            return "does not fit"
        unused = row["unused_tokens"]
        return f"{row['waste']:.1%}, {unused:,.{0 if unused > 100 else 1}f} tokens"

    return schemes_by_models(result, fragmentation.BUDGETS[-1], cell)


@table("fragmentation_ahead.json")
def fragmentation_ahead(result: Result) -> str:
    return markdown(*fragmentation.table_of_frames(result))


@table("fragmentation.json")
def fragmentation_batch_20(result: Result) -> str:
    return batches(result, 20)


@table("fragmentation.json")
def fragmentation_batch_80(result: Result) -> str:
    return batches(result, 80)


def batches(result: Result, gib: int) -> str:
    static = {
        row["model"]: row["sequences"]
        for row in result["runs"]
        if (row["scheme"], row["budget_gib"]) == ("static", gib)
    }

    def cell(row: Result) -> str:
        gain = row["sequences"] / static[row["model"]] if static[row["model"]] else 0
        of_static = f", {gain:.1f} x" if row["scheme"] != "static" and gain else ""
        return f"{row['sequences']:,.0f} (most {row['peak_sequences']:,}){of_static}"

    return schemes_by_models(result, gib, cell)


def schemes_by_models(result: Result, gib: int, cell: Callable[[Result], str]) -> str:
    labels = {
        "static": f"static reservation of {result['max_seq_len']:,} tokens",
        "block 16": "block table, 16 tokens",
        "block 64": "block table, 64 tokens",
        "block 256": "block table, 256 tokens",
        "per layer": "2 MiB pages, a range per layer and K/V",
        "token-major": "**vmmkv**: 2 MiB pages, token-major",
    }
    cells = {(row["scheme"], row["model"]): cell(row) for row in result["runs"] if row["budget_gib"] == gib}
    rows = [(labels[scheme], *(cells[scheme, model] for model in fragmentation.MODELS)) for scheme in SCHEMES]
    return markdown((f"{gib} GiB", *fragmentation.MODELS), rows)


@table("fragmentation.json")
def static_reservation(result: Result) -> str:
    rows = [
        (f"{row['max_seq_len']:,} tokens", f"{row['requests']:,}", f"{row['waste']:.1%}")
        for row in result["reservations"]
    ]
    return markdown(("reserved for each sequence", "requests that fit", "waste"), rows)


# ------------------------------------------------------------------ serving


def serving_table(result: Result, load: str) -> str | None:
    """The first trace under a load with this end of its name, or None if the run ended before it."""
    tables = serving_tables(result, load)
    return tables[0] if tables else None


def rates_tables(result: Result) -> str | None:
    """A table for each rate, or None if the run ended before the first."""
    return "\n\n".join(serving_tables(result, "load")) or None


def serving_tables(result: Result, load: str) -> list[str]:
    """A table for each trace and load with this end of its name, of the backends that finished a request."""
    ended = [row for row in result["serving"] if row["finished"]]
    cases = [case for case in serving.by_case(ended) if case[0].endswith(load)]
    return [markdown((name, *backends), serving.figure_lines(backends)) for name, backends in cases]


def prompts_table(result: Result) -> str | None:
    """The table of long prompts, or None if the run ended before the first."""
    columns = "backend, kernel", "tokens/s", "attention alone", "its share of the time"
    return markdown(columns, map(serving.prompt_line, result["prefill"])) if result["prefill"] else None


def serving_comparisons(result: Result) -> str:
    return comparisons_table(serving.compare(result))


for name, source in (("rates", "serve_rates_gpu.json"), ("rates-qwen3", "serve_rates_qwen3_gpu.json")):
    TABLES[f"{name}-saturation"] = Table((source,), partial(serving_table, load="saturation"))
    TABLES[f"{name}-load"] = Table((source,), rates_tables)
    TABLES[f"{name}-comparisons"] = Table((source,), serving_comparisons)
TABLES["rates-prompts"] = Table(("serve_rates_gpu.json",), prompts_table)
for name, load in (("unknown", "lengths unknown"), ("busy", "thread beside"), ("code", "_code, saturation")):
    TABLES[f"rates-{name}"] = Table(("serve_rates_gpu.json",), partial(serving_table, load=load))
for name, source in (("rounds", "serve_rounds_gpu.json"), ("rounds-qwen3", "serve_rounds_qwen3_gpu.json")):
    TABLES[f"{name}-ahead"] = Table((source,), partial(serving_table, load="saturation"))
    TABLES[f"{name}-waiting"] = Table((source,), partial(serving_table, load="waited for"))
    TABLES[f"{name}-comparisons"] = Table((source,), serving_comparisons)
for name, source in (
    ("serve-vllm", "serve_vllm_gpu.json"),
    ("serve-vllm-qwen3", "serve_vllm_qwen3_gpu.json"),
    ("serve-pressure", "serve_pressure_gpu.json"),
    ("serve-peers", "serve_peers_gpu.json"),
):
    TABLES[f"{name}-saturation"] = Table((source,), partial(serving_table, load="saturation"))
    TABLES[f"{name}-comparisons"] = Table((source,), serving_comparisons)
TABLES["serve-vllm-qwen3-load"] = Table(("serve_vllm_qwen3_gpu.json",), rates_tables)


for name, load in (("mooncake", "mooncake_conversation, saturation"), ("system", "system prompts, saturation")):
    TABLES[f"serve-reuse-{name}"] = Table(("serve_reuse_gpu.json",), partial(serving_table, load=load))
TABLES["serve-reuse-comparisons"] = Table(("serve_reuse_gpu.json",), serving_comparisons)


@table("serve_rounds_gpu.json", "serve_rounds_qwen3_gpu.json", "serve_reuse_gpu.json")
def rows_beside_blocks(large: Result, small: Result, reused: Result) -> str:
    """Output tokens a second of one engine with the same kernels on both, medians of all rounds."""
    rows = []
    for result in (large, small, reused):
        for name, measured in serving.by_case(result["serving"]):
            for ours, other, with_reuse in (("vmm", "paged", ""), ("vmm+reuse", "paged+reuse", ", prefix reuse")):
                if {ours, other} <= measured.keys():
                    speeds = [serving.typical(measured[each], "output_tokens_per_s") or 0.0 for each in (ours, other)]
                    case = f"{result['model']}, {name}{with_reuse}"
                    rows.append((case, *(f"{speed:,.0f}" for speed in speeds), f"{speeds[0] / speeds[1]:.3f}"))
    return markdown(("output tokens/s", "rows", "blocks of 16", "rows over blocks"), rows)


@table("reuse_gpu.json")
def page_reuse(result: Result) -> str:
    return markdown(("", *(case["case"] for case in result["cases"])), reuse.table(result))


@table("idle_gpu.json")
def idle_memory(result: Result) -> str:
    return markdown(("", *(run["mode"] for run in result["runs"])), idle.table(result))


@table("scale.json")
def scale_of_rows(result: Result) -> str:
    return markdown(*scale.table(result))


@table("scale.json")
def scale_of_pages(result: Result) -> str:
    return markdown(*scale.table_of_pages(result))


# ------------------------------------------------------------------ mapping ahead, and two models on one pool


@table("mapper_gpu.json")
def mapper_decode(result: Result) -> str:
    return markdown(*mapper.decode_table(result))


@table("mapper_gpu.json")
def mapper_launches(result: Result) -> str:
    return markdown(*mapper.launch_table(result))


@table("mapper_gpu.json")
def mapper_prompts(result: Result) -> str:
    return markdown(*mapper.prompt_table(result))


def modes_table(result: Result) -> str:
    return markdown(("", *pools.columns(result)), pools.table(result))


def moves_table(result: Result) -> str:
    return markdown(pools.MOVES, pools.moves(result))


TABLES["pools"] = Table(("pools_gpu.json",), modes_table)
TABLES["pool-moves"] = Table(("pools_gpu.json",), moves_table)
TABLES["pool-comparisons"] = Table(("pools_gpu.json",), lambda result: comparisons_table(pools.compare(result)))


# ------------------------------------------------------------------ forks


@table("sharing_gpu.json")
def forking(result: Result) -> str:
    return markdown(*sharing.fork_table(result))


@table("sharing_gpu.json")
def forking_kernels(result: Result) -> str:
    return markdown(*sharing.kernel_table(result))


@table("sharing_gpu.json")
def samples(result: Result) -> str:
    return markdown(*sharing.sample_table(result))


@table("prefixes_gpu.json")
def beginnings(result: Result) -> str:
    return markdown(*prefixes.start_table(result))


@table("prefix_tree.json")
def prefix_matches(result: Result) -> str:
    return markdown(*prefix_tree.table(result))


@table("prefix_trace.json")
def prefix_trace_hits(result: Result) -> str:
    return markdown(*prefix_trace.hit_table(result))


@table("room.json")
def room_for_requests(result: Result) -> str:
    return markdown(*room.table(result))


# ------------------------------------------------------------------ the host, and other processes


@table("swap_gpu.json")
def swapping(result: Result) -> str:
    return markdown(*swap.way_table(result))


@table("transfer_gpu.json")
def handing_over(result: Result) -> str:
    return markdown(*transfer.way_table(result))


@table()
def cache_sizes() -> str:
    """Sizes by arithmetic, from `KVLayout`."""
    cases = {
        f"Llama-2-13B (40 layers, 40 KV heads of 128), {BLOCK_TOKENS} tokens": (KVLayout(40, 40, 128), BLOCK_TOKENS),
        "32 layers, 32 KV heads of 64, 4 x 2,048 tokens": (KVLayout(32, 32, 64, torch.float16), 4 * 2048),
        "the same with 8 KV heads": (KVLayout(32, 8, 64, torch.float16), 4 * 2048),
    }
    rows = []
    for what, (layout, tokens) in cases.items():
        nbytes = tokens * layout.token_bytes
        rows.append((what, f"{layout.token_bytes:,}", f"{nbytes:,}", format_bytes(nbytes), f"{nbytes / 1e6:,.1f} MB"))
    return markdown(("K and V in 16 bits", "bytes a token", "bytes", "binary", "decimal"), rows)


# ------------------------------------------------------------------ continuous batching


@table("batching_gpu.json")
def batching(result: Result) -> str:
    return markdown(*batching_tables.batching_table(result))


@table("batching_qwen3_gpu.json")
def batching_qwen3(result: Result) -> str:
    return markdown(*batching_tables.batching_table(result))


@table("batching_gpu.json")
def batching_first_tokens(result: Result) -> str:
    return markdown(*batching_tables.first_tokens_table(result))


@table("batching_gpu.json")
def batching_comparisons(result: Result) -> str:
    return comparisons_table(batching_tables.compare(result))


@table("batching_ranks_gpu.json")
def batching_ranks(result: Result) -> str:
    return markdown(*batching_tables.ranks_table(result))


@table("batching_ranks_gpu.json")
def batching_ranks_comparisons(result: Result) -> str:
    return comparisons_table(batching_tables.compare_ranks(result))


# ------------------------------------------------------------------ 8 bits


@table("eight_bits.json")
def eight_bits_logits(result: Result) -> str:
    return markdown(*eight_bits_tables.logits_table(result))


@table("eight_bits.json")
def eight_bits_rounding(result: Result) -> str:
    return markdown(*eight_bits_tables.rounding_table(result))
