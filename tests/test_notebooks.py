"""The notebooks run from the first cell to the last, and hold no output that could go stale."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import ROOT, run_python

nbformat = pytest.importorskip("nbformat", reason="needs the extra test")
pytest.importorskip("IPython", reason="needs the extra test")

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RUNS = [NOTEBOOKS[1::-1], NOTEBOOKS[2:]]
"""Notebooks that share a process: most of their time is imports. The second one switches Numba's simulator on before
Numba is imported; those from the third on import transformers."""

RUN = """
    import nbformat
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.io import capture_output
    from matplotlib import pyplot

    shown = []
    pyplot.switch_backend("Agg")
    pyplot.show = lambda: (pyplot.gcf().canvas.draw(), shown.append(pyplot.gcf().axes), pyplot.close("all"))
    shell = InteractiveShell.instance()
    for path in sys.argv[1:]:
        shown.clear()
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "code":
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
    child = run_python(RUN, *map(str, paths), env=environment)
    assert child.returncode == 0, child.stdout + child.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_no_output_is_kept(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_the_readme_lists_every_notebook() -> None:
    readme = (ROOT / "notebooks" / "README.md").read_text()
    assert NOTEBOOKS
    assert [path.name for path in NOTEBOOKS if f"`{path.name}`" not in readme] == []
