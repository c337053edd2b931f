"""The demo as a benchmark, whose JSON says of machine, versions and inputs what other results do.

`python -m benchmarks.demo` takes what `vmmkv demo` does.
"""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from functools import wraps
from io import StringIO
from typing import Any

import typer

from benchmarks.environment import environment, print_result
from vmmkv.cli.demo import demo
from vmmkv.driver.driver import open_driver


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
            print_result(result | {"environment": facts | result["environment"]})


if __name__ == "__main__":
    typer.run(main)
