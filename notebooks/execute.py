"""Runs the notebooks and stores what they show: `python notebooks/execute.py [NAME...]`, without a GPU.

Pictures of caches become images, which pages that show notebooks do not filter out.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def source_hash(cells: list[Any]) -> str:
    """A hash of the code that outputs are of; each notebook keeps it."""
    code = "\n".join(cell["source"] for cell in cells if cell["cell_type"] == "code")
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def execute(path: Path) -> None:
    """Runs a notebook and stores it with its outputs."""
    import nbformat
    from nbclient import NotebookClient

    notebook: Any = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    NotebookClient(notebook, timeout=900, record_timing=False, resources={"metadata": {"path": str(FOLDER)}}).execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if data.get("text/html", "").startswith("<svg"):
                data["image/svg+xml"] = re.sub(r"<svg ", '<svg color="#777777" ', data.pop("text/html"), count=1)
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.metadata["outputs_of"] = source_hash(notebook.cells)
    nbformat.write(notebook, path)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    for each in sorted(FOLDER.glob("*.ipynb")):
        if not sys.argv[1:] or any(name in each.name for name in sys.argv[1:]):
            execute(each)
