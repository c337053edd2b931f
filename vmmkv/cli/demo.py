"""The command `vmmkv demo`: the main job, on a laptop or a GPU, checked against float64."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import Progress

from .. import VACANT_PAGE, InvariantError, KVCache, KVLayout
from ..driver.driver import open_driver
from ..environment import environment
from ..schemes import SCHEMES, allocated_bytes
from ..workload import Request, conversations, known_tokens, read_trace
from .options import Device, JsonOutput, TraceFile
from .output import check_plot, console, errors, format_bytes, make_table, print_json
from .replay import Replay

TRUE_LAYOUT = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
"""Llama-3.1-8B: 128 KiB a token, 16 tokens in a 2 MiB page."""
SMALL_LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=64, dtype=torch.float32)
"""The same at 1/32, for the host: 4 KiB a token, 16 tokens in a 64 KiB page."""
SMALL_PAGE = 64 << 10
ERROR_BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
"""Relative errors of attention that rounding can explain."""
REQUESTS = 300
"""That are replayed, unless others are asked for."""
HOST_TOKENS = 100_000
"""And on the host no more of a trace than come to so many: prompts may be long."""
STATIC_TOKENS = 8192
"""What static reservation keeps for each sequence, or the longest request where that is more."""
LABELS = ("static reservation", "block table, 16 tokens", "per layer, 2 MiB pages", "vmmkv, 2 MiB pages")


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
    regular steps ordinary attention on the rows is compared with float64. Prompts of a trace that tells what they have
    in common (Mooncake's `hash_ids`) begin with K and V that are there, as far as these are kept. Exits with 1 where
    an error bound or an invariant breaks. On a GPU it runs Llama-3.1-8B's geometry, on the host the same at 1/32.
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
        with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
            task = progress.add_task("Replaying requests", total=len(work))
            for finished in replay.run():
                progress.update(task, completed=finished)
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
    """The requests of a trace that are replayed; says how many these are."""
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
        large_frames=False,  # so that it can be told what becomes of each page
    )


def _result(replay: Replay, requests: int, seconds: float) -> dict[str, Any]:
    """All figures of a run. Waste is that of the same live sequences, by each scheme, at true geometry."""
    cache = replay.cache
    stats = cache.stats()
    peak = max(range(len(replay.lengths)), key=lambda step: replay.lengths[step].sum())
    waste, waste_at_peak = {}, {}
    for scheme in SCHEMES:
        allocated = [
            allocated_bytes(scheme, TRUE_LAYOUT, lengths, cache.max_seq_len).sum() for lengths in replay.lengths
        ]
        held = np.array([lengths.sum() for lengths in replay.lengths]) * TRUE_LAYOUT.token_bytes
        waste[scheme] = float(1 - held.sum() / np.sum(allocated))
        waste_at_peak[scheme] = float(1 - held[peak] / allocated[peak])
    return {
        "device": torch.cuda.get_device_name(cache.device) if cache.device.type == "cuda" else str(cache.device),
        "environment": environment(cache.device),
        "requests": requests,
        "steps": replay.batching.steps,
        "preemptions": replay.batching.preemptions,
        "peak_sequences": max(map(len, replay.lengths)),
        "peak_tokens": int(replay.lengths[peak].sum()),
        "budget_bytes": stats.budget_bytes,
        "token_bytes": cache.layout.token_bytes,
        "page_size": cache.page_size,
        "waste": waste,
        "waste_at_peak": waste_at_peak,
        "waste_measured": float(np.mean(replay.waste)),
        "prompt_tokens": sum(request.prompt for request in replay.requests),
        "cached_tokens": sum(replay.cached),
        "known_tokens": sum(known_tokens(replay.requests)),
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
    calls = sum(result["driver_calls"].values())
    share = result["driver_seconds"] / result["seconds"]
    console.print(
        make_table(
            "Waste: allocated bytes that hold no token (Llama-3.1-8B, bf16)",
            ("scheme", "over time", "at the peak"),
            [
                (label, f"{result['waste'][scheme]:.1%}", f"{result['waste_at_peak'][scheme]:.1%}")
                for label, scheme in zip(LABELS, SCHEMES)
            ],
        )
    )
    found, known = (f"{result[tokens] / result['prompt_tokens']:.1%}" for tokens in ("cached_tokens", "known_tokens"))
    reuse = [("prompt tokens that were cached", f"{found} (the trace allows {known})")]
    page, budget = format_bytes(result["page_size"]), format_bytes(result["budget_bytes"])
    console.print(
        make_table(
            f"vmmkv on {result['device']}, pages of {page}, budget {budget}",
            ("what", "this run"),
            [
                ("requests, decode steps", f"{result['requests']:,}, {result['steps']:,}"),
                ("most sequences, tokens at a time", f"{result['peak_sequences']}, {result['peak_tokens']:,}"),
                ("sequences preempted for want of pages", f"{result['preemptions']:,}"),
                ("waste, measured", f"{result['waste_measured']:.1%}"),
                ("pages created, page uses", f"{result['pages_created']:,}, {result['page_uses']:,}"),
                ("reuse factor", f"{result['reuse_factor']:.1f}"),
                ("sequences that adopted mapped pages", f"{result['adoptions']:,}"),
                *(reuse if result["known_tokens"] else ()),
                ("driver calls, share of the time", f"{calls:,}, {share:.1%} of {result['seconds']:.1f} s"),
                ("attention checks", f"{result['checks']:,}"),
                ("worst attention error against float64", f"{result['max_error']:.1e} (bound {result['error_bound']})"),
            ],
        )
    )
    if plot:
        console.print(f"Page map over time: {plot}")


def _plot(replay: Replay, path: Path) -> None:
    """Time to the right, physical pages upwards, a colour per sequence."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    colours = 20
    steps = [step for step, _ in replay.page_maps]
    picture = np.full((max(len(pages) for _, pages in replay.page_maps), len(steps)), 0)
    for column, (_, pages) in enumerate(replay.page_maps):
        # 0 does not exist (yet), 1 free or surplus, from 2 on a colour that neighbours in time do not share
        picture[: len(pages), column] = np.where(
            pages >= 0, 2 + pages * 7 % colours, np.where(pages == VACANT_PAGE, 0, 1)
        )
    palette = ListedColormap(["white", "lightgrey", *(f"C{index}" for index in range(10)), *PALE])
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    extent = (steps[0], steps[-1] + 1, 0, len(picture))
    axes.imshow(
        picture,
        cmap=palette,
        vmin=0,
        vmax=colours + 1,
        aspect="auto",
        interpolation="nearest",
        origin="lower",
        extent=extent,
    )
    axes.set(
        xlabel="decode step", ylabel="physical page", title="Who has which page (a colour per sequence, grey: nobody)"
    )
    figure.savefig(path, dpi=150)


PALE = ["#aec7e8", "#ffbb78", "#98df8a", "#ff9896", "#c5b0d5", "#c49c94", "#f7b6d2", "#dbdb8d", "#9edae5", "#393b79"]
"""Ten more colours behind matplotlib's own ten."""
