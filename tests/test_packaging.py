"""What an install promises: a light import, `vmmkv.kernels`, and no top-level module that shadows another's."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Container
from functools import cache
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
        """,
        bare=True,
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
        """,
        bare=True,
    )
    assert child.stdout == "torch.Size([3, 1, 8])\n", child.stderr


def test_kernels_are_installed_under_vmmkv_only() -> None:
    code = "import importlib.util as u, vmmkv.kernels; print(u.find_spec('kernels'), vmmkv.kernels.__name__)"
    child = run_python(code, bare=True)  # which does not look in the repository's root
    if "No module named 'vmmkv" in child.stderr:
        pytest.skip("vmmkv is not installed in this environment")
    assert child.stdout == "None vmmkv.kernels\n", child.stderr


def test_every_package_is_installed() -> None:
    """`pyproject.toml` lists them by name."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "vmmkv").rglob("__init__.py")}
    assert {*listed} == found | {"vmmkv.kernels"}


def test_the_packages_links_lead_to_the_repository_that_the_readme_names() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    readme = (ROOT / "README.md").read_text()
    (repository,) = re.findall(r"git clone (\S+) vmmkv", readme)
    assert {*urls} == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert [url for url in urls.values() if not url.startswith(repository)] == []
    files = [url.partition("/blob/main/")[2] for url in urls.values()]
    files += re.findall(r"\]\((?!\w+:)([^)#]+)", readme)
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_pages_state_the_versions_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [
        f"Python{project['requires-python']}",
        *project["dependencies"],
        *project["optional-dependencies"]["hf"],
    ]
    pages = [(ROOT / "docs" / "support.md").read_text(), (ROOT / "README.md").read_text()]
    for name in ("Python", "torch", "transformers"):
        (least,) = (re.split("[>=,]+", each)[1] for each in required if each.startswith(f"{name}>"))
        assert f"| {name} | {least} and later" in pages[0]
        assert f"`{name} {least}+`" in pages[1]
    assert f"version: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()


def test_transformers_works_from_the_repository_root() -> None:
    """There `kernels/` can be imported as a top-level module, which is what Hugging Face's package is called."""
    code = """
        import os, sys
        os.chdir(sys.argv[1])
        sys.path.insert(0, "")
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        config = LlamaConfig(
            vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
        model = LlamaForCausalLM(config)
        print(model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=4, min_new_tokens=4).shape)
    """
    child = run_python(dedent(code), str(ROOT))
    assert child.stdout == "torch.Size([1, 7])\n", child.stderr


LAYERS = """kernels errors layout stats budget ledger compiled driver core events tier prefix tensors arguments
views transfer lending pool snapshot picture sequence cache publication vmmkv metrics torch schemes workload testing
integrations model_config cli __main__""".split()  # noqa: SIM905
"""Packages and modules of vmmkv; `vmmkv` is its `__init__`. Each imports only what is to the left of it."""
UPWARDS = {
    ("picture", "cache"),
    ("sequence", "cache"),
    ("snapshot", "cache"),
    ("transfer", "cache"),
    ("transfer", "sequence"),
}
"""The one exception: types."""

# torch: what has no public name. The streams and captures that Python's own functions are too slow, or too strict, to
# tell; the allocator of a memory pool; a check on the device in a compiled graph; tensors that only stand for one; what
# an operation writes to; the ways of a storage to another process, which are refused; the comparison of tensors with
# those of an earlier call; how often one was written to.
OF_TORCH = """
_C _assert_async _cuda_customAllocator _cuda_getCurrentRawStream _cuda_getDevice _cuda_isCurrentStreamCapturing
_disabled_torch_function_impl _dynamo _make_wrapper_subclass _schema _share_cuda_ _share_fd_cpu_ _share_filename_cpu_
_to_copy _version"""
# transformers: which attention a model runs, and may run; how to make one of a config in a dtype; of continuous
# batching what runs a step, says whether it is a graph, and which, pads it, and admits, ends and keeps; what `generate`
# makes of its arguments; the manager of its server, and an error in a stream.
OF_TRANSFORMERS = """_StreamError _attn_implementation _cached_continuous_batching_manager _can_set_attn_implementation
_cb_config _create_batch_processor _from_config _generation_step _get_forward_fn _get_graph_key _get_num_sequences
_get_waiting_candidates _local_pauses_requested _handle_request_error _run_generation_loop _supports_attention_backend
_update_tp_group_state"""
# Numba: the variables of a function that it compiles, which it copies over and over. Python: named tuples' public
# methods are called so, the frame of a caller, and the end of a forked process.
OF_OTHERS = "_con _kws _run_block_rewrite _asdict _exit _fields _getframe _is_owned _make _replace"
PRIVATE = {*OF_TORCH.split(), *OF_TRANSFORMERS.split(), *OF_OTHERS.split()}
"""Private names of other libraries that vmmkv uses. There is none of its own that another of its modules uses."""


def sources() -> dict[str, Path]:
    """All modules, by their names once they are installed."""
    found = {}
    for root in ("vmmkv", "kernels"):
        for path in sorted((ROOT / root).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts if parts[-1] != "__init__" else parts[:-1])
            found[name if root == "vmmkv" else f"vmmkv.{name}"] = path
    return found


SOURCES = sources()


@cache
def parsed(code: str) -> tuple[ast.Module, list[ast.AST]]:
    """The tree of a module, and all of its nodes."""
    tree = ast.parse(code)
    return tree, list(ast.walk(tree))


def imported(code: str, module: str, is_package: bool) -> set[str]:
    """The modules that code imports, wherever it does: at the top, in functions, for type checkers."""
    names = set()
    for node in parsed(code)[1]:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -(node.level - is_package) or None] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            each = {f"{base}.{alias.name}" for alias in node.names}
            names |= {name if name in SOURCES else base for name in each}
    return names


def layer(module: str) -> str:
    """The package, or the module, of vmmkv that a module is in."""
    return module.split(".")[1] if "." in module else module


def upward(code: str, module: str, is_package: bool = False) -> set[tuple[str, str]]:
    """Imports that point upwards, by layers."""
    inside = {name for name in imported(code, module, is_package) if name.split(".")[0] == "vmmkv"}
    pairs = {(layer(module), layer(name)) for name in inside}
    return {(here, there) for here, there in pairs if LAYERS.index(there) > LAYERS.index(here)}


def test_imports_point_downwards() -> None:
    """In every module. One that is new has to be given its place."""
    assert {layer(module) for module in SOURCES} == set(LAYERS)
    found = [upward(path.read_text(), name, path.name == "__init__.py") for name, path in SOURCES.items()]
    assert set().union(*found) == UPWARDS


def test_the_insides_of_continuous_batching_are_known_in_one_place() -> None:
    """What transformers changes there is looked for in one package."""
    insides, place = "transformers.generation.continuous_batching", "vmmkv.integrations.batching"
    users = {
        name
        for name, path in SOURCES.items()
        if any(each.startswith(insides) for each in imported(path.read_text(), name, path.name == "__init__.py"))
    }
    assert users
    assert all(name.startswith(f"{place}.") for name in users), users


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier()


@cache
def definitions(code: str) -> set[str]:
    """Private names that code defines: functions, classes, variables, attributes, slots."""
    found = set()
    for node in parsed(code)[1]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            found |= {str(text.value) for text in ast.walk(node.value) if isinstance(text, ast.Constant)}
    return {name for name in found if is_private(name)}


def is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


ENDS = re.compile(r"\.(endswith|r?strip|removesuffix)$")
"""What takes pieces of names, as formatted strings do."""


def private_uses(code: str, elsewhere: Container[str] = ()) -> set[str]:
    """Private names of others that code uses, by a dot, an import, or in a string, as `getattr` takes them.

    Of which class an object is cannot be seen here. So its name is the module's own if the module defines it, and no
    other one does (`elsewhere`). `self` may have what any class of ours has, and bases of others are others.
    """
    own, used, nodes = definitions(code), set[str](), parsed(code)[1]
    ends = [node for node in nodes if isinstance(node, ast.Call) and ENDS.search(ast.unparse(node.func))]
    ends += [node for node in nodes if isinstance(node, ast.JoinedStr)]
    bases = {"super()", *(ast.unparse(base) for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases)}
    silent = {text for node in ends for text in ast.walk(node)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            of_base = ast.unparse(node.value) in bases
            foreign = of_base if node.attr not in elsewhere else not (of_base or is_own(node.value))
            used |= {node.attr} if foreign or node.attr not in (own | {*elsewhere}) else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in silent:
            used |= {node.value} - own
    return {name for name in used if is_private(name)}


def test_modules_keep_out_of_each_others_private_state() -> None:
    codes = {name: path.read_text() for name, path in SOURCES.items()}
    defined = {name: definitions(code) for name, code in codes.items()}
    uses = {}
    for name, code in codes.items():
        elsewhere = set().union(*(names for other, names in defined.items() if other != name))
        uses[name] = private_uses(code, elsewhere)
    assert {name: private - PRIVATE for name, private in uses.items() if private - PRIVATE} == {}
    assert set().union(*uses.values()) == PRIVATE  # what is not used any more need not be allowed


@pytest.mark.parametrize("folder", ["benchmarks", "docs"])
def test_benchmarks_and_examples_use_what_is_public(folder: str) -> None:
    ours = set().union(*(definitions(path.read_text()) for path in SOURCES.values()))
    ours -= PRIVATE | {"_", "_attention", "_repr_html_"}  # Python's, Jupyter's, and a part of torch's names
    for path in (ROOT / folder).rglob("*.py"):
        code = path.read_text()
        used = private_uses(code, ours - definitions(code))
        assert ours.isdisjoint(used), path
