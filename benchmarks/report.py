"""Writes tables and plots in the README, in docs/ and beside the results from the result files.

    python -m benchmarks.report [--check]

A table stands between `<!-- table: name -->` and `<!-- /table -->`, each on a line of its own; `benchmarks.tables`
lists the names. If a result file is missing, the text between them stays. A plot contains the digest of
its result file and is drawn anew when the digest changes. Figures in prose must be in the result files that their
paragraph names; in the documents of `MEASURING` each paragraph with a measured figure must name a file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from vmmkv.cli.output import console, errors

from .cited import nameless, unheld
from .newest import RESULTS, ROOT, caption, newest
from .serve import report as serving
from .tables import TABLES, markdown

DOCUMENTS = ("README.md", "kernels/README.md", "benchmarks/results/*.md", "docs/**/*.md")
MEASURING = ("docs/benchmarks.md", "kernels/README.md", "benchmarks/results/TABLES.md", "benchmarks/results/kernels.md")
"""Documents in which every figure with a unit was measured."""
PLOTS: dict[str, tuple[str, Callable[[dict[str, Any], Path], None]]] = {
    "docs/assets/serve.svg": ("serve_rounds_gpu.json", serving.draw)
}

OPENING = "<!-- table:"
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)


def fill(text: str, results: Path) -> tuple[str, set[str]]:
    """Write the tables of a document anew; return it, and the missing result files.

    Raises:
        ValueError: a table has no function, or no end.
    """
    missing: set[str] = set()

    def write(match: re.Match[str]) -> str:
        opening, name, body, closing = match.groups()
        if name not in TABLES:
            raise ValueError(f"there is no table {name!r}; there are {', '.join(TABLES)}")
        if OPENING in body:
            raise ValueError(f"table {name!r} has no <!-- /table -->")
        paths = [newest(results, source) for source in TABLES[name].sources]
        absent = {path.name for path in paths if not path.exists()}
        missing.update(absent)
        if absent:
            return match[0]
        told = TABLES[name].write(*(json.loads(path.read_text()) for path in paths))
        text = told if isinstance(told, str) else markdown(*told)
        return f"{opening}{text}\n\n{caption(paths)}\n{closing}"

    filled, tables = MARKED.subn(write, text)
    if tables != text.count(OPENING):
        raise ValueError("a <!-- table: name --> is not on a line of its own, or has no <!-- /table -->")
    return filled, missing


def documents(root: Path) -> list[Path]:
    """All documents that may have tables."""
    return sorted(path for pattern in DOCUMENTS for path in root.glob(pattern))


def uncited(root: Path) -> list[str]:
    """Figures in prose without a result file that holds them, and missing files, each with its document."""
    found = [(path, what) for path in documents(root) for what in unheld(path.read_text(), root / RESULTS)]
    measuring = [root / name for name in MEASURING if (root / name).exists()]
    found += [(path, what) for path in measuring for what in nameless(path.read_text())]
    return [f"{path.relative_to(root)}: {what}" for path, what in found]


def update(root: Path, check: bool) -> tuple[list[str], set[str]]:
    """Write the documents that are out of date, unless `check`; return their paths, and the missing result files."""
    stale: list[str] = []
    missing: set[str] = set()
    for path in documents(root):
        text = path.read_text()
        filled, absent = fill(text, root / RESULTS)
        missing |= absent
        if filled != text:
            stale.append(str(path.relative_to(root)))
            if not check:
                path.write_text(filled)
    for name, (source, plot) in PLOTS.items():
        result, picture = newest(root / RESULTS, source), root / name
        if not result.exists():
            missing.add(source)
            continue
        mark = f"<!-- {result.name} sha256 {hashlib.sha256(result.read_bytes()).hexdigest()} -->\n"
        if not picture.exists() or not picture.read_text().endswith(mark):
            stale.append(name)
            if not check:
                draw(plot, json.loads(result.read_text()), picture)
                picture.write_text(picture.read_text() + mark)
    return stale, missing


def draw(plot: Callable[[dict[str, Any], Path], None], result: dict[str, Any], path: Path) -> None:
    """Draw an SVG with text as text, and with names that do not change from run to run."""
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        plot(result, path)


def main(
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Write nothing; exit with 1 where a table is out of date, or a figure in no file."
        ),
    ] = False,
) -> None:
    """Write tables and plots from the result files."""
    stale, missing = update(ROOT, check)
    for source in sorted(missing):
        errors.print(f"There is no {RESULTS}/{source}: what it tells stays as it is", style="yellow")
    for path in stale:
        console.print(f"{path} is out of date: run python -m benchmarks.report" if check else f"Wrote {path}")
    wrong = uncited(ROOT)
    for what in wrong:
        console.print(what)
    if check and (stale or wrong):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
