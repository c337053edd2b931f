"""transformers' `generate` with different KV caches: speed, memory, and what is copied for each token.

    python -m benchmarks.generate [--json] [--device cpu] [--only MODEL] [--layers N] [--budget-seconds S]

Models have the shapes of real ones and random weights in bf16. Every step is one of `generate` itself; each contender
gets the same tokens, and its logits are compared. Where a batch is too large to be prefilled by each contender, random
K and V of the prompt are written into its cache, and there is no time to the first token. On the CPU a tiny model shows
that everything works; its speeds say nothing. Needs the extras `bench` and `hf`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from itertools import groupby
from time import monotonic
from typing import Annotated

import torch
import transformers
import typer
from transformers import PreTrainedModel

from benchmarks.environment import environment
from benchmarks.geometry import free_memory
from benchmarks.output import deliver
from vmmkv.cli.output import Device, JsonOutput, errors
from vmmkv.integrations.transformers import VmmCache

from ..attention.timing import copy_bandwidth
from .cells import BASELINE, CPU, GPU, Cell, Figures, Outset, Plan, failure, measure, renew
from .decode import Run
from .models import build, token_bytes
from .tables import shape, tables

ERROR_BOUND = 0.08
"""A relative error of logits that rounding to bf16 in every layer can explain. Backends of SDPA differ by 0.05, and
compiled steps by 0.06, with torch's own caches as well."""


def main(
    json_output: JsonOutput = False,
    device: Device = None,
    only: Annotated[str | None, typer.Option(help="One model, by its name.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the models, instead of all.")] = None,
    budget_seconds: Annotated[float, typer.Option(help="Start no other cell after so long.")] = 540,
) -> None:
    """Measure transformers' generate with different KV caches."""
    transformers.logging.set_verbosity_error()
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    plan = CPU if where.type == "cpu" else GPU
    batches = tuple((model, batch) for model, batch in plan.batches if only in (None, model))
    if not batches:
        raise typer.BadParameter(f"{only} is none of {sorted({model for model, _ in plan.batches})}")
    result = run(replace(plan, batches=batches), where, layers, budget_seconds)
    models = dict.fromkeys(model for model, _ in batches)
    deliver(result, json_output, {title: table for model in models for title, table in tables(model).items()})
    wrong = wrong_cells(result)
    for cell in wrong:
        errors.print(f"Wrong: {cell}", style="red", markup=False)
    if wrong:
        raise typer.Exit(1)


def run(plan: Plan, device: torch.device, layers: int | None, budget_seconds: float) -> Figures:
    """The whole result: a document of numbers and strings."""
    deadline = monotonic() + budget_seconds
    cells = list(plan.cells())
    result: Figures = {
        "environment": environment(device),
        "plan": asdict(plan),
        "layers": layers,
        "copy_gb_per_s": copy_bandwidth(device)["copy_gb_per_s"] if device.type == "cuda" else None,
        "cells": [],
    }
    left_because = "no time was left"
    try:
        for figures in measure_cells(cells, plan, device, layers):
            result["cells"].append(figures)
            errors.print("{model}, {batch} x {prompt}: {contender}".format(**figures), highlight=False)
            if monotonic() > deadline:
                break
    except KeyboardInterrupt:
        left_because = "stopped"
    except RuntimeError as error:  # a kernel broke the device: the cells before are still good
        left_because = failure(error)["reason"]
    left = {"status": "not reached", "reason": left_because}
    result["cells"] += [cell.describe() | left for cell in cells[len(result["cells"]) :]]
    set_ratios(result)
    return result


def measure_cells(cells: list[Cell], plan: Plan, device: torch.device, layers: int | None) -> Iterator[Figures]:
    """What came of each cell, in their order."""
    for name, of_model in groupby(cells, key=lambda cell: cell.model):
        free_memory()
        model = build(name, layers, device)
        for batch, of_batch in groupby(of_model, key=lambda cell: cell.batch):
            reference: dict[int, Run] = {}
            with BASELINE.chosen(model):
                outset = Outset.of(model, batch)
            for contender, of_contender in groupby(of_batch, key=lambda cell: cell.contender):
                with contender.chosen(model):
                    yield from measure_contender(of_contender, model, plan, outset, reference)
        del model


def measure_contender(
    cells: Iterable[Cell], model: PreTrainedModel, plan: Plan, outset: Outset, reference: dict[int, Run]
) -> Iterator[Figures]:
    """The cells of one contender, model and batch size, which share a compiled step where it serves every length."""
    cache = None
    for cell in cells:
        contender = cell.contender
        if cache and contender.compiled and contender.cache is VmmCache:
            renew(cache, model)
        else:
            cache = None
        free_memory()
        figures = plan.left_out(cell, token_bytes(model.config), model.device)
        if not figures:
            try:
                cache = cache or contender.make(model, cell.capacity, plan.page_size)
                figures = measure(cell, model, cache, outset, reference)
            except Exception as error:  # what one contender cannot do must not cost the results of the others
                figures, cache = failure(error), None
        yield cell.describe() | figures


def set_ratios(result: Figures) -> None:
    """Set each cell against the baseline's speed in the same cell."""
    cells = [cell for cell in result["cells"] if cell["status"] == "measured"]
    baseline = {shape(cell): cell["step_ms"] for cell in cells if cell["contender"] == BASELINE.name}
    for cell in cells:
        cell["of_baseline"] = baseline[shape(cell)] / cell["step_ms"] if shape(cell) in baseline else None


def wrong_cells(result: Figures) -> list[Figures]:
    """Cells that failed, and those whose logits rounding cannot explain."""
    return [
        cell
        for cell in result["cells"]
        if cell["status"] == "failed" or (cell["status"] == "measured" and not cell["logits_error"] <= ERROR_BOUND)
    ]


if __name__ == "__main__":
    typer.run(main)
