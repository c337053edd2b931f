"""Which cells are measured, in which order, and which ones are not worth their time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import StaticCache

from vmmkv.cli.output import format_bytes

from .caches import CONTENDERS, Contender
from .cells import WARM_UP_STEPS, Cell


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
