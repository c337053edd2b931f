"""Options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TraceFile = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Azure CSV or Mooncake JSON lines.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; cuda where there is a GPU.")]
JsonOutput = Annotated[bool, typer.Option("--json", help="Print JSON.")]
