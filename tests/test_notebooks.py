"""The notebooks run from the first cell to the last, and what they hold is the output of their code."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path

import pytest
from conftest import ROOT, run_python

nbformat = pytest.importorskip("nbformat", reason="needs the extra test")
pytest.importorskip("IPython", reason="needs the extra test")

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RUNS = [NOTEBOOKS[1::-1], NOTEBOOKS[2:]]
"""Notebooks that share a process: most of their time is imports. The second one switches Numba's simulator on before
Numba is imported; those from the third on import transformers."""

FEWER = {"num_hidden_layers=8": "num_hidden_layers=1", "tokens=100": "tokens=30"}
"""What a processor runs in place of what a GPU does: models of fewer layers, and shorter answers."""

RUN = """
    import json
    import nbformat
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.io import capture_output
    from matplotlib import pyplot

    shown = []
    pyplot.switch_backend("Agg")
    pyplot.show = lambda: (pyplot.gcf().canvas.draw(), shown.append(pyplot.gcf().axes), pyplot.close("all"))
    shell = InteractiveShell.instance()
    fewer = json.loads(sys.argv[1])
    for path in sys.argv[2:]:
        shown.clear()
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "code":
                for text in fewer:
                    cell.source = cell.source.replace(text, fewer[text])
                with capture_output() as output:
                    success = shell.run_cell(cell.source).success
                assert success, f"{path}: {cell.source} {output.stdout} {output.stderr}"
        assert any(shown), f"{path} shows no figure"
        shell.reset()
"""


def name(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("paths", RUNS, ids=lambda paths: "+".join(map(name, paths)))
def test_notebooks_run(paths: list[Path], device: str) -> None:
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    environment.pop("NUMBA_ENABLE_CUDASIM", None)  # of these tests: without it, a server computes without a simulator
    child = run_python(RUN, json.dumps(FEWER if device == "cpu" else {}), *map(str, paths), env=environment)
    assert child.returncode == 0, child.stdout + child.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_the_outputs_that_are_kept_are_those_of_the_code(path: Path) -> None:
    """With pictures, and without a warning, or a name of the machine where they were made."""
    notebook = nbformat.read(path, as_version=4)
    source_hash = runpy.run_path(str(ROOT / "notebooks" / "execute.py"))["source_hash"]
    assert notebook.metadata["outputs_of"] == source_hash(notebook.cells), "run notebooks/execute.py"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = path.read_text()
    assert [word for word in ("/home/", "/root/", "/tmp/", "site-packages") if word in text] == []
    assert len(text) < 300_000


def test_the_readme_lists_every_notebook() -> None:
    readme = (ROOT / "notebooks" / "README.md").read_text()
    assert NOTEBOOKS
    assert [path.name for path in NOTEBOOKS if f"`{path.name}`" not in readme] == []
