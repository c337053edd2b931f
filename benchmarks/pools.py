"""Two models on one card: one pool for both, against a fixed half each, and against two processes with one budget.

    python -m benchmarks.pools [--device cuda] [--model NAME] [--memory 4GiB] [--requests 240] [--json]

Bursts come in turns: all requests of one model at once, and those of the other when the burst has been served, as where
one model reads what the other wrote. On one pool each burst finds all memory, in halves never more than its own. That
is worth as much as a burst needs more than a half; `crowded` is the share of the time in which requests wait for
memory. Two processes have pools of their own, with a budget in common (`FramePool(shared=)`). And how long memory takes
to move: one cache fills the pool and is left, and the next prompts come to the other, in this process or another.

The models are two caches over the same random weights. Without a GPU they are tiny, and speeds say nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, closing
from multiprocessing import get_context
from statistics import median
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import torch
import typer

from vmmkv import FramePool, KVCache, KVLayout
from vmmkv.budget import parse_bytes
from vmmkv.cli.output import Device, JsonOutput, TraceFile, errors, format_bytes
from vmmkv.driver.driver import open_driver

from .engine.model import MODELS, random_model
from .engine.rows import memory_for
from .environment import environment
from .geometry import calls_of, free_memory, synchronize
from .host_time import in_turns, ranged, spread
from .output import Lines, Row, deliver
from .serve.measure import SEED, Settings, figures, make_engine
from .serve.workloads import Limits, Workload, make_workload

MODES = SHARED, HALVES, PROCESSES = "one pool", "a fixed half each", "two processes, one budget"
KEPT = "seconds", "output_tokens_per_s", "peak_concurrency", "preemptions", "ttft_s", "peak_bytes"
"""Figures of a burst."""
MOVED = 10 << 30
"""Bytes that the time of a move is told for."""
IN_TIME = 5.0
"""Seconds in which a first token is in time."""
IDLE_SEQUENCES, IDLE_TOKENS, IDLE_TURNS, IDLE_ROUNDS = 64, 64, 2000, 5
"""Sequences that get a token in each step, the most tokens of each, how often each gets so many, and rounds of each
side. A round takes half a second or so, in which the thread of a ledger looks some times."""


class Usual(NamedTuple):
    """The defaults of a kind of machine."""

    model: str
    memory: str
    requests: int
    max_seq_len: int
    prompt_tokens: int
    shorten: int
    dtype: torch.dtype


GPU = Usual("llama-3.1-8b", "4GiB", 240, 8192, 8192, 1, torch.bfloat16)
HOST = Usual("tiny", "512KiB", 60, 256, 128, 16, torch.float32)


def pools_of(mode: str, layout: KVLayout, memory: int, device: torch.device) -> list[FramePool]:
    """The pool of each model."""
    if mode == SHARED:
        return [FramePool(memory, **memory_for(layout, device))] * 2
    return [FramePool(memory // 2, **memory_for(layout, device)) for _ in range(2)]


class Server:
    """A model that serves bursts, and beside it a cache that can be filled."""

    def __init__(self, settings: Settings, work: Workload) -> None:
        self.settings, self.work, self.engine = settings, work, make_engine(settings, work, "vmm")
        self.fills: Any = None

    def burst(self) -> Row:
        """Serve all requests at once."""
        work, engine, driver = self.work, self.engine, self.engine.kv.work()["driver"]
        prompts = work.prompts(self.settings.model.config.vocab_size, SEED)
        run = engine.run(prompts, [request.output for request in work.requests], deadline=self.settings.deadline)
        row = figures(run) if run.running else dict.fromkeys(KEPT)
        return {name: row[name] for name in KEPT} | {
            "seconds": run.seconds,
            "tokens": run.generated,
            "tokens_in_time": int(run.outputs[run.first <= IN_TIME].sum()),
            "crowded": sum(took for took, waiting in zip(run.step_seconds, run.waiting) if waiting) / run.seconds,
            "unfinished": len(run.outputs) - run.finished,
            "driver_ms": (engine.kv.work()["driver"] - driver) * 1e3,
        }

    def give_back(self) -> None:
        """Give all memory back that holds no tokens."""
        self.engine.kv.give_back()
        free_memory()

    def open(self, shared: str, memory: int, prompt: int) -> None:
        """Make a cache to fill, on a pool with a shared budget."""
        layout, device = self.settings.model.config.kv_layout(self.settings.model.dtype), self.settings.model.device
        pool = FramePool(memory, shared=shared, **memory_for(layout, device))
        count = prompts_in(pool, layout, prompt)
        self.fills = KVCache(layout, count, prompt, pool=pool), count, prompt, device

    def fill(self) -> Row:
        """Fill this cache."""
        return fill(*self.fills)

    def end(self) -> None:
        """Give the memory of this cache back."""
        self.fills[0].close()
        self.fills[0].pool.close()

    def close(self) -> None:
        """Give all memory back."""
        self.engine.close()


here: list[Server] = []
"""The server of this process, where it was started for one."""


def start(
    name: str, dtype: torch.dtype, device: torch.device, memory: int, deadline: float, work: Workload, shared: str
) -> None:
    """Begin a process that has one server, on a pool with a shared budget."""
    pool = FramePool(memory, shared=shared, **memory_for(MODELS[name].kv_layout(dtype), device))
    model = random_model(MODELS[name], work.max_seq_len, device, dtype)
    here.append(Server(Settings(model, memory, deadline, pool=pool), work))


def call(method: str, *args: Any) -> Any:
    """Call a method of the server of this process."""
    return getattr(here[0], method)(*args)


class Elsewhere:
    """A server in a process of its own. It begins with the first call."""

    def __init__(self, *args: Any) -> None:
        self._process = ProcessPoolExecutor(1, get_context("spawn"), start, args)

    def begin(self, method: str, *args: Any) -> Future[Any]:
        """Call a method."""
        return self._process.submit(call, method, *args)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Call a method, and wait for what it returns."""
        return lambda *args: self.begin(method, *args).result()

    def close(self) -> None:
        """End the process."""
        self._process.shutdown()


def serve(servers: Sequence[Server | Elsewhere]) -> Row:
    """Serve a burst of each model, one after another. No memory is taken at the beginning, nor at the end."""
    rows = [{"model": index} | server.burst() for index, server in enumerate(servers)]
    for server in servers:
        server.give_back()
    tokens, in_time, seconds = (sum(row[name] for row in rows) for name in ("tokens", "tokens_in_time", "seconds"))
    speeds = {"tokens_per_s": tokens / seconds, "tokens_in_time_per_s": in_time / seconds}
    return {"tokens": tokens, "seconds": seconds} | speeds | {"bursts": rows}


def move(layout: KVLayout, memory: int, prompt: int, device: torch.device, large_frames: bool) -> list[Row]:
    """Fill the pool with prompts of one cache, and, when they are gone, of the other; three times in turns."""
    pool = pools_of(SHARED, layout, memory, device)[0]
    count = prompts_in(pool, layout, prompt)
    with ExitStack() as stack:
        caches = [
            stack.enter_context(KVCache(layout, count, prompt, pool=pool, large_frames=large_frames)) for _ in range(2)
        ]
        return in_six_fills(1, large_frames, lambda number: fill(caches[number], count, prompt, device))


def move_between(servers: list[Elsewhere], shared: str, memory: int, prompt: int) -> list[Row]:
    """The same on large frames, between the caches of two processes with a shared budget."""
    for server in servers:
        server.open(shared, memory, prompt)
    rows = in_six_fills(2, True, lambda number: servers[number].fill())
    for server in servers:
        server.end()
    return rows


def in_six_fills(processes: int, large_frames: bool, fill: Callable[[int], Row]) -> list[Row]:
    """Three fills of each of two caches, in turns."""
    about = {"processes": processes, "large_frames": large_frames}
    return [about | {"to": number % 2, "filled": number > 0} | fill(number % 2) for number in range(6)]


def prompts_in(pool: FramePool, layout: KVLayout, prompt: int) -> int:
    """How many prompts fill a pool."""
    return max(pool.limit_pages // layout.pages(prompt, pool.page_size), 1)


def idle_ledger(layout: KVLayout, memory: int, device: torch.device, shared: str) -> Row:
    """Microseconds of a step in which some sequences get a token within their pages, on a pool by itself and on one
    with a budget that idle processes share."""

    def step_us(**options: Any) -> float:
        pool = FramePool(memory, **memory_for(layout, device), **options)
        count = min(IDLE_SEQUENCES, prompts_in(pool, layout, IDLE_TOKENS))
        with closing(pool), KVCache(layout, count, IDLE_TOKENS, pool=pool, lookahead=0) as cache:
            sequences = [cache.sequence(IDLE_TOKENS) for _ in range(count)]
            batch, took = cache.batch(sequences), 0.0
            for _ in range(IDLE_TURNS):
                for sequence in sequences:
                    sequence.truncate(1)
                begin = perf_counter()
                for _ in range(IDLE_TOKENS - 1):
                    batch.extend(1)
                took += perf_counter() - begin
            return took * 1e6 / IDLE_TURNS / (IDLE_TOKENS - 1)

    sides = {"alone": lambda: step_us(), "shared": lambda: step_us(shared=shared)}
    return {name: spread(values) for name, values in in_turns(sides, IDLE_ROUNDS).items()}


def fill(cache: KVCache, count: int, prompt: int, device: torch.device) -> Row:
    """Start `count` sequences of a prompt each and free them; return what it took until all had their memory."""
    calls = sum(calls_of(cache).values())
    slowest, begin = 0.0, perf_counter()
    sequences = []
    for _ in range(count):
        start = perf_counter()
        sequences.append(cache.sequence(prompt))
        slowest = max(slowest, perf_counter() - start)
    seconds = perf_counter() - begin
    nbytes = cache.stats().pages["used"] * cache.page_size
    cache.free(sequences)
    synchronize(device)
    return {
        "bytes": nbytes,
        "prompts": count,
        "ms": seconds * 1e3,
        "slowest_prompt_ms": slowest * 1e3,
        "ms_per_10_gib": seconds * 1e3 * MOVED / nbytes,
        "driver_calls": sum(calls_of(cache).values()) - calls,
    }


def main(
    model: Annotated[str | None, typer.Option(help=f"One of {', '.join(MODELS)}.")] = None,
    memory: Annotated[str | None, typer.Option(help="For K and V of both.")] = None,
    trace: TraceFile = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Of a burst.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of each mode, in turns; the median is reported.")] = 3,
    move_memory: Annotated[str | None, typer.Option(help="That moves; as much as --memory by default.")] = None,
    device: Device = None,
    budget_seconds: Annotated[float, typer.Option(help="When to stop, and say what was not reached.")] = 480.0,
    json_output: JsonOutput = False,
) -> None:
    """Measure two models on one pool."""
    deadline = perf_counter() + budget_seconds
    driver = open_driver(device)
    usual = GPU if driver.device.type == "cuda" else HOST
    name, count = model or usual.model, requests or usual.requests
    if name not in MODELS:
        raise typer.BadParameter(f"--model {name}: it must be one of {', '.join(MODELS)}")
    layout, free = MODELS[name].kv_layout(usual.dtype), driver.memory_info()[0]
    nbytes, moved = parse_bytes(memory or usual.memory, free), parse_bytes(move_memory or memory or usual.memory, free)
    longest = int(0.9 * nbytes / 2) // layout.token_bytes  # each request has room in a half
    work = make_workload(trace, Limits(count, 10**9, longest, usual.max_seq_len, usual.shorten), SEED)
    weights = random_model(MODELS[name], work.max_seq_len, driver.device, usual.dtype)
    settings, about = Settings(weights, nbytes, deadline), (layout, moved, usual.prompt_tokens)
    result: Row = {
        "environment": environment(driver.device),
        "models": [name] * 2,
        "memory_bytes": nbytes,
        "requests": count,
        "in_time_s": IN_TIME,
        "trace": work.name,
        "prompt_tokens": usual.prompt_tokens,
        "moves": [row for large in (True, False) for row in move(*about, driver.device, large)],
        "idle_ledger": {},
        "missed": [],
    }
    with ExitStack() as stack:
        shared = f"benchmark-{os.getpid()}"
        told = name, usual.dtype, driver.device, nbytes, deadline, work, shared
        servers = [stack.enter_context(closing(Elsewhere(*told))) for _ in range(2)]
        if perf_counter() < deadline:
            for each in [server.begin("give_back") for server in servers]:  # both begin at the same time
                each.result()
            result["moves"] += move_between(servers, f"{shared}-moves", moved, usual.prompt_tokens)
            result["idle_ledger"] = idle_ledger(layout, nbytes, driver.device, shared)
        result["runs"] = measure(settings, work, layout, rounds, result["missed"], servers)
    moves = {"Memory that moves": move_table, "A step within its pages, beside idle processes": idle_table}
    deliver(result, json_output, {f"Two of {name}, bursts in turns": table, **moves})


def measure(
    settings: Settings, work: Workload, layout: KVLayout, rounds: int, missed: list[str], elsewhere: list[Elsewhere]
) -> list[Row]:
    """For each mode the run with the median throughput; runs that were not reached are added to `missed`."""
    found: dict[str, list[Row]] = {mode: [] for mode in MODES}
    servers: dict[str, Sequence[Server | Elsewhere]] = {PROCESSES: elsewhere}
    with ExitStack() as stack:
        for number in range(rounds):
            for mode in MODES[:: -1 if number % 2 else 1]:
                name = f"bursts of {len(work.requests)}, {mode}, round {number + 1}"
                if perf_counter() < settings.deadline:
                    if mode not in servers:
                        pools = pools_of(mode, layout, settings.max_bytes, settings.model.device)
                        made = [Server(settings._replace(pool=pool), work) for pool in pools]
                        servers[mode] = [stack.enter_context(closing(server)) for server in made]
                    run = serve(servers[mode])
                    if not any(burst["unfinished"] for burst in run["bursts"]):
                        errors.print(f"{name}: {run['seconds']:.1f} s, {run['tokens_per_s']:,.0f} tokens/s")
                        found[mode].append(run)
                        continue
                missed.append(name)
    rows = []
    for mode, runs in found.items():
        if runs:
            chosen = sorted(runs, key=lambda run: float(run["tokens_per_s"]))[(len(runs) - 1) // 2]
            speeds = [run["tokens_per_s"] for run in runs]
            rows.append({"requests": len(work.requests), "mode": mode} | chosen | {"rounds": speeds})
    return rows


def table(result: Row) -> Lines:
    """A column for each run, a line for each figure."""

    def peak(run: Row, key: str) -> float:
        return max(burst[key] for burst in run["bursts"])

    lines: dict[str, Callable[[Row], str]] = {
        "output tokens/s, both models": lambda run: f"{run['tokens_per_s']:,.0f}",
        "all rounds": lambda run: f"{min(run['rounds']):,.0f} to {max(run['rounds']):,.0f}",
        "of requests with a first token in time": lambda run: f"{run['tokens_in_time_per_s']:,.0f}",
        "of the time requests wait for memory": lambda run: f"{median(b['crowded'] for b in run['bursts']):.0%}",
        "requests at a time, peak": lambda run: f"{peak(run, 'peak_concurrency'):,.0f}",
        "time to first token behind the queue, s, p50, slowest burst": lambda run: (
            f"{max(b['ttft_s']['p50'] for b in run['bursts']):.2f}"
        ),
        "memory of one model, peak": lambda run: format_bytes(peak(run, "peak_bytes")),
        "driver calls, ms a burst": lambda run: f"{median(b['driver_ms'] for b in run['bursts']):,.0f}",
        "preemptions": lambda run: f"{sum(b['preemptions'] for b in run['bursts']):,}",
    }
    columns = "", *(f"{run['mode']}, bursts of {run['requests']}" for run in result["runs"])
    return columns, [(what, *map(cell, result["runs"])) for what, cell in lines.items()]


def move_table(result: Row) -> Lines:
    """A line for each time that the pool was filled."""
    columns = "prompts come to", "in", "memory", "ms", "ms per 10 GiB", "slowest prompt, ms", "driver calls"
    other = {1: "from the other", 2: "from another process"}
    return columns, [
        (
            f"{result['models'][row['to']]} "
            f"({other[row.get('processes', 1)] if row['filled'] else 'from an empty pool'})",
            "large frames" if row["large_frames"] else "single pages",
            format_bytes(row["bytes"]),
            f"{row['ms']:,.1f}",
            f"{row['ms_per_10_gib']:,.0f}",
            f"{row['slowest_prompt_ms']:,.2f}",
            f"{row['driver_calls']:,}",
        )
        for row in result["moves"]
    ]


def idle_table(result: Row) -> Lines:
    """A line for each side."""
    return ("pool", "µs a step"), [(name, ranged(row, digits=2)) for name, row in result["idle_ledger"].items()]


if __name__ == "__main__":
    typer.run(main)
