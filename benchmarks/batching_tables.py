"""What the benchmarks of continuous batching show, in a terminal and in the docs."""

from __future__ import annotations

from itertools import groupby
from statistics import median
from typing import Any

from vmmkv.stats import format_bytes

Result = dict[str, Any]
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
BLOCKS = "blocks, "
"""How systems of transformers' own cache are called, with the attention behind it."""
VLLM = "vLLM"


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
    """Compares medians of the rounds on one GPU."""
    ours, blocks = by_cache(result)
    peer_speeds = [row["tokens_per_s"] for row in beside(result)]
    found = []
    for system, rounds in groupby(ours, key=lambda row: row["system"]):
        rows = list(rounds)
        speed = median(row["tokens_per_s"] for row in rows)
        for peer in blocks:
            times = speed / peer["tokens_per_s"] if peer["tokens_per_s"] else None  # none of its requests had finished
            found.append({"what": f"tokens/s on {system} over {peer['system']}", "value": times})
        if peer_speeds:
            found.append({"what": f"tokens/s on {system} over {VLLM}", "value": speed / median(peer_speeds)})
        wastes = [(row["waste"], row["most_waste"]) for row in rows if row["waste"] is not None]
        for name, of_rounds, parts in zip(("median", "most"), (median, max), zip(*wastes)):
            excess = of_rounds(part / (1 - part) for part in parts)
            what = f"memory beside live tokens on {system}, of theirs, {name}"
            found.append({"what": what, "value": excess})
        ahead = [row["surplus_bytes"] / result["memory_bytes"] for row in rows if row.get("surplus_bytes") is not None]
        if ahead:
            what = f"mapped ahead, known or parked beside that on {system}, of all memory, median"
            found.append({"what": what, "value": median(ahead)})
        for row in rows:
            if "equal" in row:
                what = f"of {row['compared']} requests on {system}, equal to {blocks[0]['system']}"
                found.append({"what": f"{what}: all tokens", "value": row["equal"]})
                found.append({"what": f"{what}: tokens before the first that differs", "value": row["equal_tokens"]})
    first = result["first_tokens"]
    what = f"first token of {first['tokens']:,} tokens, {first['known']:.0%} of them known: times as early"
    found.append({"what": what, "value": first["new_s"] / first["known_s"]})
    if logits := result.get("logits"):
        far = f"log probabilities' distance from fp32, of their norm, {logits['layers']} layers"
        found += [{"what": f"{far}, {name}", "value": logits[name]} for name in ("rows", "own")]
        found.append({"what": f"{far}: rows over own", "value": logits["rows"] / logits["own"]})
    return found


def compare_ranks(result: Result) -> list[Result]:
    """Compares medians of the rounds on two GPUs with those on one."""
    speeds = {
        ranks: median(row["tokens_per_s"] for row in rows)
        for ranks, rows in groupby(result["served"], key=lambda row: row["ranks"])
    }
    waits = [max(row["driver_s"]) / row["seconds"] for row in result["served"] if row["ranks"] == 2]
    found = [
        {"what": "tokens/s on two GPUs over one", "value": speeds[2] / speeds[1]},
        {"what": "of the time in the driver on two, of the GPU where it was more, most", "value": max(waits)},
    ]
    if steps := [row["delay_of_step"] for row in result["served"] if row["ranks"] == 2 and row.get("delay_of_step")]:
        what = "of a step, by which the driver delayed it on two, of the GPU where it was more"
        found.append({"what": f"{what}, 99th percentile", "value": max(step["p99"] for step in steps)})
        found.append({"what": f"{what}, most", "value": max(step["most"] for step in steps)})
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
