"""One cell of the table: a contender that decodes one batch of equally long prompts."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from vmmkv.errors import DriverOutOfMemoryError, OutOfPagesError
from vmmkv.integrations.transformers import VmmCache

from .caches import Contender, driver_calls, held_bytes, renew
from .decode import Run, Watched, decode, fill
from .models import token_bytes, weight_bytes

Figures = dict[str, Any]

WARM_UP_STEPS = 6
"""Steps not timed: a compiled one compiles in the first, is captured in the second, and allocates in the third."""


@dataclass(frozen=True)
class Cell:
    """What to measure.

    Attributes:
        prompt: tokens of each sequence.
        new_tokens: that `generate` is asked for.
        capacity: tokens that a static cache is made for.
        prefilled: the prompt's K and V are random, not computed.
        chunk: tokens of a chunk, where chunked prefill is measured too.
    """

    model: str
    batch: int
    contender: Contender
    prompt: int
    new_tokens: int
    capacity: int
    prefilled: bool
    chunk: int | None

    def describe(self) -> Figures:
        """What names it in a result."""
        return {
            "model": self.model,
            "batch": self.batch,
            "prompt": self.prompt,
            "contender": self.contender.name,
            "cache": self.contender.cache.__name__,
            "attention": self.contender.attention,
            "backend": self.contender.backend,
            "compiled": self.contender.compiled,
        }


@dataclass(frozen=True)
class Outset:
    """The device before any cell of a batch size.

    Attributes:
        allocated_bytes: what torch has out: the weights, and workspaces of its libraries.
        step_bytes: what a decode step with next to nothing in the cache adds at its peak. None on the CPU.
    """

    allocated_bytes: int
    step_bytes: int | None

    @classmethod
    def of(cls, model: PreTrainedModel, batch: int) -> Outset:
        ids = torch.ones(batch, 1, dtype=torch.long, device=model.device)
        decode(model, DynamicCache(config=model.config), ids, WARM_UP_STEPS)  # allocates those workspaces
        free_memory()
        allocated = torch.cuda.memory_allocated() if ids.is_cuda else 0
        peak = decode(model, DynamicCache(config=model.config), ids, WARM_UP_STEPS).peak_bytes
        return cls(allocated, None if peak is None else peak - allocated)


def failure(error: Exception) -> Figures:
    """What is said of a cell that came to nothing."""
    out_of_memory = isinstance(error, (torch.OutOfMemoryError, OutOfPagesError, DriverOutOfMemoryError))
    reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return {"status": "out of memory" if out_of_memory else "failed", "reason": reason}


def measure(cell: Cell, model: PreTrainedModel, cache: Cache, outset: Outset, reference: dict[int, Run]) -> Figures:
    """The figures of a cell.

    Args:
        cache: empty.
        reference: for each length of the prompt, what the first contender computed; this one's is added where it
            is the first.
    """
    contender, compiled = cell.contender, cell.contender.compiled
    generator = torch.Generator(model.device).manual_seed(cell.prompt)
    shape = cell.batch, cell.prompt
    ids = torch.randint(model.config.vocab_size, shape, generator=generator, device=model.device)
    if cell.prefilled:
        fill(cache, model, cell.batch, cell.prompt - 1)  # generate() computes the last token by itself
        free_memory()
    else:
        decode(model, cache, ids, WARM_UP_STEPS + 1, compiled)
        renew(cache, model)
    run = decode(model, cache, ids, cell.new_tokens, compiled)
    steps = run.step_seconds[WARM_UP_STEPS:]
    held, live = held_bytes(cache), cell.batch * cache_tokens(run) * token_bytes(model.config)
    figures: Figures = {
        "status": "measured",
        "prompt_kv": "random" if cell.prefilled else "computed",
        "steps_timed": len(steps),
        "step_ms": median(steps) * 1e3,
        "tokens_per_s": cell.batch / median(steps),
        "generate_tokens_per_s": None
        if cell.prefilled
        else cell.batch * cell.new_tokens / (run.first_seconds + sum(run.step_seconds)),
        "new_tokens": cell.new_tokens,
        "ttft_ms": None if cell.prefilled else run.first_seconds * 1e3,
        "weight_bytes": weight_bytes(model),
        "live_bytes": live,
        "held_bytes": held,
        **memory(run, held if contender.cache is VmmCache else 0, outset),
        **compared(run, reference.setdefault(cell.prompt, run)),
    }
    with Watched() as watched:  # one step more, never compiled: it is generate's first
        decode(model, cache, run.ids, 1)
    figures["copied_bytes"] = None if compiled else watched.copied_bytes  # a compiler may leave some out
    figures["sdpa_kernels"] = sorted(watched.attention)
    if isinstance(cache, VmmCache) and not cell.prefilled:
        before = driver_calls(cache)
        cache.reset()
        used = decode(model, cache, ids, WARM_UP_STEPS + 1, compiled)
        figures |= {"driver_calls_when_used": driver_calls(cache) - before, "ttft_used_ms": used.first_seconds * 1e3}
    figures |= {"chunk": cell.chunk, "ttft_chunked_ms": None}
    if cell.chunk:
        renew(cache, model)
        chunked = decode(model, cache, ids, 1, prefill_chunk_size=cell.chunk)
        figures["ttft_chunked_ms"] = chunked.first_seconds * 1e3
    return figures


def cache_tokens(run: Run) -> int:
    return run.ids.shape[1] - 1


def memory(run: Run, pages: int, outset: Outset) -> dict[str, int | None]:
    """Peaks of the decode steps.

    Torch's allocator does not know of a `VmmCache`'s pages, which only become more in a run: they are added. Whatever
    else torch had out, above an empty cache's step, is K and V or copies of them.
    """
    if run.peak_bytes is None or outset.step_bytes is None:
        return {"peak_bytes": None, "kv_peak_bytes": None}
    peak = run.peak_bytes - outset.allocated_bytes + pages
    return {"peak_bytes": peak, "kv_peak_bytes": peak - outset.step_bytes}


def compared(run: Run, reference: Run) -> dict[str, float]:
    """How near the run's tokens and last logits are to the reference's, which had the same inputs at each step."""
    difference = (run.logits - reference.logits).norm() / reference.logits.norm()
    same = (run.choices == reference.choices).float().mean()
    return {"same_tokens": same.item(), "logits_error": difference.item()}


def free_memory() -> None:
    """Gives back what nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
