"""The cells of the table: which there are, and how one is measured, a way to decode equally long prompts."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from benchmarks.geometry import free_memory
from vmmkv.cli.output import format_bytes
from vmmkv.errors import DriverOutOfMemoryError, OutOfPagesError
from vmmkv.integrations.transformers import VmmCache

from .decode import Run, Watched, decode, fill
from .models import token_bytes, weight_bytes

Figures = dict[str, Any]

BUDGET = "95%"
"""Of the memory that is free, for a `VmmCache`; the others have no budget, and fail where there is no more."""


@dataclass(frozen=True)
class Contender:
    """One way to decode.

    Attributes:
        cache: its class.
        attention: transformers' `attn_implementation`.
        backend: of SDPA: what torch and transformers choose by themselves, or flash and nothing else.
        compiled: `generate` compiles the decode step and replays it as a CUDA graph, which it does by itself where
            the cache allows it.
    """

    cache: type[Cache]
    attention: str = "sdpa"
    backend: str = "default"
    compiled: bool = False

    @property
    def name(self) -> str:
        details = [self.attention]
        details += ["flash"] if self.backend == "flash" else []
        details += ["compiled"] if self.compiled else []
        return f"{self.cache.__name__}, {', '.join(details)}"

    def make(self, model: PreTrainedModel, capacity: int, page_size: int | None) -> Cache:
        """An empty cache: a static one for `capacity` tokens, a `VmmCache` for as many as the model can take."""
        if self.cache is StaticCache:
            return StaticCache(model.config, max_cache_len=capacity)
        if self.cache is VmmCache:
            seq_len = model.config.max_position_embeddings
            return VmmCache(model.config, seq_len, max_bytes=BUDGET, page_size=page_size, compile=self.compiled)
        return DynamicCache(config=model.config)

    @contextmanager
    def chosen(self, model: PreTrainedModel) -> Iterator[None]:
        """The model decodes like this inside."""
        model.set_attn_implementation(self.attention)
        try:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if self.backend == "flash" else nullcontext():
                yield
        finally:
            if self.compiled:
                torch.compiler.reset()  # or the compiled steps, and the memory of their graphs, would stay


BASELINE = Contender(DynamicCache)
"""What `generate` does unless told otherwise."""

CONTENDERS = (
    BASELINE,
    Contender(DynamicCache, backend="flash"),
    Contender(VmmCache),
    Contender(VmmCache, backend="flash"),
    Contender(VmmCache, attention="vmmkv"),
    Contender(VmmCache, attention="vmmkv", compiled=True),
    Contender(StaticCache),
    Contender(StaticCache, compiled=True),
)


def renew(cache: Cache, model: PreTrainedModel) -> None:
    """Empties a cache for the next batch. It keeps its addresses, which a compiled step may know, and has no more
    memory than a new one."""
    if type(cache) is DynamicCache:
        cache.__init__(config=model.config)  # reset() of transformers 5.17 keeps the length
        return
    cache.reset()
    if isinstance(cache, VmmCache):
        for pool in cache.pools:
            pool.trim()


def held_bytes(cache: Cache) -> int:
    """Bytes of memory that the cache keeps."""
    if isinstance(cache, VmmCache):
        return sum(pool.stats().physical_bytes for pool in cache.pools)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


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
    """

    model: str
    batch: int
    contender: Contender
    prompt: int
    new_tokens: int
    capacity: int
    prefilled: bool

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
class Plan:
    """A run of the benchmark.

    Attributes:
        batches: model and batch size, the most telling ones first.
        prompts: lengths, ascending: a `VmmCache` with compiled steps serves them one after another.
        new_tokens: of `generate` where all of them are decoded: the shortest prompt at batch 1.
        timed_steps: of every other cell.
        computed_tokens: a batch of at most so many tokens is prefilled by the model; a larger one gets random K and V.
        compiled_static: batch and prompt of the compiled static caches, each of which compiles for its length alone.
        page_size: bytes of a page; None is 2 MiB.
    """

    batches: tuple[tuple[str, int], ...]
    prompts: tuple[int, ...]
    new_tokens: int
    timed_steps: int
    computed_tokens: int
    compiled_static: tuple[tuple[int, int], ...]
    page_size: int | None

    def cells(self) -> Iterator[Cell]:
        """Cells of one model and batch come together, and among them those of one contender."""
        for model, batch in self.batches:
            for contender in CONTENDERS:
                for prompt in self.prompts:
                    yield self.cell(model, batch, contender, prompt)

    def cell(self, model: str, batch: int, contender: Contender, prompt: int) -> Cell:
        whole = batch == 1 and prompt == self.prompts[0]
        return Cell(
            model,
            batch,
            contender,
            prompt,
            new_tokens=self.new_tokens if whole else 1 + WARM_UP_STEPS + self.timed_steps,
            capacity=prompt + self.new_tokens,
            prefilled=batch * prompt > self.computed_tokens,
        )

    def left_out(self, cell: Cell, token_bytes: int, device: torch.device) -> dict[str, str] | None:
        """Why a cell is not tried; None if it is."""
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf
        need = cell.batch * cell.capacity * token_bytes
        if need > free:
            return {"status": "does not fit", "reason": f"{format_bytes(need)} of K and V, {format_bytes(free)} free"}
        if cell.contender.compiled and device.type == "cpu":
            return {"status": "not run", "reason": "generate() compiles on a GPU only"}
        static = cell.contender.compiled and cell.contender.cache is StaticCache
        if static and (cell.batch, cell.prompt) not in self.compiled_static:
            return {"status": "not run", "reason": "a static cache compiles for each length: other cells stand for it"}
        return None


LLAMA, QWEN = "Llama-3.1-8B", "Qwen3-0.6B"

GPU = Plan(
    batches=tuple((model, batch) for model in (LLAMA, QWEN) for batch in (8, 1, 32)),
    prompts=(512, 8192, 32_768),
    new_tokens=256,
    timed_steps=16,
    computed_tokens=32_768,
    compiled_static=((1, 512), (8, 32_768)),
    page_size=None,
)
CPU = Plan(
    batches=(("tiny", 1), ("tiny", 2)),
    prompts=(16, 96),
    new_tokens=24,
    timed_steps=4,
    computed_tokens=96,
    compiled_static=((2, 96),),
    page_size=4096,
)


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
    """What is said of a cell that came to nothing: the error, and where it was raised."""
    out_of_memory = isinstance(error, (torch.OutOfMemoryError, OutOfPagesError, DriverOutOfMemoryError))
    where = traceback.extract_tb(error.__traceback__)[-1]
    message = next(iter(str(error).splitlines()), "")
    return {
        "status": "out of memory" if out_of_memory else "failed",
        "reason": f"{type(error).__name__}: {message} ({Path(where.filename).name}:{where.lineno})",
    }


def measure(cell: Cell, model: PreTrainedModel, cache: Cache, outset: Outset, reference: dict[int, Run]) -> Figures:
    """The figures of a cell.

    Args:
        cache: empty.
        reference: for each length of the prompt, what the first contender computed; this one's is added where it
            is the first.
    """
    compiled = cell.contender.compiled
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
    return {
        "status": "measured",
        "prompt_kv": "random" if cell.prefilled else "computed",
        "new_tokens": cell.new_tokens,
        **speed(run, cell),
        **memory(run, cache, model, outset),
        **compared(run, reference.setdefault(cell.prompt, run)),
        **copies(run, cache, model, compiled),
    }


def speed(run: Run, cell: Cell) -> Figures:
    """Of a decode step, and to the first token, where the prompt was computed."""
    steps = run.step_seconds[WARM_UP_STEPS:]
    return {
        "steps_timed": len(steps),
        "step_ms": median(steps) * 1e3,
        "tokens_per_s": cell.batch / median(steps),
        "ttft_ms": None if cell.prefilled else run.first_seconds * 1e3,
    }


def memory(run: Run, cache: Cache, model: PreTrainedModel, outset: Outset) -> Figures:
    """Bytes of the tokens, of the cache, and at the peak of the decode steps, above the weights.

    Torch's allocator does not know of a `VmmCache`'s pages, which only become more in a run: they are added. Whatever
    is out at the peak, above an empty cache's step, is K and V or copies of them.
    """
    batch, tokens = run.ids.shape
    held = held_bytes(cache)
    figures: Figures = {
        "weight_bytes": weight_bytes(model),
        "live_bytes": batch * (tokens - 1) * token_bytes(model.config),
        "held_bytes": held,
        "peak_bytes": None,
        "kv_peak_bytes": None,
    }
    if run.peak_bytes is not None and outset.step_bytes is not None:
        peak = run.peak_bytes - outset.allocated_bytes + (held if isinstance(cache, VmmCache) else 0)
        figures |= {"peak_bytes": peak, "kv_peak_bytes": peak - outset.step_bytes}
    return figures


def copies(run: Run, cache: Cache, model: PreTrainedModel, compiled: bool) -> Figures:
    """Bytes copied by one step more, and the attention that ran. It is the first of its call, so never compiled: of a
    compiled contender, whose compiler may leave copies out, they are not reported."""
    with Watched() as watched:
        decode(model, cache, run.ids, 1)
    return {"copied_bytes": None if compiled else watched.copied_bytes, "sdpa_kernels": sorted(watched.attention)}


def compared(run: Run, reference: Run) -> dict[str, float]:
    """How near the run's tokens and last logits are to the reference's, which had the same inputs at each step."""
    difference = (run.logits - reference.logits).norm() / reference.logits.norm()
    same = (run.choices == reference.choices).float().mean()
    return {"same_tokens": same.item(), "logits_error": difference.item()}
