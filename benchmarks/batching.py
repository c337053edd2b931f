"""transformers' continuous batching on rows, beside its own on blocks: the same requests, all waiting.

    python -m benchmarks.batching [--trace FILE] [--model NAME] [--seconds S] [--attention NAME]... [--vllm DIR]
                                  [--json]

Requests have the lengths of a trace, tokens are random, and so are weights. Who is not done after some seconds is
stopped, and measured by what was generated until then. Tokens on rows are compared with those on blocks. Then first
tokens of prompts of which nine tenths are known, and of others; and how far log probabilities are from fp32. On rows
forward passes run as they are, compiled as transformers' `default_compile_level=1` has it, and so with nothing kept for
who begins alike, as other engines are measured; on blocks with `sdpa`, and with each FlashAttention that transformers
finds (or `--attention NAME`). vLLM serves the same requests at the end, where it is installed, or `--vllm` names a
folder in which it is unpacked, as often as there is time for (`--budget-seconds`). Without a GPU a tiny model runs, as
it is, with lengths divided by 16, and speeds say nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Annotated, Any

import torch
import typer
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from benchmarks import comparisons
from benchmarks.batching_logits import logit_distances
from benchmarks.batching_tables import BLOCKS, batching_table, compare, first_tokens_table
from benchmarks.batching_vllm import serve_beside
from benchmarks.environment import environment, print_result
from benchmarks.generate.models import CONFIGS, build, token_bytes
from benchmarks.serve import options
from benchmarks.serve.workloads import Limits, Workload, make_workload
from vmmkv.budget import parse_bytes
from vmmkv.cli.options import JsonOutput
from vmmkv.cli.output import console, make_table
from vmmkv.integrations import continuous_batching as rows

Row = dict[str, Any]
Answers = dict[str, list[int]]
"""By the names of requests, the tokens that they got."""
ROWS, COMPILED, NO_REUSE = "rows", "rows, compiled", "rows, compiled, without reuse"
SYSTEMS: dict[str, Row] = {
    ROWS: {},
    COMPILED: {"default_compile_level": 1},
    NO_REUSE: {"default_compile_level": 1, "allow_block_sharing": False},
}
"""On rows, and what their `ContinuousBatchingConfig` has beside what all have."""
BATCH_TOKENS = 2048
"""Of a forward pass."""
VLLM_ROUNDS = 3
"""Beside one that is not measured; it starts for more than a minute, and serves these in seconds."""
KNOWN = 0.9
"""Of a prompt: what another request has had."""
WARM = 20, 40
"""Requests that are served before any is measured, and the most tokens that each of them gets."""
WARM_SEED = 1 << 31
"""Of their tokens, which no round has."""
EVERY = 0.05
"""Seconds between two looks at the memory."""


@dataclass
class Watched:
    """What was seen of a run.

    Attributes:
        waste: of the pages in use, the part that holds no token, at each look. What is mapped ahead is not in use.
        surplus_bytes: what was mapped beside them and others can have, at each look: ahead, known, or parked.
        physical_bytes: the most that was taken.
    """

    waste: list[float] = field(default_factory=list)
    surplus_bytes: list[int] = field(default_factory=list)
    physical_bytes: int = 0


def main(
    trace: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Azure CSV; None: random.")] = None,
    model: Annotated[str | None, typer.Option(help=f"One of {', '.join(CONFIGS)}.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many of the trace.")] = 300,
    memory: Annotated[str | None, typer.Option(help="For K and V.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="After which who is not done is stopped.")] = 60.0,
    rounds: Annotated[int, typer.Option(min=1, help="Of rows.")] = 3,
    attention: Annotated[list[str] | None, typer.Option(help="Of transformers, on blocks; what it finds.")] = None,
    vllm: options.VllmFolder = None,
    budget_seconds: options.BudgetSeconds = 480.0,
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
    attentions = attention or found_attentions()
    runs, first = serve(build(name, None, device), workload, nbytes, seconds, rounds, attentions, prompt)
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
        "logits": logit_distances(name, device, min(1024, longest // 2)),
        "vllm": serve_beside(vllm, name, workload, nbytes, deadline - perf_counter(), VLLM_ROUNDS),
    }
    result["comparisons"] = compare(result)
    if json_output:
        print_result(result)
    else:
        show(result)


def found_attentions() -> list[str]:
    """Those of transformers that can serve blocks here. The ones that read blocks in place may not be installed."""
    found = {"flash_attention_3": is_flash_attn_3_available(), "flash_attention_2": is_flash_attn_2_available()}
    return ["sdpa", *(name for name, is_here in found.items() if is_here)]


def serve(
    model: Any, workload: Workload, nbytes: int, seconds: float, rounds: int, attentions: list[str], prompt: int
) -> tuple[list[Row], Row]:
    """What is measured of all runs, on rows and then one on blocks with each attention, and of first tokens of a prompt
    of so many, on rows. Tokens on rows are compared with those of the first attention."""
    made: list[tuple[Row, Answers]] = []
    first: Row = {}
    for system in SYSTEMS if model.device.type == "cuda" else (ROWS,):
        with manager_of(model, system, nbytes) as manager:
            warm_up(manager, workload, seconds)
            each = [run(manager, system, workload, number, seconds) for number in range(rounds)]
            if system == ROWS:
                first = first_tokens(manager, model.config.vocab_size, prompt)
            idle = {"idle_bytes": idle_bytes(manager)}
            made += [(row | idle, answers) for row, answers in each]
    blocks: list[tuple[Row, Answers]] = []
    for attention in attentions:
        model.set_attn_implementation(attention)
        with manager_of(model, BLOCKS + attention, nbytes) as manager:
            row, answers = run(manager, BLOCKS + attention, workload, 0, seconds)
            blocks.append((row | {"idle_bytes": idle_bytes(manager)}, answers))
    (_, theirs), *_ = blocks
    ours = [row | ({} if row["round"] else compare_answers(answers, theirs)) for row, answers in made]
    return [*ours, *(row for row, _ in blocks)], first


def warm_up(manager: Any, workload: Workload, seconds: float) -> None:
    """Serves the beginning of some requests, so that what compiles late has done so."""
    requests, tokens = WARM
    few = [replace(request, output=min(request.output, tokens)) for request in workload.requests[:requests]]
    run(manager, "", replace(workload, requests=few, parts=workload.parts[:requests]), WARM_SEED, seconds)


def run(manager: Any, system: str, workload: Workload, number: int, seconds: float) -> tuple[Row, Answers]:
    """Serves all requests, in each round with other prompts, or as much as there is time for."""
    prompts = [ids.tolist() for ids in workload.prompts(manager.model.config.vocab_size, seed=number)]
    first: list[float] = []
    answers: Answers = {}
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
    row = {
        "system": system,
        "round": number,
        "finished": finished,
        "seconds": elapsed,
        "tokens_per_s": generated / elapsed,
        "first_token_s": median(first) if first else None,
        "peak_bytes": seen.physical_bytes,
        "waste": median(seen.waste) if seen.waste else None,
        "most_waste": max(seen.waste, default=None),
        "surplus_bytes": median(seen.surplus_bytes) if seen.surplus_bytes else None,
    }
    return row, answers


def idle_bytes(manager: Any) -> int:
    """What K and V take when nobody asks for anything, and what can has gone back to the system; where requests have
    just been cancelled, perhaps with what they held."""
    cache = manager.batch_processor.cache
    if caches := getattr(cache, "kv_caches", []):
        caches[0].pool.trim()
        return int(caches[0].pool.stats().physical_bytes)
    return int(cache.cache_tensor.nbytes)


def compare_answers(ours: Answers, theirs: Answers) -> Row:
    """How many requests got the same tokens, as far as both were generated, and which part of the tokens comes before
    the first that differs. In 16 bits two tokens are often as likely, and which comes depends on the order of sums."""
    pairs = [(tokens, theirs[name]) for name, tokens in ours.items() if theirs.get(name)]
    alike = [sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(*pair))) for pair in pairs]
    lengths = [min(map(len, pair)) for pair in pairs]
    return {
        "compared": len(pairs),
        "equal": sum(same == length for same, length in zip(alike, lengths)) / max(len(pairs), 1),
        "equal_tokens": sum(alike) / max(sum(lengths), 1),
    }


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
def manager_of(model: Any, system: str, nbytes: int, most: int | None = None) -> Iterator[Any]:
    """A manager that is at work; where there are never more than so many requests it makes no graphs for more."""
    blocks = nbytes // (token_bytes(model.config) * 256)
    if system in SYSTEMS:
        rows.enable(model, max_bytes=nbytes)
    batching = ContinuousBatchingConfig(
        max_batch_tokens=BATCH_TOKENS,
        max_requests_per_batch=most,
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
def watched(manager: Any) -> Iterator[Watched]:
    """Looks at the memory of rows now and then."""
    seen, over = Watched(), threading.Event()

    def watch() -> None:
        while not over.is_set():
            caches = getattr(manager.batch_processor and manager.batch_processor.cache, "kv_caches", [])
            stats = [cache.stats() for cache in caches]
            used = sum(each.pages["used"] for each in stats) * (caches[0].page_size if caches else 0)
            if used:
                seen.waste.append(1 - sum(each.token_bytes for each in stats) / used)
                seen.surplus_bytes.append(sum(each.pages["surplus"] for each in stats) * caches[0].page_size)
                seen.physical_bytes = max(seen.physical_bytes, caches[0].pool.stats().physical_bytes)
            sleep(EVERY)

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


def show(result: Row) -> None:
    console.print(make_table(f"{result['model']}, {result['workload']}", *batching_table(result)))
    console.print(make_table("Reuse", *first_tokens_table(result)))
    console.print(make_table("Comparisons", comparisons.COLUMNS, comparisons.lines(result["comparisons"])))


if __name__ == "__main__":
    typer.run(main)
