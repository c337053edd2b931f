"""Which result file a table is written from, where kinds of GPUs have one each: the newest."""

from __future__ import annotations

import json
import re
from pathlib import Path

GPU = "_gpu.json"
"""What the source of a table ends with for a result of any kind of GPU: `allocator_gpu.json` is the newest of
`allocator_h100.json`, `allocator_h200.json` and so on."""


def newest(results: Path, source: str) -> Path:
    """The file of a source; where there is none, a path with the source's own name."""
    name = source.removesuffix(GPU)
    kinds = re.compile(rf"{re.escape(name)}_[a-z]+\d+\.json")
    found = [path for path in results.glob(f"{name}_*.json") if source.endswith(GPU) and kinds.fullmatch(path.name)]
    return max(found, key=_date, default=results / source)


def caption(paths: list[Path]) -> str:
    """On which GPUs the results of a table were measured, and when."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        facts = json.loads(path.read_text())["environment"]
        groups.setdefault(f"{' '.join(facts['device'].split()[:2])}, {facts['date'][:10]}", []).append(f"`{path.name}`")
    return f"<sub>{'; '.join(f'{where}: ' + ', '.join(names) for where, names in groups.items())}</sub>"


def _date(path: Path) -> str:
    return str(json.loads(path.read_text()).get("environment", {}).get("date", ""))
