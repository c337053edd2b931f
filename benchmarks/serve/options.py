"""Options of the serving benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.engine.engine import BACKENDS, REUSING, SUSPENDING
from benchmarks.engine.model import MODELS

from .measure import LONGEST, REUSE, SUSPEND
from .vllm_peer import VLLM

CHOICES = [
    *BACKENDS,
    *(f"{name}+{REUSE}" for name in REUSING),
    *(f"{name}+{SUSPEND}" for name in SUSPENDING),
    *("vmm+fa3", "paged+flashinfer", f"static+{LONGEST}", *VLLM),
]
"""Backends."""

# What is measured.
Traces = Annotated[
    list[Path] | None,
    typer.Option(exists=True, dir_okay=False, help="Azure CSV or Mooncake JSON lines; the first is the main one."),
]
ModelName = Annotated[str | None, typer.Option(help=f"{', '.join(MODELS)}, or a folder of safetensors.")]
Memory = Annotated[str | None, typer.Option(help="Budget for K and V, of each backend.")]
Quick = Annotated[bool, typer.Option("--quick", help="Saturation alone, of rows and blocks; see above.")]
Reuse = Annotated[bool, typer.Option("--reuse", help="With prefix reuse and without; see above.")]
SharedPrompts = Annotated[int, typer.Option(min=1, help="System prompts, with --reuse.")]
Backends = Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(CHOICES)}.")]
VllmFolder = Annotated[
    Path | None, typer.Option(exists=True, file_okay=False, help="vLLM, unpacked; None: it may be installed.")
]

# In which ways, and how often.
Rates = Annotated[list[float] | None, typer.Option(help="Of the main trace: shares of saturation.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Of the main trace at saturation; the median is reported.")]
Seeds = Annotated[
    int | None, typer.Option(min=1, help="At each rate: prompts and pauses anew; the median is reported.")
]
Wait = Annotated[bool | None, typer.Option(help="Of the main trace at saturation, also wait for each step's tokens.")]
Unknown = Annotated[
    bool, typer.Option("--unknown", help="Likewise, with lengths of answers that the schedule does not know.")
]
Busy = Annotated[bool, typer.Option("--busy", help="Likewise, waiting, beside a busy Python thread.")]

# Of which size.
Requests = Annotated[int | None, typer.Option(min=1, help="Most requests of a trace.")]
Tokens = Annotated[
    int, typer.Option(min=1, help="Most tokens of the main trace, or of each with --reuse; else of others half.")
]
MaxSequences = Annotated[int, typer.Option(min=1, help="Most requests that run at a time.")]
MaxSeqLen = Annotated[int | None, typer.Option(help="What static slots are made for, if no request is longer.")]
Chunk = Annotated[int, typer.Option(min=1, help="Most tokens of prompts in a step.")]
PromptTokens = Annotated[int | None, typer.Option(min=1, help="Of the long prompts.")]
Shorten = Annotated[int | None, typer.Option(min=1, help="Divide the lengths of a trace.")]
Lengthen = Annotated[int, typer.Option(min=1, help="Multiply the lengths of answers.")]
Lookahead = Annotated[
    int | None,
    typer.Option(min=0, help="Tokens that are mapped ahead of each sequence; 0 without a mapper, else the usual."),
]
Seed = Annotated[int, typer.Option(min=0, help="Of prompts and random requests.")]

# What becomes of it.
BudgetSeconds = Annotated[float, typer.Option(help="When to stop, and say what was not reached.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result.")]
Plot = Annotated[Path | None, typer.Option(help="Draw memory and concurrency over time.")]
