"""Long prompts by each prefill kernel: the whole model, and attention alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.engine.engine import Engine

from .measure import Progress, Row, Settings

ROUNDS = 3
PROMPTS = 2
"""In a run, one after the other."""


class Timed:
    """An attention function whose time on the device is added up, but for the first layer, before which it may idle."""

    def __init__(self, attend: Callable[..., torch.Tensor], device: torch.device) -> None:
        self.attend = attend
        self.on_gpu = device.type == "cuda"
        self.marks: list[Any] = []

    def __call__(self, layer: int, *args: Any) -> torch.Tensor:
        if layer == 0:
            return self.attend(layer, *args)
        self._mark()
        out = self.attend(layer, *args)
        self._mark()
        return out

    def _mark(self) -> None:
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(perf_counter())

    def seconds(self) -> float:
        """In all calls; the device must have finished them."""
        spans = list(pairwise(self.marks))[::2]
        return sum(start.elapsed_time(end) / 1e3 if self.on_gpu else end - start for start, end in spans)


def compare_prefill(result: dict[str, Any], settings: Settings, tokens: int, progress: Progress) -> None:
    """Adds to a result a row for each backend and kernel, measured in turn, and which were skipped, and why."""
    if perf_counter() > settings.deadline:
        result["missed"].append(f"prompts of {tokens} tokens")
        return
    own = "numba" if settings.model.device.type == "cuda" else "torch"
    engines: dict[tuple[str, str], Engine] = {}
    for backend, kernel in (("vmm", own), ("vmm", "fa3"), ("paged", own), ("paged", "flashinfer")):
        try:
            engine = make_engine(settings, backend, kernel, tokens)
            run_prompts(engine, tokens)
        except Exception as error:  # whatever a peer raises is its reason
            reason = f"{type(error).__name__}: {error}"
            result["skipped"].append({"backend": backend, "kernel": kernel, "reason": reason})
        else:
            engines[backend, kernel] = engine
    whole: dict[tuple[str, str], list[float]] = {pair: [] for pair in engines}
    inside: dict[tuple[str, str], list[float]] = {pair: [] for pair in engines}
    for count in range(1, ROUNDS + 1):
        for pair, engine in engines.items():
            whole[pair].append(run_prompts(engine, tokens))
            inside[pair].append(time_attention(engine, tokens))
        progress("prompts", count, ROUNDS)
    for engine in engines.values():
        engine.close()
    result["prefill"] += [make_row(*pair, tokens, median(whole[pair]), median(inside[pair])) for pair in engines]


def make_engine(settings: Settings, backend: str, kernel: str, tokens: int) -> Engine:
    """An engine for one prompt at a time, all of it in one step."""
    max_bytes = 4 * tokens * settings.model.config.kv_layout(settings.model.dtype).token_bytes
    return Engine(
        settings.model,
        backend,
        max_bytes,
        1,
        2 * tokens,
        4 * tokens,
        chunk=tokens,
        attention=kernel,
        graphs=False,
        options=settings.options(f"{backend}+{kernel}"),
    )


def run_prompts(engine: Engine, tokens: int) -> float:
    """Seconds that some prompts take."""
    prompts = [torch.arange(tokens) % engine.model.config.vocab_size for _ in range(PROMPTS)]
    return engine.run(prompts, [1] * PROMPTS).seconds


def time_attention(engine: Engine, tokens: int) -> float:
    """Seconds of the same that are attention's, without writing K and V; the first layer is taken to be like others."""
    attend = engine.attention
    engine.attention = timed = Timed(attend, engine.device)
    run_prompts(engine, tokens)
    engine.attention = attend
    layers = engine.model.config.num_layers
    return timed.seconds() * layers / (layers - 1)


def make_row(backend: str, kernel: str, tokens: int, whole: float, inside: float) -> Row:
    return {
        "backend": backend,
        "kernel": kernel,
        "prompt_tokens": tokens,
        "tokens_per_s": PROMPTS * tokens / whole,
        "attention_tokens_per_s": PROMPTS * tokens / inside,
        "attention_share": inside / whole,
    }
