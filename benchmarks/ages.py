"""How old result files are: which code that they measure has changed since.

    python -m benchmarks.ages [--check] [--json]

What a benchmark measures is its own code, and the modules of the project that it imports. One has changed if it does
something else than at the commit at which the file was made: comments, docstrings and layout do not count, nor does
code that only shows figures. Nor does a commit that `mends.txt` names: it mends what no benchmark does, and says why no
figure follows from it. A file whose commit is unknown, or was changed when it was measured, is as old as can be.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from vmmkv.cli.options import JsonOutput
from vmmkv.cli.output import console, make_table, print_json

from .imports import Project, code

ROOT = Path(__file__).parent.parent
RESULTS = "benchmarks/results"
DESCRIBING = re.compile(r"environment|cli\.(options|output)|picture|svg|aims|tables|serve\.report")
"""Modules that say where something was measured, or show it: no figure follows from them."""
MENDS = "benchmarks/mends.txt"
"""Lines of a commit, and why what was measured before it is as it would be after it."""
OLDER = "benchmarks/older.txt"
"""Lines of a result file that is older than its code, and why it is still there."""
NOT_COMMITTED = "not committed"
"""What stands for a commit of code that is in none."""
SHOWN = 4
"""Modules that are named in a table; of the others the number is told."""


class Age(NamedTuple):
    """Of a result file.

    Attributes:
        name: its name.
        date: when it was measured.
        device: on what.
        commit: of which code, in short.
        changed: modules that it measures, and that have changed since then; None: nobody knows.
        mends: how many commits have changed them that `MENDS` names.
    """

    name: str
    date: str
    device: str
    commit: str
    changed: list[str] | None
    mends: int = 0

    @property
    def line(self) -> str:
        """What has changed, in short."""
        if self.changed is None:
            return "nobody knows: its commit is unknown, or was changed"
        others = len(self.changed) - SHOWN
        return ", ".join(self.changed[:SHOWN]) + (f" and {others} more" if others > 0 else "")


def main(
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 where a file is older than its code.")] = False,
    json_output: JsonOutput = False,
) -> None:
    """Say how old result files are."""
    found = ages(ROOT)
    if json_output:
        print_json([age._asdict() for age in found])
    else:
        rows = [(age.name, age.date[:10], age.line) for age in found]
        console.print(make_table("Results", ("file", "measured", "code that has changed since"), rows))
    if check and any(age.changed != [] for age in found):
        raise typer.Exit(1)


def ages(root: Path) -> list[Age]:
    """Of all result files of a repository, by name."""
    project = Project(root)
    return [_age(project, path) for path in sorted((root / RESULTS).glob("*.json"))]


def has_history(root: Path) -> bool:
    """Whether the commits are here, as in a whole clone."""
    return (_git(root, "rev-parse", "--is-shallow-repository") or "").strip() == "false"


def _age(project: Project, path: Path) -> Age:
    facts = json.loads(path.read_text()).get("environment", {})
    modules = project.closure(measured_by(project, facts.get("command", "")))
    commit = facts.get("commit") or "unknown"
    then = _files_at(project.root, commit)
    changed, mended = None, set[str]()
    if then is not None and modules:
        since = {name: _since(project, name, commit, then) for name in modules if not DESCRIBING.search(name)}
        known = reasons(project.root / MENDS).keys()
        changed = sorted(name for name, commits in since.items() if commits - known)
        mended = known & set[str]().union(*since.values())
    return Age(path.name, facts.get("date", ""), facts.get("device", ""), commit, changed, len(mended))


def measured_by(project: Project, command: str) -> str:
    """The module that a command runs."""
    run = re.search(r"-m ((?:benchmarks|vmmkv)[.\w]*)(?: (\w+))?", command)
    if run is None:
        return ""
    names = f"{run[1]}.cli.{run[2]}", f"{run[1]}.__main__", run[1]
    return next((name for name in names if name in project.paths), "")


def _files_at(root: Path, commit: str) -> dict[str, str] | None:
    """The object of each file of a commit; None: there is no such commit."""
    done = _git(root, "ls-tree", "-r", "--format=%(objectname) %(path)", commit)
    return None if done is None else {path: name for name, path in (line.split(" ", 1) for line in done.splitlines())}


def _since(project: Project, module: str, commit: str, then: dict[str, str]) -> set[str]:
    """Commits after which a module does something else than it did at one with these files; `NOT_COMMITTED` if it does
    so by what is in no commit."""
    path = project.paths[module]
    name, now = str(path.relative_to(project.root)), path.read_bytes()
    if then.get(name) == hashlib.sha1(b"blob %d\0" % len(now) + now, usedforsecurity=False).hexdigest():
        return set()
    if _code_at(project.root, commit, name) == code(now.decode()):
        return set()
    if _git(project.root, "show", f"HEAD:{name}") != now.decode():
        return {NOT_COMMITTED}
    since = (_git(project.root, "log", "--no-merges", "--format=%H", f"{commit}..HEAD", "--", name) or "").split()
    return {each for each in since if _changes(project.root, each, name)} or {NOT_COMMITTED}


def reasons(path: Path) -> dict[str, str]:
    """What a file has a line for, the whole name of a commit or a result's, and why."""
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(line.split(" ", 1) for line in lines)


@cache
def _changes(root: Path, commit: str, name: str) -> bool:
    """Whether a file does something else after a commit than before it."""
    return _code_at(root, f"{commit}^", name) != _code_at(root, commit, name)


@cache
def _code_at(root: Path, commit: str, name: str) -> str | None:
    """What a file did at a commit, by its name; None: it was not there."""
    source = _git(root, "show", f"{commit}:{name}")
    return None if source is None else code(source)


def _git(root: Path, *words: str) -> str | None:
    """What git says; None: it fails."""
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    return done.stdout if not done.returncode else None


if __name__ == "__main__":
    typer.run(main)
