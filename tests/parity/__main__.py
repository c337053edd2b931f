"""Every causal and sequence-to-sequence model of transformers, small and random, with vmmkv and without.

    python -m tests.parity [--json FILE] [--model NAME]... [--device cpu]

Each is run with left padding, in chunks and token by token: with vmmkv's attention, and with vmmkv's caches under each
attention. Logits must be those of transformers' eager attention and `DynamicCache`. Those that generate run under
continuous batching on rows, too: their tokens must be those of `generate`. The layout that vmmkv finds for each must
have the bytes by which a cache grows. On the CPU kernels are replaced by
plain PyTorch, so that what they are told is checked; on a GPU they run. Ends with 1 if anything differs or fails. Needs
the extras `cli` and `hf`.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch

if not torch.cuda.is_available():
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # kernels are never called, but can be imported

import transformers
import typer
from rich.progress import Progress
from rich.table import Table

from vmmkv.cli.options import Device
from vmmkv.cli.output import console, errors

from .batching import check_batching
from .check import CASES, Outcome, check
from .models import UNPADDED, kinds, why_left_out
from .sizes import check_size

LOOKS = {
    "same": "[green]same",
    "differs": "[bold red]differs",
    "failed": "[bold red]failed",
    "refused": "[yellow]refused",
    "static": "[dim]static",
    "none": "[dim]none",
}
BATCHING = ("rows", "continuous batching")
COLUMNS = [f"{what}\n{cache.replace('Cache', '').replace('=True', '')}" for what, cache in (*CASES, BATCHING)]


def main(
    model: Annotated[list[str] | None, typer.Option(help="A model's class, instead of all.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the results go as JSON.")] = None,
    device: Device = None,
) -> None:
    """Compare logits with and without vmmkv, for every model of transformers."""
    unknown = set(model or ()) - set(kinds())
    if unknown:
        raise typer.BadParameter(f"transformers {transformers.__version__} has no {', '.join(sorted(unknown))}")
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    quiet()
    reasons = {kind: why_left_out(kind) for kind in model or kinds()}
    results: dict[str, list[Outcome]] = {}
    sizes: dict[str, Outcome] = {}
    with Progress(console=errors, transient=True) as progress:
        task = progress.add_task("", total=len(reasons))
        for kind, reason in reasons.items():
            progress.update(task, description=kind, advance=1)
            sizes[kind] = check_size(kind)
            if not reason:
                results[kind] = [*check(kind, where), check_batching(kind, where)]
    show(results, reasons, sizes)
    if json_file:
        json_file.write_text(json.dumps(as_json(results, reasons, sizes, where), indent=1) + "\n")
    wrong = [
        kind
        for kind in reasons
        if any(outcome.verdict in ("differs", "failed") for outcome in (sizes[kind], *results.get(kind, ())))
    ]
    if wrong:
        errors.print(f"Wrong: {', '.join(wrong)}", style="red")
        raise typer.Exit(1)


def quiet() -> None:
    """Leaves the screen to the table: the models that are made here warn of much."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("vmmkv").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # tensors are tiny: threads would only wait for each other


def show(results: dict[str, list[Outcome]], reasons: dict[str, str | None], sizes: dict[str, Outcome]) -> None:
    table = Table("model", *COLUMNS, "vmmkv runs")
    for kind, outcomes in results.items():
        table.add_row(kind, *[LOOKS[outcome.verdict] for outcome in outcomes], ran(outcomes[0]))
    console.print(table)
    for kind, outcomes in results.items():
        for (implementation, cache), outcome in zip((*CASES, BATCHING), outcomes):
            if outcome.verdict not in ("same", "static") and (outcome.verdict, outcome.attention) != ("none", "sdpa"):
                console.print(f"{kind}, {implementation}, {cache}: {outcome.verdict}: {outcome.detail}", markup=False)
    for reason, count in Counter(filter(None, reasons.values())).items():
        names = [kind for kind, why in reasons.items() if why == reason]
        console.print(f"left out ({count}): {reason}: {', '.join(names)}", markup=False)
    for kind in sorted(UNPADDED.keys() & results.keys()):
        console.print(f"run without padding: {kind}: {UNPADDED[kind]}", markup=False)
    for kind, outcome in sizes.items():
        if outcome.verdict != "same":
            console.print(f"{kind}, layout: {outcome.verdict}: {outcome.detail}", markup=False)
    by_case = dict(zip((*CASES, BATCHING), zip(*results.values())))
    for case, outcomes in (by_case | {("layout", "DynamicCache"): tuple(sizes.values())}).items():
        counts = Counter(LOOKS[outcome.verdict].partition("]")[2] for outcome in outcomes)
        console.print(f"{' with '.join(case)}: {', '.join(f'{n} {v}' for v, n in counts.items())}", markup=False)


def ran(outcome: Outcome) -> str:
    """What attention came to with `attn_implementation="vmmkv"`."""
    if outcome.attention == "eager":
        return "the model's own"
    return ", ".join(["kernels"] * bool(outcome.kernel_calls) + [f"not: {reason}" for reason in outcome.fallbacks])


def as_json(
    results: dict[str, list[Outcome]], reasons: dict[str, str | None], sizes: dict[str, Outcome], device: str
) -> dict[str, object]:
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "models": {
            kind: {"/".join(case): asdict(outcome) for case, outcome in zip((*CASES, BATCHING), outcomes)}
            for kind, outcomes in results.items()
        },
        "layouts": {kind: {"verdict": of.verdict, "detail": of.detail} for kind, of in sizes.items()},
        "left_out": {kind: reason for kind, reason in reasons.items() if reason},
    }


if __name__ == "__main__":
    typer.run(main)
