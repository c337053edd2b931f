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

from vmmkv.cli.output import Device, console, errors

from .batching import check_batching
from .check import CASES, Outcome, check
from .models import UNPADDED, kinds, why_left_out
from .sizes import check_size

LAYOUT = "layout/DynamicCache"
COLUMNS = [*map("/".join, CASES), "rows/continuous batching", LAYOUT]


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
    left_out = {kind: reason for kind in model or kinds() if (reason := why_left_out(kind))}
    results: dict[str, dict[str, Outcome]] = {}
    with Progress(console=errors, transient=True) as progress:
        for kind in progress.track([*(model or kinds())]):
            ran = [] if kind in left_out else [*check(kind, where), check_batching(kind, where)]
            results[kind] = dict(zip(COLUMNS, ran)) | {LAYOUT: check_size(kind)}
    show(results, left_out)
    if json_file:
        place = torch.cuda.get_device_name() if where == "cuda" else where
        told = {"transformers": transformers.__version__, "torch": torch.__version__, "device": place}
        cases = {kind: {case: asdict(outcome) for case, outcome in ran.items()} for kind, ran in results.items()}
        json_file.write_text(json.dumps(told | {"models": cases, "left_out": left_out}, indent=1) + "\n")
    if wrong := [
        kind for kind, ran in results.items() if {each.verdict for each in ran.values()} & {"differs", "failed"}
    ]:
        errors.print(f"Wrong: {', '.join(wrong)}", style="red")
        raise typer.Exit(1)


def quiet() -> None:
    """Leaves the screen to the table: the models that are made here warn of much."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("vmmkv").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # tensors are tiny: threads would only wait for each other


def show(results: dict[str, dict[str, Outcome]], left_out: dict[str, str]) -> None:
    """Prints what became of each case of a kind, and of each case in all."""
    for kind, ran in results.items():
        said = [left_out[kind]] if kind in left_out else [attention_of(ran[COLUMNS[0]])]
        said += [UNPADDED[kind]] if kind in UNPADDED else []
        console.print(f"{kind} ({'; '.join(said)})", markup=False)
        for case, outcome in ran.items():
            console.print(f"    {case}: {outcome.verdict} {outcome.detail}", markup=False)
    for case in COLUMNS:
        counts = Counter(ran[case].verdict for ran in results.values() if case in ran)
        console.print(f"{case}: {', '.join(f'{number} {verdict}' for verdict, number in counts.items())}", markup=False)


def attention_of(outcome: Outcome) -> str:
    """What attention came to with `attn_implementation="vmmkv"`."""
    if outcome.attention == "eager":
        return "the model's own"
    return ", ".join(["kernels"] * bool(outcome.kernel_calls) + [f"not: {reason}" for reason in outcome.fallbacks])


if __name__ == "__main__":
    typer.run(main)
