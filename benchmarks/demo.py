"""The demo as a benchmark, with machine, versions and inputs in its JSON.

`python -m benchmarks.demo` takes what `vmmkv demo` does.
"""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from functools import wraps
from io import StringIO
from typing import Any

import typer

from vmmkv.cli.demo import demo
from vmmkv.driver.driver import open_driver

from .environment import environment
from .output import Lines, Row, deliver


@wraps(demo)
def main(**options: Any) -> None:
    if not options["json_output"]:
        demo(**options)
        return
    facts = environment(open_driver(options["device"]).device)
    output = StringIO()
    try:
        with redirect_stdout(output):
            demo(**options)
    finally:  # also where attention was wrong
        if output.getvalue():
            result = json.loads(output.getvalue())
            deliver(result | {"environment": facts}, True, {})


def table(result: Row) -> Lines:
    """A line for each way to lay out the cache of the same live sequences."""
    labels = {
        "static": "static reservation of 8192 tokens",
        "per_layer": "2 MiB pages, a tensor per layer and K/V",
        "block_table_16": "block table, 16 tokens",
        "vmmkv": "**vmmkv**",
    }
    waste = [(label, f"{result['waste'][scheme]:.1%}") for scheme, label in labels.items()]
    return ("scheme, same live sequences", "allocated bytes without a token"), waste


if __name__ == "__main__":
    typer.run(main)
