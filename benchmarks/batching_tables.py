"""What the benchmarks of continuous batching show, in a terminal and in the docs."""

from __future__ import annotations

from itertools import groupby
from statistics import median
from typing import Any

from benchmarks import aims
from vmmkv.stats import format_bytes

Result = dict[str, Any]
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
BLOCKS = "blocks, "
"""How systems of transformers' own cache are called, with the attention behind it."""
VLLM = "vLLM"
ENGINES = {"Llama-3.1-8B": 4287}
"""By models, output tokens/s of `benchmarks.engine`, same requests and memory, when the aim was set."""


def batching_table(result: Result) -> Table:
    """Of each round what it reached."""
    memory = "memory, peak", "when idle", "waste, median", "most"
    columns = "on", "finished", "output tokens/s", "first token behind the queue, median", *memory
    rows = [
        (
            row["system"],
            f"{row['finished']} of {result['requests']}",
            f"{row['tokens_per_s']:,.0f}",
            "" if row["first_token_s"] is None else f"{row['first_token_s']:.1f} s",
            format_bytes(row["peak_bytes"]) if row["peak_bytes"] else "",
            "" if row.get("idle_bytes") is None else format_bytes(row["idle_bytes"]),  # older results lack it
            *("" if row[name] is None else f"{row[name]:.1%}" for name in ("waste", "most_waste")),
        )
        for row in [*result["served"], *beside(result)]
    ]
    return columns, rows


def beside(result: Result) -> list[Result]:
    """vLLM's rounds, if there were any; older results have none."""
    rows: list[Result] = result.get("vllm", {}).get("served", [])
    return rows


def by_cache(result: Result) -> tuple[list[Result], list[Result]]:
    """Runs on rows, and those on transformers' own blocks."""
    ours = [row for row in result["served"] if not row["system"].startswith(BLOCKS)]
    return ours, result["served"][len(ours) :]


def compare(result: Result) -> list[Result]:
    """What was aimed at on one GPU, and what was reached: medians of the rounds."""
    ours, (blocks, *others) = by_cache(result)
    peer_speeds = [row["tokens_per_s"] for row in beside(result)]
    found = []
    for system, rounds in groupby(ours, key=lambda row: row["system"]):
        rows = list(rounds)
        speed = median(row["tokens_per_s"] for row in rows)
        for peer, least in ((blocks, 10), *((other, 1) for other in others)):
            times = speed / peer["tokens_per_s"] if peer["tokens_per_s"] else None  # none of its requests had finished
            found.append(aims.compared(result, f"tokens/s on {system} over {peer['system']}", times, least=least))
        if peer_speeds:
            times = speed / median(peer_speeds)
            found.append(aims.compared(result, f"tokens/s on {system} over {VLLM}", times, least=1))
        if engine := ENGINES.get(result["model"]):
            found.append(
                aims.compared(result, f"tokens/s on {system} over the engine's {engine:,}", speed / engine, least=0.9)
            )
        wastes = [(row["waste"], row["most_waste"]) for row in rows if row["waste"] is not None]
        for name, of_rounds, parts in zip(("median", "most"), (median, max), zip(*wastes)):
            excess = of_rounds(part / (1 - part) for part in parts)
            what = f"memory beside live tokens on {system}, of theirs, {name}"
            found.append(aims.compared(result, what, excess, most=0.02))
        ahead = [row["surplus_bytes"] / result["memory_bytes"] for row in rows if row.get("surplus_bytes") is not None]
        if ahead:
            what = f"mapped ahead, known or parked beside that on {system}, of all memory, median"
            found.append({"what": what, "value": median(ahead)})
        for row in rows:
            if "equal" in row:
                what = f"of {row['compared']} requests on {system}, equal to {blocks['system']}"
                found.append({"what": f"{what}: all tokens", "value": row["equal"]})
                found.append({"what": f"{what}: tokens before the first that differs", "value": row["equal_tokens"]})
    first = result["first_tokens"]
    what = f"first token of {first['tokens']:,} tokens, {first['known']:.0%} of them known: times as early"
    found.append(aims.compared(result, what, first["new_s"] / first["known_s"], least=5))
    if logits := result.get("logits"):
        far = f"log probabilities' distance from fp32, of their norm, {logits['layers']} layers"
        found += [{"what": f"{far}, {name}", "value": logits[name]} for name in ("rows", "own")]
        found.append(aims.compared(result, f"{far}: rows over own", logits["rows"] / logits["own"], most=2))
    return found


def compare_ranks(result: Result) -> list[Result]:
    """What was aimed at on two GPUs, and what was reached: medians of the rounds."""
    speeds = {
        ranks: median(row["tokens_per_s"] for row in rows)
        for ranks, rows in groupby(result["served"], key=lambda row: row["ranks"])
    }
    waits = [max(row["driver_s"]) / row["seconds"] for row in result["served"] if row["ranks"] == 2]
    found = [
        aims.compared(result, "tokens/s on two GPUs over one", speeds[2] / speeds[1], least=1.6),
        aims.compared(
            result, "of the time in the driver on two, of the GPU where it was more, most", max(waits), most=0.01
        ),
    ]
    if steps := [row["delay_of_step"] for row in result["served"] if row["ranks"] == 2 and row.get("delay_of_step")]:
        what = "of a step, by which the driver delayed it on two, of the GPU where it was more"
        found.append({"what": f"{what}, 99th percentile", "value": max(step["p99"] for step in steps)})
        found.append(aims.compared(result, f"{what}, most", max(step["most"] for step in steps), most=0.01))
    for row in result["served"]:
        if "equal" in row:
            what = f"round {row['round']}, of {row['compared']} requests on two GPUs equal to one"
            found.append({"what": f"{what}: all tokens", "value": row["equal"]})
            found.append({"what": f"{what}: tokens before the first that differs", "value": row["equal_tokens"]})
    return found


def first_tokens_table(result: Result) -> Table:
    """How long first tokens take, of prompts that are new and of those of which most is known."""
    first = result["first_tokens"]
    columns = f"a prompt of {first['tokens']:,} tokens", "first token after", "times as early"
    kinds = {"new": "new", "known": f"{first['known']:.0%} of it known"}
    rows = [
        (label, f"{first[f'{kind}_s'] * 1e3:,.0f} ms", f"{first['new_s'] / first[f'{kind}_s']:.1f}")
        for kind, label in kinds.items()
    ]
    return columns, rows


def ranks_table(result: Result) -> Table:
    """Of each round on one and on two GPUs what it reached, and the part of the time that the driver took to map pages
    for who waited for them, on the GPU where it was more."""
    columns = (
        f"GPUs, {result['layers']} layers",
        "finished",
        "output tokens/s",
        "of the time in the driver, most of a GPU",
    )
    rows = [
        (
            str(row["ranks"]),
            f"{row['finished']} of {result['requests']}",
            f"{row['tokens_per_s']:,.0f}",
            f"{max(row['driver_s']) / row['seconds']:.2%}",
        )
        for row in result["served"]
    ]
    return columns, rows
