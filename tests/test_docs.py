"""The documentation builds without a warning and needs no network, its examples run, and what it names exists."""

from __future__ import annotations

import inspect
import os
import re
import runpy
import subprocess
import sys
import zlib
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import DEVICE as PLACE
from conftest import ROOT, run_python
from tiny_models import VOCABULARY, tiny_model

import vmmkv
import vmmkv.events
import vmmkv.kernels
import vmmkv.testing
import vmmkv.torch
from vmmkv.cli.check_kernel import check_kernel
from vmmkv.cli.serve import serve
from vmmkv.metrics import PoolCollector
from vmmkv.testing.probes import PROBES

DOCS = ROOT / "docs"
EXAMPLES = sorted((DOCS / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built; a link that leads nowhere or a docstring that cannot be read is a warning, and so an error."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    build = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
    assert build.returncode == 0, build.stderr
    return site


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = {path: path.read_text() for path in site.rglob("*.html")}
    assert site / "reference" / "cache.html" in pages
    for path, page in pages.items():
        loaded = re.findall(r"<(?:script|img|iframe)\b[^>]*\bsrc=\"?([^\" >]+)|<link\b[^>]*\bhref=\"?([^\" >]+)", page)
        assert [address for pair in loaded for address in pair if re.match(r"(\w+:)?//", address)] == [], path


def test_the_reference_shows_what_users_call(site: Path) -> None:
    """In the inventory that other sites link by; a module that is moved would leave its page empty."""
    head, body = (site / "objects.inv").read_bytes().split(b"zlib.\n")
    assert head.startswith(b"# Sphinx inventory")
    names = [line.split()[0] for line in zlib.decompress(body).decode().splitlines()]
    modules = (vmmkv.torch, vmmkv.kernels, vmmkv.events, vmmkv.testing)
    public = [name for module in modules for name in module.__all__]
    public += [name for name, value in vars(vmmkv).items() if name[0] != "_" and not inspect.ismodule(value)]
    public += ["KVCache.extend", "Sequence.write", "VmmCache.crop", "enable", "serve", "PoolCollector"]
    assert [name for name in public if not any(full.endswith(f".{name}") for full in names)] == []


def test_guides_name_every_option_metric_and_finding() -> None:
    def missing(guide: str, *told: str) -> list[str]:
        text = (DOCS / "guides" / guide).read_text()
        return [each for each in told if each not in text]

    def options(command: Callable[..., object], *others: str) -> list[str]:
        return [f"`--{each.replace('_', '-')}`" for each in inspect.signature(command).parameters if each not in others]

    metrics = [f"{each.name}_total" if each.type == "counter" else each.name for each in PoolCollector().collect()]
    findings = [f"| {each.rows} | {each.finding}" for each in PROBES.values()]
    assert missing("serving.md", *options(serve, "arguments")) == []
    assert missing("watching.md", *[f"`{name}`" for name in metrics]) == []
    assert missing("check-kernels.md", *findings, *[f"`{name}`" for name in vmmkv.testing.TARGETS]) == []
    assert missing("check-kernels.md", *options(check_kernel, "kernel", "device", "json_output")) == []
    assert metrics
    assert findings


FORKED = """
    import multiprocessing, runpy
    import vmmkv
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _: fork
    runpy.run_path(sys.argv[1], run_name="__main__")
"""
"""Run an example that starts processes with fork, so that modules are imported once. Not for a process with a GPU."""


def for_this_transformers(source: str) -> str:
    """An example with the name that the installed transformers has for the argument `cache`, as the documents say."""
    major, minor, *_ = map(int, transformers.__version__.split(".")[:2])
    return re.sub(r"\bpast_key_values=", "cache=", source) if (major, minor) >= (5, 24) else source


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    source = path.read_text()
    copied = tmp_path / path.name
    copied.write_text(for_this_transformers(source))
    if "multiprocessing" in source and not torch.cuda.is_available():
        done = run_python(FORKED, str(copied))
        assert done.returncode == 0, done.stderr
    else:
        runpy.run_path(str(copied), run_name="__main__")


@pytest.mark.filterwarnings("error::FutureWarning")
def test_the_readmes_examples_run() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert len(blocks) == 3
    for block in blocks:
        model: Any = deepcopy(tiny_model("llama-gqa", "sdpa", PLACE))  # blocks change it
        prompts = torch.randint(2, VOCABULARY, (2, 10), device=PLACE)
        inputs = {"input_ids": prompts, "max_new_tokens": 5, "do_sample": False}
        expected = model.generate(**inputs)
        names: dict[str, Any] = {"model": model, "inputs": inputs}
        exec(compile(for_this_transformers(block), "README.md", "exec"), names)
        assert torch.equal(names.get("output", expected), expected)


def test_guides_show_every_example() -> None:
    pages = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    assert EXAMPLES
    assert [path.name for path in EXAMPLES if f"docs/examples/{path.name}:" not in pages] == []


def test_tests_that_pages_name_exist() -> None:
    pages = [*DOCS.rglob("*.md"), ROOT / "CONTRIBUTING.md"]
    named = {match for page in pages for match in re.findall(r"(tests/\w+\.py)(?:::(\w+))?", page.read_text())}
    assert named
    assert [file for file, name in named if not name and not (ROOT / file).exists()] == []
    tests = [test for test in named if test[1]]
    assert [test for test in tests if f"def {test[1]}(" not in (ROOT / test[0]).read_text()] == []
