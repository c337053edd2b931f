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
    project, head = Project(root), (_git(root, "rev-parse", "HEAD") or "").strip()
    return [_age(project, head, path) for path in sorted((root / RESULTS).glob("*.json"))]


def has_history(root: Path) -> bool:
    """Whether the commits are here, as in a whole clone."""
    return (_git(root, "rev-parse", "--is-shallow-repository") or "").strip() == "false"


def _age(project: Project, head: str, path: Path) -> Age:
    facts = json.loads(path.read_text()).get("environment", {})
    modules = project.closure(measured_by(project, facts.get("command", "")))
    commit = facts.get("commit") or "unknown"
    then, now = _files_at(project.root, commit), _files_at(project.root, head) or {}
    changed, mended = None, set[str]()
    if then is not None and modules:
        files = {name: project.paths[name] for name in modules if not DESCRIBING.search(name)}
        since = {name: _since(project.root, file, (commit, then), (head, now)) for name, file in files.items()}
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


@cache
def _files_at(root: Path, commit: str) -> dict[str, str] | None:
    """The object of each file of a commit; None: there is no such commit."""
    done = _git(root, "ls-tree", "-r", "--format=%(objectname) %(path)", commit)
    return None if done is None else {path: name for name, path in (line.split(" ", 1) for line in done.splitlines())}


Commit = tuple[str, dict[str, str]]
"""A commit and the objects of its files."""


def _since(root: Path, path: Path, measured: Commit, head: Commit) -> set[str]:
    """Commits after which a module does something else than it did at the one that was measured; `NOT_COMMITTED` if it
    does so by what is in no commit."""
    name, now = str(path.relative_to(root)), path.read_bytes()
    object_name = hashlib.sha1(b"blob %d\0" % len(now) + now, usedforsecurity=False).hexdigest()
    then = measured[1].get(name)
    if then == object_name or (then and _code_of(root, then) == code(now.decode())):
        return set()
    if head[1].get(name) != object_name:
        return {NOT_COMMITTED}
    return _changes(root, measured[0], head[0], name) or {NOT_COMMITTED}


def reasons(path: Path) -> dict[str, str]:
    """What a file has a line for, the whole name of a commit or a result's, and why."""
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(line.split(" ", 1) for line in lines)


# What a commit or an object holds never changes: to ask git again would be a process for each module of each file.
@cache
def _changes(root: Path, first: str, last: str, name: str) -> set[str]:
    """Commits behind one and up to another after which a file does something else than before."""
    log = ("log", "--no-merges", "--no-renames", "--raw", "--no-abbrev", "--format=%H", f"{first}..{last}", "--", name)
    found = re.findall(r"^(\w+)\n\n:\d+ \d+ (\w+) (\w+) ", _git(root, *log) or "", re.MULTILINE)
    return {commit for commit, *objects in found if len({_code_of(root, each) for each in objects}) > 1}


@cache
def _code_of(root: Path, name: str) -> str | None:
    """What a file does, by the name of its object; None: there is none, as before it was made."""
    source = _git(root, "cat-file", "blob", name)
    return None if source is None else code(source)


def _git(root: Path, *words: str) -> str | None:
    """What git says; None: it fails."""
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    return done.stdout if not done.returncode else None


if __name__ == "__main__":
    typer.run(main)
