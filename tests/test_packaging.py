"""What an install promises: a light import, `vmmkv.kernels`, and no top-level module that shadows another's."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from conftest import ROOT, run_python


def test_import_is_light() -> None:
    """Beyond torch it loads our own modules and a few small ones of Python's."""
    child = run_python(
        """
        import torch
        before = set(sys.modules)
        import vmmkv
        print(*sorted(name for name in set(sys.modules) - before if not name.startswith("vmmkv")))
        """
    )
    assert child.returncode == 0, child.stderr
    loaded = child.stdout.split()
    assert {name.split(".")[0] for name in loaded} <= {*sys.stdlib_module_names, "numpy", "torch"}
    assert len(loaded) <= 20, loaded  # libraries have hundreds


def test_no_gpu_driver_or_toolkit_is_needed(tmp_path: Path) -> None:
    """Neither to import nor to run on the host: cuda.bindings cannot even be imported here."""
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "__init__.py").write_text("raise ImportError('no CUDA here')")
    child = run_python(
        f"""
        import torch
        sys.modules.pop("cuda", None)
        sys.path.insert(0, {str(tmp_path)!r})
        import vmmkv
        sequence = vmmkv.KVCache(vmmkv.KVLayout(1, 1, 8), 1, 8, max_bytes="4MiB", device="cpu").sequence(3)
        print(sequence.k(0).shape)
        """
    )
    assert child.stdout == "torch.Size([3, 1, 8])\n", child.stderr


def test_kernels_are_installed_under_vmmkv_only(tmp_path: Path) -> None:
    code = "import importlib.util as u, vmmkv.kernels; print(u.find_spec('kernels'), vmmkv.kernels.__name__)"
    child = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    if "No module named 'vmmkv" in child.stderr:
        pytest.skip("vmmkv is not installed in this environment")
    assert child.stdout == "None vmmkv.kernels\n", child.stderr


def test_transformers_works_from_the_repository_root() -> None:
    """There `kernels/` can be imported as a top-level module, which is what Hugging Face's package is called."""
    code = """
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        config = LlamaConfig(
            vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
        model = LlamaForCausalLM(config)
        print(model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=4, min_new_tokens=4).shape)
    """
    child = subprocess.run([sys.executable, "-c", dedent(code)], cwd=ROOT, capture_output=True, text=True)
    assert child.stdout == "torch.Size([1, 7])\n", child.stderr


LAYERS = ["errors", "driver", "layout", "pages", "fence", "arena", "tensors", "rows", "invariants", "picture"]
LAYERS += ["sequence", "cache"]


@pytest.mark.parametrize("name", LAYERS)
def test_imports_point_downwards(name: str) -> None:
    """A layer imports only layers below it (the one exception is a type in `sequence`)."""
    path = ROOT / "vmmkv" / (f"{name}/__init__.py" if name == "driver" else f"{name}.py")
    imported = {
        node.module.split(".")[0]
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ImportFrom) and node.level and node.module
    }
    assert imported & set(LAYERS) <= set(LAYERS[: LAYERS.index(name)])
