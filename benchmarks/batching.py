"""transformers' continuous batching on rows, beside its own on blocks and beside vLLM: the same requests, all waiting.

    python -m benchmarks.batching [--trace FILE] [--model NAME] [--seconds S] [--vllm DIR]
                                  [--json]

Requests have the lengths of a trace; tokens and weights are random. A run that is not done after some seconds is
stopped, and measured by the tokens until then. Rows run uncompiled, compiled, and compiled without reuse; blocks with
`sdpa`. Then first tokens of prompts of which nine tenths are known, and of others. vLLM serves
the same requests at the end, where it is installed, or `--vllm` names a folder in which it is unpacked, as often as
there is time for. Without a GPU a tiny model runs, with lengths divided by 16, and speeds say nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from transformers import ContinuousBatchingConfig, GenerationConfig

from vmmkv.budget import parse_bytes
from vmmkv.cli.output import JsonOutput, format_bytes
from vmmkv.integrations import continuous_batching as rows

from .engine.model import Config
from .environment import environment
from .generate.models import CONFIGS, SIZES, build, token_bytes
from .geometry import free_memory
from .output import Lines, Row, deliver
from .serve import vllm_peer
from .serve.workloads import Limits, Workload, make_workload

BLOCKS = "blocks, sdpa"
"""transformers' own cache."""
ROWS, COMPILED, NO_REUSE = "rows", "rows, compiled", "rows, compiled, without reuse"
SYSTEMS: dict[str, Row] = {
    ROWS: {},
    COMPILED: {"default_compile_level": 1},
    NO_REUSE: {"default_compile_level": 1, "allow_block_sharing": False},
}
"""On rows, and what their `ContinuousBatchingConfig` has beside what all have."""
BATCH_TOKENS = 2048
"""Of a forward pass."""
VLLM_ROUNDS, VLLM_SEQUENCES = 3, 256
"""Rounds that are measured, and the most requests at a time."""
KNOWN = 0.9
"""Of a prompt: what another request has had."""
WARM = 20, 40
"""Requests that are served before any is measured, and the most tokens that each of them gets."""
WARM_SEED = 1 << 31
"""Of their tokens, which no round has."""
EVERY = 0.05
"""Seconds between two looks at the memory."""


def main(
    trace: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Azure CSV; None: random.")] = None,
    model: Annotated[str | None, typer.Option(help=f"One of {', '.join(CONFIGS)}.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many of the trace.")] = 300,
    memory: Annotated[str | None, typer.Option(help="For K and V.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="After which who is not done is stopped.")] = 60.0,
    rounds: Annotated[int, typer.Option(min=1, help="Of rows.")] = 3,
    vllm: Annotated[Path | None, typer.Option(exists=True, file_okay=False, help="vLLM, unpacked.")] = None,
    budget_seconds: Annotated[float, typer.Option(help="When to stop, and say what was not reached.")] = 480.0,
    json_output: JsonOutput = False,
) -> None:
    """Measure transformers' continuous batching on rows and on blocks."""
    deadline = perf_counter() + budget_seconds
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    name, facts = model or ("Llama-3.1-8B" if on_gpu else "tiny"), environment(device)
    nbytes = parse_bytes(memory or ("16GiB" if on_gpu else "128MiB"), free=0)
    config = CONFIGS[name]
    longest = min(nbytes // token_bytes(config), config.max_position_embeddings)
    workload = make_workload(trace, Limits(requests, 1 << 40, longest, 8192, 1 if on_gpu else 16), seed=0)
    prompt = min(16_384, longest * 3 // 4)
    runs, first = serve(build(name, None, device), workload, nbytes, seconds, rounds, prompt)
    result = {
        "environment": facts,
        "model": name,
        "memory_bytes": nbytes,
        "workload": workload.name,
        "requests": len(workload.requests),
        "prompt_tokens": sum(request.prompt for request in workload.requests),
        "output_tokens": sum(request.output for request in workload.requests),
        "served": runs,
        "first_tokens": first,
        "vllm": serve_with_vllm(vllm, name, workload, nbytes, deadline - perf_counter()),
    }
    deliver(result, json_output, {f"{name}, {workload.name}": table, "Reuse": first_tokens_table})


def serve(
    model: Any, workload: Workload, nbytes: int, seconds: float, rounds: int, prompt: int
) -> tuple[list[Row], Row]:
    """Figures of all runs, on rows and then on blocks, and of first tokens of a prompt of so many tokens on rows."""
    made: list[Row] = []
    first: Row = {}
    for system in SYSTEMS if model.device.type == "cuda" else (ROWS,):
        with manager_of(model, system, nbytes) as manager:
            warm_up(manager, workload, seconds)
            each = [run(manager, system, workload, number, seconds) for number in range(rounds)]
            if system == ROWS:
                first = first_tokens(manager, model.config.vocab_size, prompt)
            idle = idle_bytes(manager)
            made += [row | {"idle_bytes": idle} for row in each]
    model.set_attn_implementation("sdpa")
    with manager_of(model, BLOCKS, nbytes) as manager:
        made.append(run(manager, BLOCKS, workload, 0, seconds) | {"idle_bytes": idle_bytes(manager)})
    return made, first


def warm_up(manager: Any, workload: Workload, seconds: float) -> None:
    """Serves the beginning of some requests, so that what compiles late has done so."""
    requests, tokens = WARM
    few = [replace(request, output=min(request.output, tokens)) for request in workload.requests[:requests]]
    run(manager, "", replace(workload, requests=few, parts=workload.parts[:requests]), WARM_SEED, seconds)


def run(manager: Any, system: str, workload: Workload, number: int, seconds: float) -> Row:
    """Serves all requests, in each round with other prompts, or as much as there is time for."""
    prompts = [ids.tolist() for ids in workload.prompts(manager.model.config.vocab_size, seed=number)]
    first: list[float] = []
    answers: dict[str, list[int]] = {}
    with watched(manager) as seen:
        start = perf_counter()
        for at, (prompt, request) in enumerate(zip(prompts, workload.requests)):
            told: Row = {"max_new_tokens": request.output, "eos_token_id": -1, "record_timestamps": True}
            manager.add_request(prompt, f"{number}-{at}", **told)
        while len(answers) < len(prompts) and perf_counter() - start < seconds:
            done = finished_request(manager)
            if done is not None:
                answers[done.request_id] = list(done.generated_tokens)
                first.append(done.timestamps[0] - start)
        elapsed, finished = perf_counter() - start, len(answers)
        for state in list(manager.batch_processor.scheduler.active_requests.values()):
            answers[state.request_id] = list(state.to_generation_output().generated_tokens)
    for at in range(len(prompts)):
        manager.cancel_request(f"{number}-{at}")  # of those that are done it does nothing; others would run on
    generated = sum(map(len, answers.values()))
    waste, surplus, physical = zip(*seen) if seen else ((), (), ())
    return {
        "system": system,
        "round": number,
        "finished": finished,
        "seconds": elapsed,
        "tokens_per_s": generated / elapsed,
        "first_token_s": median(first) if first else None,
        "peak_bytes": max(physical, default=0),
        "waste": median(waste) if seen else None,
        "most_waste": max(waste, default=None),
        "surplus_bytes": median(surplus) if seen else None,
    }


def idle_bytes(manager: Any) -> int:
    """What K and V take when nobody asks for anything, and what can has gone back to the system; where requests have
    just been cancelled, perhaps with what they held."""
    cache = manager.batch_processor.cache
    if caches := getattr(cache, "kv_caches", []):
        caches[0].pool.trim()
        return int(caches[0].pool.stats().physical_bytes)
    return int(cache.cache_tensor.nbytes)


def finished_request(manager: Any) -> Any:
    """The next request that is done; None where none is for a while."""
    done = manager.get_result(timeout=0.1)
    if done is None:
        if not manager.is_running():
            raise RuntimeError("the manager stopped") from manager.background_thread_status.fatal_error
    elif done.error is not None:
        raise RuntimeError(done.error)
    return done if done is not None and done.is_finished() else None


@contextmanager
def manager_of(model: Any, system: str, nbytes: int) -> Iterator[Any]:
    """A manager that is at work."""
    blocks = nbytes // (token_bytes(model.config) * 256)
    if system in SYSTEMS:
        rows.enable(model, max_bytes=nbytes)
    batching = ContinuousBatchingConfig(
        max_batch_tokens=BATCH_TOKENS,
        page_size=256,
        num_blocks=max(blocks, 1),
        auto_switch_to_flash=False,
        **SYSTEMS.get(system, {}),
    )
    generation = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1)
    try:
        manager = model.init_continuous_batching(generation, batching)
        manager.warmup()
        manager.start()
        try:
            yield manager
        finally:
            manager.stop(block=True, hard_stop=True)
            manager.destroy()
    finally:
        rows.disable(model)


@contextmanager
def watched(manager: Any) -> Iterator[list[tuple[float, int, int]]]:
    """Look at the memory of rows now and then: the share of the pages in use that holds no token, the bytes of surplus
    pages, and all physical bytes."""
    seen: list[tuple[float, int, int]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(EVERY):
            caches = getattr(manager.batch_processor and manager.batch_processor.cache, "kv_caches", [])
            stats = [cache.stats() for cache in caches]
            used, surplus = (
                sum(each.pages[kind] * caches[0].page_size for each in stats) for kind in ("used", "surplus")
            )
            if used:
                tokens = sum(each.token_bytes for each in stats)
                seen.append((1 - tokens / used, surplus, caches[0].pool.stats().physical_bytes))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def first_tokens(manager: Any, vocab_size: int, tokens: int, rounds: int = 5) -> Row:
    """How long the first token of a prompt takes, on rows: of new ones, and of those of which most is known."""
    times: dict[str, list[float]] = {"new": [], "known": []}
    for _ in range(rounds):
        prompt, other = torch.randint(vocab_size, (2, tokens)).tolist()
        begin = int(KNOWN * tokens)
        for kind, ids in (("new", prompt), ("known", prompt[:begin] + other[begin:])):
            start = perf_counter()
            name = manager.add_request(ids, max_new_tokens=1, eos_token_id=-1)
            while (done := finished_request(manager)) is None or done.request_id != name:
                pass
            times[kind].append(perf_counter() - start)
    return {"tokens": tokens, "known": KNOWN, "rounds": rounds} | {f"{kind}_s": median(t) for kind, t in times.items()}


def serve_with_vllm(folder: Path | None, name: str, workload: Workload, nbytes: int, seconds: float) -> Row:
    """Rounds of vLLM in which all requests wait, as many as there is time for; and why not all. It has as many bytes
    for K and V, no prefix caching, and as many tokens in a step as its server takes. Only a model's weights may be on
    the GPU."""
    if not vllm_peer.can_be_had(folder):
        return {"served": [], "reason": vllm_peer.MISSING}
    free_memory()
    config = CONFIGS[name]
    outputs = [request.output for request in workload.requests]
    prompts = [ids.tolist() for ids in workload.prompts(config.vocab_size, seed=0)]
    told = vllm_peer.serve(
        vllm_peer.model_config(shape_of(config), config.max_position_embeddings),
        [{"prompts": prompts, "outputs": outputs, "rounds": VLLM_ROUNDS}],
        folder,
        seconds,
        dtype="bfloat16",
        max_seq_len=workload.max_seq_len,
        blocks=nbytes // (vllm_peer.BLOCK * token_bytes(config)),
        sequences=VLLM_SEQUENCES,
        step_tokens=0,
        caching=False,
    )
    rows = [
        {
            "system": "vLLM",
            "round": number,
            "finished": sum(tokens == output for tokens, output in zip(row["tokens"], outputs)),
            "seconds": row["seconds"],
            "tokens_per_s": sum(row["tokens"]) / row["seconds"],
        }
        for number, row in enumerate(told.rows)
    ]
    return {"version": told.version, "options": told.about, "served": rows, "reason": told.reason}


def shape_of(config: Any) -> Config:
    """The shape of a model of transformers."""
    options = config.model_type == "qwen3", config.tie_word_embeddings, config.rms_norm_eps
    return Config(*(getattr(config, name) for name in SIZES[:7]), *options, config.rope_parameters["rope_theta"])


def table(result: Row) -> Lines:
    """A line for each round."""
    memory = "memory, peak", "when idle", "waste, median", "most"
    return ("on", "finished", "output tokens/s", "first token behind the queue, median", *memory), [
        (
            row["system"],
            f"{row['finished']} of {result['requests']}",
            f"{row['tokens_per_s']:,.0f}",
            cell(row.get("first_token_s"), "{:.1f} s"),
            format_bytes(row["peak_bytes"]) if row.get("peak_bytes") else "",
            "" if row.get("idle_bytes") is None else format_bytes(row["idle_bytes"]),
            *(cell(row.get(name), "{:.1%}") for name in ("waste", "most_waste")),
        )
        for row in [*result["served"], *result["vllm"]["served"]]
    ]


def cell(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def first_tokens_table(result: Row) -> Lines:
    """First tokens of prompts that are new, and of prompts of which most is known."""
    first = result["first_tokens"]
    kinds = {"new": "new", "known": f"{first['known']:.0%} of it known"}
    return (f"a prompt of {first['tokens']:,} tokens", "first token after", "times as early"), [
        (label, f"{first[f'{kind}_s'] * 1e3:,.0f} ms", f"{first['new_s'] / first[f'{kind}_s']:.1f}")
        for kind, label in kinds.items()
    ]


if __name__ == "__main__":
    typer.run(main)
