"""Options that benchmarks of serving share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

VllmFolder = Annotated[
    Path | None, typer.Option(exists=True, file_okay=False, help="vLLM, unpacked; None: it may be installed.")
]
BudgetSeconds = Annotated[float, typer.Option(help="When to stop, and say what was not reached.")]
