"""Chooses the newest result file of a table, among those of several kinds of GPUs."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = "benchmarks/results"
GPU = "_gpu.json"
"""What the source of a table ends with for a result of any kind of GPU: `allocator_gpu.json` is the newest of
`allocator_h100.json`, `allocator_h200.json` and so on."""


def newest(results: Path, source: str) -> Path:
    """The newest file of a source, or a path with the source's own name if there is none."""
    name = source.removesuffix(GPU)
    kinds = re.compile(rf"{re.escape(name)}_[a-z]+\d+\.json")
    found = [path for path in results.glob(f"{name}_*.json") if source.endswith(GPU) and kinds.fullmatch(path.name)]
    return max(found, key=lambda path: str(facts(path).get("date", "")), default=results / source)


def caption(paths: list[Path]) -> str:
    """The device, the date and the commit of each result of a table."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        of = {"device": "device unknown", "date": "date unknown", "commit": "unknown"} | facts(path)
        where = f"{' '.join(of['device'].split()[:2])}, {of['date'][:10]}, commit {of['commit']}"
        groups.setdefault(where, []).append(f"`{path.name}`")
    return f"<sub>{'; '.join(f'{where}: ' + ', '.join(names) for where, names in groups.items())}</sub>"


def facts(path: Path) -> dict[str, str]:
    """The device, date and commit of a result file."""
    found: dict[str, str] = json.loads(path.read_text()).get("environment", {})
    return found
