"""The command `vmmkv demo`: continuous batching on a laptop or a GPU, checked against float64."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from .. import VACANT_PAGE, InvariantError, KVCache, KVLayout
from ..driver.driver import open_driver
from ..schemes import SCHEMES, allocated_bytes
from ..workload import Request, conversations, read_trace
from .output import Device, JsonOutput, TraceFile, check_plot, console, errors, format_bytes, make_table, print_json
from .replay import Replay

TRUE_LAYOUT = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
"""Llama-3.1-8B: 128 KiB a token, 16 tokens in a 2 MiB page."""
SMALL_LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=64, dtype=torch.float32)
"""The same at 1/32, for the host: 4 KiB a token, 16 tokens in a 64 KiB page."""
SMALL_PAGE = 64 << 10
ERROR_BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
"""Relative errors of attention that rounding can explain."""
REQUESTS = 300
"""Requests that are replayed by default."""
HOST_TOKENS = 100_000
"""Tokens of a trace that are replayed on the host by default: prompts may be long."""
STATIC_TOKENS = 8192
"""Tokens that a static reservation keeps for each sequence, or those of the longest request if that is longer."""
LABELS = {
    "static": ("static reservation", "any"),
    "block_table_16": ("block table, 16 tokens", "with block tables"),
    "per_layer": ("per layer, 2 MiB pages", "any"),
    "vmmkv": ("vmmkv, 2 MiB pages", "any"),
}
"""By scheme its name, and which attention kernels run on it."""


def demo(
    trace: TraceFile = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"How many to replay: {REQUESTS}; on the host of a trace those of the first {HOST_TOKENS:,} tokens.",
        ),
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="How many may run at a time.")] = 48,
    budget_tokens: Annotated[int, typer.Option(min=1024, help="The budget, in tokens.")] = 40_960,
    check_every: Annotated[int, typer.Option(min=1, help="Steps between two checks of attention and books.")] = 25,
    device: Device = None,
    seed: Annotated[int, typer.Option(min=0, help="Of lengths and contents.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of the page map over time.")] = None,
    json_output: JsonOutput = False,
) -> None:
    """Replay requests with continuous batching under a budget, and check attention on the rows.

    Sequences arrive, grow token by token, finish, and their pages are reused. K and V are written for real; at
    regular steps ordinary attention on the rows is compared with float64. Exits with 1 where an error bound or an
    invariant breaks. On a GPU it runs Llama-3.1-8B's geometry, on the host the same at 1/32.
    """
    if plot:
        check_plot(plot)
    rng = np.random.default_rng(seed)
    work = _chosen(read_trace(trace), requests, device) if trace else conversations(requests or REQUESTS, rng)
    longest = max(request.total for request in work)
    cache = make_cache(device, sequences, max(longest, STATIC_TOKENS), max(budget_tokens, longest))
    replay = Replay(cache, work, check_every, rng)
    start = perf_counter()
    try:
        columns = TextColumn("Replaying tokens"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
        with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
            task = progress.add_task("", total=sum(request.total for request in work))
            replay.run(lambda tokens: progress.advance(task, tokens))
    except InvariantError as error:
        errors.print(f"An invariant broke: {error}", style="red")
        raise typer.Exit(1) from None
    result = _result(replay, len(work), perf_counter() - start)
    if plot:
        _plot(replay, plot)
    if json_output:
        print_json(result)
    else:
        _print(result, plot)
    if not result["max_error"] <= result["error_bound"]:
        errors.print(
            f"Attention is wrong by {result['max_error']:.1e}; the bound is {result['error_bound']}", style="red"
        )
        raise typer.Exit(1)


def _chosen(found: list[Request], requests: int | None, device: str | None) -> list[Request]:
    """The requests of a trace that are replayed; prints how many."""
    work = found[: requests or REQUESTS]
    if requests is None and open_driver(device).device.type == "cpu":
        before = accumulate((request.total for request in work), initial=0)
        work = [request for request, tokens in zip(work, before) if tokens < HOST_TOKENS]
    tokens = sum(request.total for request in work)
    errors.print(f"Replaying {len(work):,} of {len(found):,} requests, {tokens:,} tokens; --requests takes others")
    return work


def make_cache(device: str | None, sequences: int, max_seq_len: int, max_tokens: int) -> KVCache:
    """A cache of the true geometry on a GPU, of the small one on the host."""
    driver = open_driver(device)
    page_size, layout = driver.page_size, TRUE_LAYOUT
    if driver.device.type == "cpu":
        page_size, layout = SMALL_PAGE, SMALL_LAYOUT
    max_bytes = layout.pages(max_tokens, page_size) * page_size
    return KVCache(
        layout,
        sequences,
        max_seq_len,
        max_bytes=max_bytes,
        device=driver.device,
        page_size=page_size,
        large_frames=False,  # so that the picture shows single pages
    )


def _result(replay: Replay, requests: int, seconds: float) -> dict[str, Any]:
    """All figures of a run. Waste is that of the same live sequences, by each scheme, at true geometry."""
    cache = replay.cache
    stats = cache.stats()
    tokens = np.array([lengths.sum() for lengths in replay.lengths])
    held, peak = tokens * TRUE_LAYOUT.token_bytes, tokens.argmax()
    taken = {
        scheme: np.array(
            [allocated_bytes(scheme, TRUE_LAYOUT, each, cache.max_seq_len).sum() for each in replay.lengths]
        )
        for scheme in SCHEMES
    }
    return {
        "device": torch.cuda.get_device_name(cache.device) if cache.device.type == "cuda" else str(cache.device),
        "requests": requests,
        "tokens": sum(request.total for request in replay.requests),
        "steps": replay.batching.steps,
        "preemptions": replay.batching.preemptions,
        "peak_sequences": max(map(len, replay.lengths)),
        "peak_tokens": int(tokens[peak]),
        "budget_bytes": stats.budget_bytes,
        "token_bytes": cache.layout.token_bytes,
        "page_size": cache.page_size,
        "waste": {scheme: float(1 - held.sum() / each.sum()) for scheme, each in taken.items()},
        "waste_at_peak": {scheme: float(1 - held[peak] / each[peak]) for scheme, each in taken.items()},
        "waste_measured": float(np.mean(replay.waste)),
        "pages_created": stats.pages_created,
        "page_uses": stats.page_uses,
        "reuse_factor": stats.reuse_factor,
        "adoptions": stats.adoptions,
        "driver_calls": {name: call.count for name, call in stats.driver_calls.items()},
        "driver_seconds": stats.driver_seconds,
        "seconds": seconds,
        "checks": replay.checks,
        "max_error": replay.max_error,
        "error_bound": ERROR_BOUNDS[cache.layout.dtype],
    }


def _print(result: dict[str, Any], plot: Path | None) -> None:
    """Compares the schemes in a table; then says what was replayed, what was checked, and what rows cost and save."""
    waste = {scheme: f"{share:.1%}" for scheme, share in result["waste"].items()}
    rows = [
        (name, waste[scheme], f"{result['waste_at_peak'][scheme]:.1%}", kernels)
        for scheme, (name, kernels) in LABELS.items()
    ]
    columns = "scheme", "over time", "at the peak", "attention kernels"
    console.print(make_table("Waste: memory that holds no token (Llama-3.1-8B, bf16)", columns, rows))
    console.print(
        f"Replayed {result['requests']:,} requests of {result['tokens']:,} tokens on {result['device']}, up to "
        f"{result['peak_sequences']} at a time, with {format_bytes(result['budget_bytes'])} for K and V.\n"
        f"Checked attention on the rows against float64 {result['checks']:,} times: the largest relative error is "
        f"{result['max_error']:.1e}, and up to {result['error_bound']} is rounding.\n"
        f"Rows leave {waste['vmmkv']} of their memory without tokens, as a block table does "
        f"({waste['block_table_16']}), but any attention kernel runs on them; a static reservation leaves "
        f"{waste['static']}. Each page was used {result['reuse_factor']:.1f} times, and calls of the memory system "
        f"took {result['driver_seconds'] / result['seconds']:.1%} of the time."
    )
    if plot:
        console.print(f"The picture of all pages over time is {plot}.")


def _plot(replay: Replay, path: Path) -> None:
    """Time to the right, physical pages upwards, a colour for each sequence."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    legend = {"no memory": "white", "no tokens": "lightgrey"}
    colours: list[Any] = [colormaps["tab20"](index) for index in range(20) if index not in (14, 15)]  # these are grey
    steps = [step for step, _ in replay.page_maps]
    picture = np.zeros((max(len(pages) for _, pages in replay.page_maps), len(steps)), int)
    for column, (_, pages) in enumerate(replay.page_maps):
        picture[: len(pages), column] = np.where(pages >= 0, len(legend) + pages * 7 % len(colours), 1)
        picture[: len(pages), column][pages == VACANT_PAGE] = 0
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    axes.imshow(
        picture,
        cmap=ListedColormap([*legend.values(), *colours]),
        vmin=0,
        vmax=len(legend) + len(colours) - 1,
        aspect="auto",
        interpolation="nearest",
        origin="lower",
        extent=(steps[0], steps[-1] + 1, 0, len(picture)),
    )
    axes.set(xlabel="decode step", ylabel="physical page", title="What each physical page holds")
    patches = [
        Patch(facecolor=colour, edgecolor="grey", label=label)
        for code, (label, colour) in enumerate(legend.items())
        if (picture == code).any()
    ]
    figure.legend(
        handles=[*patches, Patch(facecolor="C0", label="one sequence, each in its colour")],
        loc="outside lower center",
        ncols=5,
    )
    figure.savefig(path, dpi=150)
