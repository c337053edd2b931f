"""How old result files are: commits since each was measured that have changed what it measures.

    python -m benchmarks.ages [--check] [--json]

What a benchmark measures is the library, its kernels, and the benchmark itself. A file whose commit is unknown, or
was changed when it was measured, is as old as can be.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from vmmkv.cli.options import JsonOutput
from vmmkv.cli.output import console, make_table, print_json

from .report import RESULTS, ROOT

MEASURED = "vmmkv", "kernels"
"""Folders of what every benchmark measures."""


class Age(NamedTuple):
    """Of a result file.

    Attributes:
        name: its name.
        date: when it was measured.
        commits: that have changed what it measures since then; None: nobody knows.
    """

    name: str
    date: str
    commits: int | None


def main(
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 where a file is older than its code.")] = False,
    json_output: JsonOutput = False,
) -> None:
    """Say how old result files are."""
    found = ages(ROOT)
    if json_output:
        print_json([age._asdict() for age in found])
    else:
        rows = [(name, date, "unknown" if commits is None else str(commits)) for name, date, commits in found]
        console.print(make_table("Results", ("file", "measured", "commits to its code since"), rows))
    if check and any(age.commits != 0 for age in found):
        raise typer.Exit(1)


def ages(root: Path) -> list[Age]:
    """Of all result files of a repository, by name."""
    return [_age(root, path) for path in sorted((root / RESULTS).glob("*.json"))]


def _age(root: Path, path: Path) -> Age:
    facts = json.loads(path.read_text()).get("environment", {})
    commit, command = facts.get("commit") or "unknown", facts.get("command", "")
    benchmark = re.search(r"-m (benchmarks)\.(\w+)", command)
    places = [*MEASURED, *(f"{benchmark[1]}/{benchmark[2]}{end}" for end in (".py", "/") if benchmark)]
    command = ["git", "-C", str(root), "rev-list", "--count", f"{commit}..HEAD", "--", *places]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return Age(path.name, facts.get("date", ""), int(done.stdout) if not done.returncode else None)


if __name__ == "__main__":
    typer.run(main)
