"""vLLM beside ours: the same requests, model's shape and bytes for K and V, in a process of its own.

At saturation it serves as `LLM.generate` does, whose answers come when they are whole; at other rates tokens are
streamed, and requests come when they come to ours. Rounds follow one another when ours are over, which hold no memory
then but weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

import numpy as np

from .measure import REUSE, Load, Row, Settings, free_memory, middle, quantiles
from .vllm_start import BLOCK, can_be_had, engine_options, model_config, serve_with_vllm
from .workloads import Workload, arrivals

VLLM = "vllm", f"vllm+{REUSE}"
"""Without prefix caching, and with it."""
SHARE = 0.5
"""Of the time: what is kept for vLLM, which starts for more than a minute."""


class Task(NamedTuple):
    """A workload, how its requests come, and how often."""

    workload: Workload
    loads: list[Load]
    rounds: int


@dataclass(frozen=True)
class Vllm:
    """vLLM, as far as it can be had.

    Attributes:
        names: of `VLLM`.
        folder: where it is unpacked; None: it is installed, or cannot be had.
        weights: a folder of safetensors; None: random weights, of the model's shape.
    """

    names: list[str]
    folder: Path | None
    weights: Path | None

    @property
    def can_be_had(self) -> bool:
        return can_be_had(self.folder)

    def serve(self, result: Row, settings: Settings, tasks: list[Task]) -> None:
        """Adds to a result a row for each name and load, and what cannot be had or was not reached, and why."""
        free_memory()
        for name in self.names:
            if self.can_be_had:
                self._serve(result, settings, tasks, name)
            else:
                reason = "there is no module vllm, and no --vllm with a folder of it"
                result["skipped"].append({"backend": name, "kernel": "", "reason": reason})

    def _serve(self, result: Row, settings: Settings, tasks: list[Task], name: str) -> None:
        plans = [plan(result, settings, task) for task in tasks]
        works = [work(settings, task, runs) for task, runs in zip(tasks, plans)]
        with TemporaryDirectory() as place:
            options = options_of(settings, tasks, self.weights or write_config(Path(place), settings), name == VLLM[1])
            result.setdefault("vllm_options", {})[name] = {key: options[key] for key in options if key != "model"}
            left = settings.deadline - perf_counter()
            version, about, rows, reason = serve_with_vllm(Path(place), options, works, self.folder, left)
        if version is None:
            result["skipped"].append({"backend": name, "kernel": "", "reason": reason})
            return
        result["peers"]["vllm"] = version
        result["vllm_options"][name] |= about
        for number, (task, runs) in enumerate(zip(tasks, plans)):
            found: dict[str, list[Row]] = {}
            there = [row for row in rows if row["work"] == number]
            for run, row in zip(runs, there):
                about = {"trace": task.workload.name, "load": run.load.name} | run.load._asdict() | {"backend": name}
                found.setdefault(run.load.name, []).append(about | figures(task.workload, run, row))
            result["serving"].extend(map(middle, found.values()))
            for run in runs[len(there) :]:
                result["missed"].append(f"{task.workload.name}, {run.load.name}, {name}: {reason}")


class Run(NamedTuple):
    """A run of a workload.

    Attributes:
        times: when requests come; None: all at once.
        offered: requests a second.
    """

    load: Load
    seed: int
    times: list[float] | None
    offered: float | None


def plan(result: Row, settings: Settings, task: Task) -> list[Run]:
    """The runs of a task, in the order of ours, at the rates at which requests came to ours, if any did."""
    runs = []
    rates = {(row["trace"], row["load"]): row["offered_requests_per_s"] for row in result["serving"]}
    for number in range(max(task.rounds, settings.seeds)):
        for load in task.loads:
            rate = rates.get((task.workload.name, load.name))
            if number >= (task.rounds if load.rate is None else settings.seeds):
                continue
            if load.rate is None:
                runs.append(Run(load, settings.seed, None, None))
            elif rate:
                requests = task.workload.first(round(load.rate * len(task.workload.requests)))
                times = arrivals(requests, rate, settings.seed, number).tolist()
                runs.append(Run(load, settings.seed, times, rate))
    return runs


def work(settings: Settings, task: Task, runs: list[Run]) -> Row:
    """What the process has to know of a task."""
    prompts = task.workload.prompts(settings.model.config.vocab_size, settings.seed)
    outputs = [request.output for request in task.workload.requests]
    return {"prompts": [ids.tolist() for ids in prompts], "outputs": outputs, "runs": [run.times for run in runs]}


def options_of(settings: Settings, tasks: list[Task], model: Path, caching: bool) -> Row:
    """Of `vllm.LLM`."""
    token_bytes = settings.model.config.kv_layout(settings.model.dtype).token_bytes
    return engine_options(
        model,
        dtype=str(settings.model.dtype).removeprefix("torch."),
        max_seq_len=max(task.workload.max_seq_len for task in tasks),
        blocks=settings.max_bytes // (BLOCK * token_bytes),
        sequences=settings.max_sequences,
        step_tokens=settings.chunk + settings.max_sequences,
        caching=caching,
    )


def write_config(folder: Path, settings: Settings) -> Path:
    """Writes the `config.json` of a model's shape; returns its folder."""
    config = model_config(settings.model.config, settings.model.angles.shape[1])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def figures(workload: Workload, run: Run, told: Row) -> Row:
    """What is reported of a run, in the words of ours, as far as it is known."""
    requests = workload.requests[: len(told["tokens"])]
    outputs, tokens = np.array([request.output for request in requests]), np.array(told["tokens"])
    seconds, finished = told["seconds"], int((tokens == outputs).sum())
    row: Row = {
        "requests": len(requests),
        "finished": finished,
        "seconds": seconds,
        "requests_per_s": finished / seconds,
        "output_tokens_per_s": int(tokens.sum()) / seconds,
        "tokens_per_s": int(tokens.sum() + sum(request.prompt for request in requests)) / seconds,
        "seed": run.seed,
        "offered_requests_per_s": run.offered,
    }
    if run.times is not None:
        first, last, gaps = (np.array(told[name]) for name in ("first", "last", "gaps"))
        several = outputs > 1
        row["ttft_s"] = quantiles(first - np.array(run.times))
        row["tpot_s"] = quantiles((last - first)[several] / (outputs - 1)[several])
        row["gap_s"] = quantiles(gaps[several])
    return row
