"""Options that benchmarks of serving share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

VllmFolder = Annotated[
    Path | None, typer.Option(exists=True, file_okay=False, help="vLLM, unpacked; None: it may be installed.")
]
MaxSequences = Annotated[int, typer.Option(min=1, help="Most requests that run at a time.")]
Chunk = Annotated[int, typer.Option(min=1, help="Most tokens of prompts in a step.")]
Lookahead = Annotated[
    int | None,
    typer.Option(min=0, help="Tokens that are mapped ahead of each sequence; 0 without a mapper, else the usual."),
]
Seed = Annotated[int, typer.Option(min=0, help="Of prompts and random requests.")]
BudgetSeconds = Annotated[float, typer.Option(help="When to stop, and say what was not reached.")]
