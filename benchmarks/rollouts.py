"""Rollouts and training steps in turns on one GPU: K and V in rows, beside transformers' own cache.

    python -m benchmarks.rollouts [--model NAME] [--side NAME]... [--budget-seconds 150] [--cycles 1000] [--json]

GRPO by hand, with random weights and a reward that is made up: `generate_batch` answers one prompt many times, then a
step of AdamW trains all weights on the answers. transformers' cache has a share of the memory that is free; rows have
no share to choose. A manager is made for each rollout, or kept. Each side runs in a process of its own, one after
another: some steps of a fixed size, at last steps with more and more answers, until the memory does not suffice. On
rows that are kept a manager also sleeps and wakes many times. Without a GPU a tiny model runs, and memory suffices.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter, sleep
from typing import Annotated, Any, NamedTuple

import torch
import typer
from transformers import ContinuousBatchingConfig, GenerationConfig

from vmmkv.cli.output import JsonOutput, errors, format_bytes
from vmmkv.errors import VmmkvError
from vmmkv.integrations import continuous_batching as rows
from vmmkv.torch import memory_allocated

from .environment import environment
from .generate.models import CONFIGS, build, token_bytes
from .geometry import free_memory, synchronize
from .output import Lines, Row, deliver
from .serve.report import shown

KEPT = "rows-kept"
SIDES: dict[str, tuple[float, bool]] = {
    "blocks-40%": (0.4, False),
    "rows": (0, False),
    "blocks-50%": (0.5, False),
    KEPT: (0, True),
    "blocks-90%": (0.9, False),
    "blocks-50%-kept": (0.5, True),
}
"""The share of the free memory that blocks have, 0 on rows; and whether the manager is kept."""
TOKENS, TOKENS_ON_HOST = (512, 64), (64, 8)
"""Of the prompt, and of an answer."""
STEPS = 5
"""Of a fixed size."""
OF_HOST = 0.01
"""Of a share on the host, where memory is other programs' as well."""
BATCH_TOKENS, REQUESTS = 2048, 64
"""Of a forward pass."""
EVERY, REQUEST_EVERY = 0.005, 20
"""Seconds between two looks at the memory of K and V, and sleeps between two requests."""
CLOSE = 4
"""The search ends where what is too large is larger than what fits by one part in so many."""
FULL, FULL_ON_HOST = 10 << 30, 1 << 18
"""Bytes of K and V of a full cache, which also sleeps."""
GRACE = 15.0
"""Seconds in which a side may end what it has begun in time."""


class Job(NamedTuple):
    """What a side does. `most` are the most answers of a step, where memory suffices for any number."""

    side: str
    model: str
    generations: int
    prompt: int
    tokens: int
    cycles: int
    most: int


class Trainer:
    """A model that answers and is trained."""

    def __init__(self, job: Job) -> None:
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        self.job, (share, self.is_kept) = job, SIDES[job.side]
        self.model: Any = build(job.model, None, self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=on_gpu)
        self.prompt = torch.randint(self.model.config.vocab_size, (job.prompt,)).tolist()
        how: Row = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": -1}
        self.generation = GenerationConfig(max_new_tokens=job.tokens, pad_token_id=0, **how)
        self.batching = ContinuousBatchingConfig(
            max_batch_tokens=BATCH_TOKENS, max_requests_per_batch=REQUESTS, auto_switch_to_flash=False
        )
        if share:
            self.batching.max_memory_percent = share * (1 if on_gpu else OF_HOST)
        else:
            rows.enable(self.model, persistent=self.is_kept, raise_errors=True)
        self.manager: Any = lambda: None
        """The last manager, if there still is one."""
        self.blocks: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        """K and V in blocks."""
        begin = self.model.init_continuous_batching

        def noted(*args: Any, **kwargs: Any) -> Any:
            manager = begin(*args, **kwargs)
            self.manager = weakref.ref(manager)
            return manager

        self.model.init_continuous_batching = noted
        self.budget = self.used = 0
        threading.Thread(target=self.watch, daemon=True).start()

    def step(self, generations: int) -> Row:
        """A rollout, and a training step on it."""
        start, self.used = perf_counter(), 0
        how = {"record_timestamps": True, "persistent_manager": self.is_kept}
        told = self.model.generate_batch([self.prompt] * generations, self.generation, self.batching, **how)
        seconds = perf_counter() - start
        answers = [each.generated_tokens for each in told.values()]
        if list(map(len, answers)) != [self.job.tokens] * generations:
            raise RuntimeError(f"{len(answers)} of {generations} requests were answered, or some in part")
        first = min(each.timestamps[0] for each in told.values()) - start
        free_memory()
        held = memory_allocated() + sum(tensor.nbytes for tensor in self.blocks.values())
        begin, on_gpu = perf_counter(), self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self.train(torch.tensor(answers, device=self.device))
        synchronize(self.device)
        return {
            "generations": generations,
            "rollout_s": seconds,
            "first_token_s": first,
            "budget_bytes": self.budget,
            "peak_kv_bytes": self.used,
            "kv_bytes_before_backward": held,
            "training_peak_bytes": torch.cuda.max_memory_allocated() + memory_allocated() if on_gpu else 0,
            "training_s": perf_counter() - begin,
        }

    def train(self, answers: torch.Tensor) -> None:
        """A step of GRPO: the reward of an answer is the share of its tokens with even numbers."""
        rewards = (answers % 2 == 0).float().mean(1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        ids = torch.cat([torch.tensor(self.prompt, device=self.device).expand(len(answers), -1), answers], 1)
        logits = self.model(ids[:, :-1], logits_to_keep=answers.shape[1], use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="none")
        (losses.view_as(answers) * advantages[:, None]).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def watch(self) -> None:
        """Look at the memory of K and V now and then: the budget, and the most bytes of pages in use."""
        while True:
            sleep(EVERY)
            with suppress(VmmkvError):  # it ends
                self.look()

    def look(self) -> None:
        """Look once. No name of this function keeps a manager that has ended."""
        cache = getattr(getattr(self.manager(), "batch_processor", None), "cache", None)
        if caches := getattr(cache, "kv_caches", []):
            stats = caches[0].pool.stats()
            self.budget, self.used = stats.limit_bytes, max(self.used, stats.used_bytes)
        elif (tensor := getattr(cache, "cache_tensor", None)) is not None:
            self.blocks[id(tensor)] = tensor
            self.budget = self.used = tensor.nbytes

    def attempt(self, generations: int) -> Row:
        """A step, or why there was none: perhaps memory does not suffice."""
        start, row = perf_counter(), {"generations": generations, "error": ""}
        try:
            row |= self.step(generations)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        self.optimizer.zero_grad()
        free_memory()
        return row | {"seconds": perf_counter() - start}

    def fill(self, manager: Any) -> None:
        """Have a manager cache K and V of long prompts, as many as fill a cache."""
        nbytes, length = (FULL, 8 * self.job.prompt) if self.device.type == "cuda" else (FULL_ON_HOST, self.job.prompt)
        prompts = nbytes // (length * token_bytes(CONFIGS[self.job.model])) + 1
        ids = torch.randint(self.model.config.vocab_size, (prompts, length)).tolist()
        manager.add_requests(ids, max_new_tokens=1)
        for _ in ids:
            while manager.get_result(timeout=1) is None:
                pass

    def naps(self) -> Row:
        """Have a manager that runs sleep and wake many times, and now and then answer the prompt with one token."""
        naps: list[Row] = []
        how = {"continuous_batching_config": self.batching, "persistent_manager": True}
        with self.model.continuous_batching_context_manager(self.generation, **how) as manager:
            self.fill(manager)
            start = perf_counter()
            full = {"freed_bytes": rows.sleep(self.model), "sleep_ms": 1e3 * (perf_counter() - start)}
            woke = perf_counter()
            rows.wake(self.model)
            for number in range(self.job.cycles):
                if number % REQUEST_EVERY == 0:
                    manager.add_request(self.prompt, max_new_tokens=1)
                    while manager.get_result(timeout=1) is None:
                        pass
                start = perf_counter()
                freed = rows.sleep(self.model)
                slept = perf_counter()
                free, total = torch.cuda.mem_get_info() if self.device.type == "cuda" else (0, memory_allocated())
                naps.append({"token": start - woke, "sleep": slept - start, "freed": freed, "taken": total - free})
                woke = perf_counter()
                rows.wake(self.model)
        taken, asked = [nap["taken"] for nap in naps], naps[REQUEST_EVERY::REQUEST_EVERY] or naps
        return {
            "sleep_ms": 1e3 * median(nap["sleep"] for nap in asked),
            "freed_bytes": int(median(nap["freed"] for nap in asked)),
            "wake_to_first_token_ms": 1e3 * median(nap["token"] for nap in asked),
            "full": full,
            "taken_bytes": {"first": taken[0], "last": taken[-1], "most": max(taken)},
        }


def work(pipe: Connection, job: Job) -> None:
    """What the process of a side does once it is told when to end: it sends what it has found so far. Steps of a fixed
    size, then of twice as many answers until memory does not suffice, then between what fits and what does not."""
    pipe.send("ready")
    end, trainer, steps, high = pipe.recv(), Trainer(job), list[Row](), 0
    while True:
        if len(steps) == STEPS and job.side == KEPT:
            pipe.send({"naps": trainer.naps()})
        low = max((step["generations"] for step in steps if not step["error"]), default=0)
        tried = (low + high) // 2 if high else job.generations if len(steps) < STEPS else 2 * low
        if tried > job.most or (high and high - low <= max(low // CLOSE, 1)):
            pipe.send({"is_most": True})
            return
        expected = steps[-1]["seconds"] * tried / steps[-1]["generations"] if len(steps) >= STEPS else 0.0
        if perf_counter() + expected > end:
            return
        steps.append(trainer.attempt(tried))
        high = tried if steps[-1]["error"] else high
        pipe.send({"steps": steps, "most": low if steps[-1]["error"] else max(low, tried)})


def measure(names: list[str], job: Job, budget_seconds: float) -> Iterator[Row]:
    """What each side finds. All processes begin at the same time, and wait: to import takes as long as to measure."""
    begun, deadline = [], perf_counter() + budget_seconds
    for name in names:
        ours, theirs = Pipe()
        process = get_context("spawn").Process(target=work, args=(theirs, job._replace(side=name)), daemon=True)
        process.start()
        theirs.close()
        begun.append((name, process, ours))
    for *_, pipe in begun:
        pipe.recv()
    for number, (name, process, pipe) in enumerate(begun):
        found: Row = {"side": name, "steps": [], "naps": {}, "most": 0, "is_most": False}
        start = perf_counter()
        end = start + max(deadline - start, 0) / (len(begun) - number)
        pipe.send(end)
        with suppress(EOFError):  # it has ended
            while pipe.poll(max(end + GRACE - perf_counter(), 0)):
                found |= pipe.recv()
        process.kill()
        process.join()
        errors.print(f"{name}: {perf_counter() - start:.1f} s, {found['most']} answers")
        yield found


def main(
    model: Annotated[str | None, typer.Option(help=f"One of {', '.join(CONFIGS)}.")] = None,
    side: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(SIDES)}.")] = None,
    generations: Annotated[int, typer.Option(min=2, help="Answers of a step of fixed size.")] = 16,
    cycles: Annotated[int, typer.Option(min=1, help="How often a manager sleeps.")] = 1000,
    budget_seconds: Annotated[float, typer.Option(help="When to stop, and say what was not reached.")] = 150.0,
    json_output: JsonOutput = False,
) -> None:
    """Measure rollouts beside training."""
    on_gpu = torch.cuda.is_available()
    name, names = model or ("Qwen3-1.7B" if on_gpu else "tiny"), side or list(SIDES)
    if unknown := {*names} - SIDES.keys():
        raise typer.BadParameter(f"--side {', '.join(unknown)}: sides are {', '.join(SIDES)}")
    sizes, most = (TOKENS, 1 << 20) if on_gpu else (TOKENS_ON_HOST, 2 * generations)
    job = Job("", name, generations, *sizes, cycles, most)
    result: Row = {"environment": environment(torch.device("cuda", 0) if on_gpu else torch.device("cpu"))}
    result |= job._asdict() | {"token_bytes": token_bytes(CONFIGS[name])}
    result["sides"] = list(measure(names, job, budget_seconds))
    result["missed"] = [f"{row['side']}: larger steps" for row in result["sides"] if not row["is_most"]]
    deliver(result, json_output, {f"{name}, a prompt of {job.prompt} tokens": table})


def table(result: Row) -> Lines:
    """A column for each side, a line for each figure: of the last step of fixed size, or the median of those behind the
    first."""
    sides = [row | {"steps": row["steps"][:STEPS]} for row in result["sides"] if row["steps"]]
    sides = [row for row in sides if not any(step["error"] for step in row["steps"])]

    alone = result["generations"] * (result["prompt"] + result["tokens"]) * result["token_bytes"]

    def size(name: str, step: int = -1) -> Callable[[Row], str]:
        return lambda row: format_bytes(row["steps"][step][name])

    def seconds(name: str) -> Callable[[Row], str]:
        return lambda row: f"{median(step[name] for step in row['steps'][1:] or row['steps']):.2f}"

    lines: dict[str, Callable[[Row], str]] = {
        f"most answers of {result['tokens']} tokens that train": lambda row: (
            f"{'' if row['is_most'] else 'at least '}{row['most']}"
        ),
        f"with {result['generations']}: memory of a training step, peak": size("training_peak_bytes"),
        "K and V before backward": size("kv_bytes_before_backward"),
        f"K and V in use, peak; without sharing {format_bytes(alone)}": size("peak_kv_bytes"),
        "budget of K and V, first step": size("budget_bytes", 0),
        "last step": size("budget_bytes"),
        "rollout, s": seconds("rollout_s"),
        "first token, s": seconds("first_token_s"),
        "sleep, ms": lambda row: f"{row['naps']['sleep_ms']:.1f}",
        "memory given back": lambda row: format_bytes(row["naps"]["freed_bytes"]),
        "sleep of a full cache, ms": lambda row: f"{row['naps']['full']['sleep_ms']:.1f}",
        "memory given back by it": lambda row: format_bytes(row["naps"]["full"]["freed_bytes"]),
        "wake to first token, ms": lambda row: f"{row['naps']['wake_to_first_token_ms']:.1f}",
        "memory of the GPU, first sleep": lambda row: format_bytes(row["naps"]["taken_bytes"]["first"]),
        f"sleep {result['cycles']:,}": lambda row: format_bytes(row["naps"]["taken_bytes"]["last"]),
    }
    return ("", *(row["side"] for row in sides)), [
        (what, *(shown(show, row) for row in sides)) for what, show in lines.items()
    ]


if __name__ == "__main__":
    typer.run(main)
