"""The notebooks run from the first cell to the last, and hold no output that could go stale."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from conftest import ROOT

nbformat = pytest.importorskip("nbformat", reason="needs the extra test")
pytest.importorskip("ipykernel", reason="needs the extra test")
pytest.importorskip("nbclient", reason="needs the extra test")

from jupyter_client.kernelspec import KernelSpecManager  # noqa: E402
from jupyter_client.manager import AsyncKernelManager  # noqa: E402
from nbclient import NotebookClient  # noqa: E402

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
WITH_TRANSFORMERS = [path for path in NOTEBOOKS if "from transformers import" in path.read_text()]
OTHERS = [path for path in NOTEBOOKS if path not in WITH_TRANSFORMERS]
OTHERS.sort(key=lambda path: "NUMBA_ENABLE_CUDASIM" not in path.read_text())  # that is set before Numba is imported
RUNS = [OTHERS, WITH_TRANSFORMERS]
"""One after another in one kernel, in which names are forgotten in between: most of their time is imports."""


def name(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("paths", RUNS, ids=lambda paths: "+".join(map(name, paths)))
def test_notebooks_run(paths: list[Path], device: str) -> None:
    notebooks = [nbformat.read(path, as_version=4) for path in paths]
    notebook = notebooks[0]
    for other in notebooks[1:]:
        notebook.cells += [nbformat.v4.new_code_cell("%reset -f"), *other.cells]
    # No folders of kernels: those of a user could name another Python. What is left is the one that runs this test.
    kernel = AsyncKernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    environment.pop("NUMBA_ENABLE_CUDASIM", None)  # of these tests: without it, a server computes without a simulator
    client = NotebookClient(
        notebook, km=kernel, timeout=1200, startup_timeout=600, resources={"metadata": {"path": str(ROOT)}}
    )
    notebook.cells.append(nbformat.v4.new_code_cell("import sys, torch; sys.executable, torch.cuda.is_available()"))
    client.execute(env=environment, cleanup_kc=True)
    assert notebook.cells[-1].outputs[0].data["text/plain"] == repr((sys.executable, device == "cuda"))
    drawn = [
        kind
        for cell in notebook.cells[:-1]
        for output in cell.get("outputs", [])
        for kind in output.get("data", [])
        if kind == "image/png"
    ]
    assert len(drawn) >= len(paths)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_no_output_is_kept(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_the_readme_lists_every_notebook() -> None:
    readme = (ROOT / "notebooks" / "README.md").read_text()
    assert NOTEBOOKS
    assert [path.name for path in NOTEBOOKS if f"`{path.name}`" not in readme] == []
