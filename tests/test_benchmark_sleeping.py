"""vLLM's sleep mode, with a stand-in for vLLM: what is asked of it, in which order, and what is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import run_module_here

from benchmarks.engine.checkpoints import read_config
from benchmarks.engine.model import MODELS
from benchmarks.sleeping import table

VLLM = """
import json
from pathlib import Path
from types import SimpleNamespace

from torch import FREE

__version__ = "0.23.0"


class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos, detokenize):
        self.max_tokens = max_tokens


class LLM:
    def __init__(self, **options):
        config = json.loads((Path(options["model"]) / "config.json").read_text())
        Path(__file__).with_name("told.json").write_text(json.dumps(options | {"config": config}))
        self.awake = {"weights", "kv_cache"}

    def generate(self, prompts, params, use_tqdm):
        assert self.awake == {"weights", "kv_cache"}, "it sleeps"
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * params[0].max_tokens)])]

    def sleep(self, level):
        assert level == 1
        self.awake.clear()
        FREE[0] += 500

    def wake_up(self, tags):
        self.awake |= set(tags)
        FREE[0] -= 250
"""
TORCH = """
from types import SimpleNamespace

FREE = [1000]
cuda = SimpleNamespace(mem_get_info=lambda: (FREE[0], 9999))
"""


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """A folder with a module of this name, beside what it needs of torch."""
    folder = tmp_path / "peer" / "vllm"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(VLLM)
    (folder.parent / "torch.py").write_text(TORCH)
    return folder


def test_it_sleeps_and_wakes_up_and_answers(vllm: Path) -> None:
    asked = "--vllm", str(vllm.parent), "--model", "tiny", "--memory", "1MiB", "--rounds", "3"
    done = run_module_here("benchmarks.sleeping", *asked, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [row["freed_bytes"] for row in result["rounds"]] == [500] * 3
    assert result["environment"]["packages"]["vllm"] == "0.23.0"
    told = json.loads((vllm / "told.json").read_text())
    assert told["enable_sleep_mode"]
    assert read_config(told["config"]) == MODELS["tiny"]
    columns, lines = table(result)
    assert [len(line) for line in lines] == [len(columns)] * 3


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("pass", "vLLM: AssertionError: it sleeps"),
        ("print('it wakes up', flush=True); import os; os.abort()", "vLLM: it ended with -6"),
        ("import os; os._exit(0)", "vLLM: it wrote 1 lines instead of 6"),
    ],
    ids=["it sleeps", "it is killed", "it leaves"],
)
def test_who_does_not_wake_up_is_told(vllm: Path, does: str, told: str) -> None:
    (vllm / "__init__.py").write_text(VLLM.replace("self.awake |= set(tags)", does))
    done = run_module_here("benchmarks.sleeping", "--vllm", str(vllm.parent), "--model", "tiny", "--memory", "1MiB")
    assert done.returncode == 1
    assert told in done.stderr


def test_who_takes_too_long_is_stopped_and_his_log_shown(vllm: Path) -> None:
    (vllm / "__init__.py").write_text("print('it loads', flush=True); import time; time.sleep(600)")
    asked = "--vllm", str(vllm.parent), "--model", "tiny", "--memory", "1MiB", "--seconds", "5"
    done = run_module_here("benchmarks.sleeping", *asked)
    assert done.returncode == 1
    assert "it loads" in done.stderr
    assert "vLLM: not reached in time" in done.stderr
