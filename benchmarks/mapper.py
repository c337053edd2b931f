"""What mapping ahead is worth: the same decode loop on rows that were mapped before, with a mapper, and without one.

    python -m benchmarks.mapper [--device cuda] [--steps 2000] [--json]

A step extends all sequences by a token and waits for a piece of work on the device that takes as long as a step of a
model. Rounds of the three ways take turns. `eager` is how fast a thread launches small kernels beside a mapper that
never rests. Then prompts onto a pool that is empty, and after a trim.
"""

from __future__ import annotations

import threading
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch
import typer

from vmmkv import FramePool, KVCache, KVLayout
from vmmkv.cli.options import Device, JsonOutput
from vmmkv.cli.output import console, errors, make_table, print_json
from vmmkv.environment import environment

LAYOUT = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
"""Of Llama-3.1-8B: a page holds 16 tokens."""
SMALL = KVLayout(num_layers=2, num_kv_heads=2, head_dim=64, dtype=torch.float32)
WAYS = MAPPED, AHEAD, IN_NEED = ("mapped before", "mapper", "no mapper")
CYCLES_PER_MS = 1_700_000


def main(
    device: Device = None,
    steps: Annotated[int, typer.Option(min=10, help="Of a round.")] = 500,
    rounds: Annotated[int, typer.Option(min=1, help="Of each way.")] = 4,
    sequences: Annotated[int, typer.Option(min=1, help="That grow together.")] = 256,
    step_ms: Annotated[float, typer.Option(help="How long the device works in a step.")] = 10.0,
    json_output: JsonOutput = False,
) -> None:
    """Measure what mapping ahead saves."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = where.type == "cuda"
    layout = LAYOUT if on_gpu else SMALL
    page_size = None if on_gpu else 16 * SMALL.token_bytes
    loops: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with errors.status("decode loops"):
        for _ in range(rounds):
            for way in WAYS:
                loops[way].append(decode(way, layout, where, page_size, sequences, steps, step_ms))
    result: dict[str, Any] = {
        "environment": environment(where),
        "sequences": sequences,
        "steps": steps,
        "step_ms": step_ms,
        "decode": [{"way": way, **summary(loops[way])} for way in WAYS],
    }
    with errors.status("prompts"):
        result["prompts"] = prompts(layout, where, page_size)
        if on_gpu:
            result["eager"] = eager(layout, where)
    if json_output:
        print_json(result)
        return
    columns = ["", "s a round", "µs a step on the host", "extends with a driver call"]
    rows = [
        [each["way"], f"{each['seconds']:.3f}", f"{each['host_us']:.0f}", f"{each['waited']:.3%}"]
        for each in result["decode"]
    ]
    console.print(make_table("Decoding", columns, rows))
    waits = [[each["what"], f"{each['median']:.2f}"] for each in result["prompts"]]
    console.print(make_table("Waiting for prompts", ["", "ms"], waits))


def work(where: torch.device, milliseconds: float) -> None:
    """A piece of work on the device; without one it takes no time."""
    if where.type == "cuda":
        torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))


def wait(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def decode(
    way: str, layout: KVLayout, where: torch.device, page_size: int | None, sequences: int, steps: int, step_ms: float
) -> dict[str, float]:
    """One round: its seconds, the host's microseconds a step, and the share of extends that called the driver."""
    most = steps + 64
    lookahead = None if way == AHEAD and where.type == "cuda" else 32 * (way == AHEAD)
    tokens = sequences * most
    with KVCache(
        layout, sequences, most, max_tokens=tokens, device=where, page_size=page_size, lookahead=lookahead
    ) as cache:
        lengths = np.random.default_rng(0).integers(1, 33, sequences).tolist()
        batch = [cache.sequence(length) for length in lengths]
        if way == MAPPED:
            cache.extend(batch, steps + 1)
            for sequence, length in zip(batch, lengths):
                sequence.truncate(length)
        wait(where)
        host, waited = 0.0, 0
        start = perf_counter()
        for _ in range(steps):
            calls = cache.pool.meter.map.count
            began = perf_counter()
            cache.extend(batch, 1)
            host += perf_counter() - began
            waited += cache.pool.meter.map.count - calls
            work(where, step_ms)
            wait(where)
        seconds = perf_counter() - start
        cache.check()
    return {"seconds": seconds, "host_us": host / steps * 1e6, "waited": waited / (steps * sequences)}


def prompts(layout: KVLayout, where: torch.device, page_size: int | None) -> list[dict[str, Any]]:
    """Milliseconds that a thread waits for a prompt of 8,192 tokens on an empty pool, and for 60 sequences of 1,024
    after a trim."""
    tokens = 8192 if where.type == "cuda" else 512
    pool = FramePool(90 * tokens * layout.token_bytes, device=where, page_size=page_size)
    empty, after_trim = [], []
    for _ in range(5):
        with KVCache(layout, 64, tokens, pool=pool) as cache:
            began = perf_counter()
            sequence = cache.sequence(tokens)
            empty.append((perf_counter() - began) * 1e3)
            sequence.free()
            for _ in range(2):
                many = [cache.sequence(tokens // 8) for _ in range(60)]
                cache.free(many)
                wait(where)
                cache.trim()
                began = perf_counter()
                many = [cache.sequence(tokens // 8) for _ in range(60)]
                after_trim.append((perf_counter() - began) * 1e3)
                cache.free(many)
                wait(where)
        pool.trim()
    return [
        {"what": f"a prompt of {tokens} tokens, empty pool", **spread(empty)},
        {"what": f"60 sequences of {tokens // 8} tokens, after trim", **spread(after_trim)},
    ]


def eager(layout: KVLayout, where: torch.device) -> dict[str, Any]:
    """Launches a second of small kernels, alone and beside a thread that maps and unmaps without a rest."""
    x = torch.zeros(16, device=where)
    over = threading.Event()

    def launches() -> float:
        torch.cuda.synchronize(where)
        count, start = 0, perf_counter()
        while perf_counter() - start < 0.5:
            for _ in range(100):
                x.add_(1)
            count += 100
        torch.cuda.synchronize(where)
        return count / (perf_counter() - start)

    with KVCache(layout, 4, 8192, max_tokens=4 * 8192, device=where, lookahead=0) as cache:

        def map_and_unmap() -> None:
            while not over.is_set():
                cache.sequence(512).free()
                cache.trim()

        alone, beside = [], []
        for _ in range(5):
            alone.append(launches())
            over.clear()
            thread = threading.Thread(target=map_and_unmap)
            thread.start()
            beside.append(launches())
            over.set()
            thread.join()
    return {"alone_per_s": spread(alone), "beside_per_s": spread(beside)}


def summary(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Medians of rounds, and the range of their seconds."""
    seconds = [each["seconds"] for each in rounds]
    return {name: median(each[name] for each in rounds) for name in rounds[0]} | {
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


if __name__ == "__main__":
    typer.run(main)
