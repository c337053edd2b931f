"""The command line as its users see it: exit status, stdout and stderr of a process."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, run_python
from typer.testing import CliRunner, Result

import vmmkv
from vmmkv.cli.app import app

LLAMA_3_1_8B = ["--layers", "32", "--kv-heads", "8", "--head-dim", "128"]


def invoke(*args: str) -> Result:
    return CliRunner().invoke(app, args)


def plan(*args: str) -> dict:
    result = invoke("plan", *args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def run_vmmkv(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`python -m vmmkv` on a machine without a GPU."""
    clean = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    code = f"import runpy; sys.path.insert(0, {str(ROOT)!r}); runpy.run_module('vmmkv', None, '__main__', True)"
    return run_python(code, *args, env=clean | {"CUDA_VISIBLE_DEVICES": ""} | env)


def test_plan_counts_a_given_cache_and_its_scales():
    sizes = "--layers 32 --kv-heads 8 --head-dim 64 --batch 2 --tokens 7 --memory 8GiB".split()  # noqa: SIM905
    scaled = [*sizes, "--dtype", "float8_e4m3fn", "--scales", "token_head"]
    for args, head in ((["--dtype", "float16"], 128), (["--dtype", "float8_e4m3fn"], 64), (scaled[-4:], 64 + 4)):
        result = plan(*sizes, *args)
        assert result["token_bytes"] == 32 * 8 * 2 * head
        assert result["cache"] == {"batch": 2, "tokens": 7, "bytes": 14 * result["token_bytes"]}
    assert plan(*sizes, "--kv-dtype", "fp8") == result
    shown = invoke("plan", *scaled).stdout
    assert "token_head" in shown
    assert f"({result['cache']['bytes']:,} bytes)" in shown
    assert invoke("plan", *scaled, "--kv-dtype", "fp8").exit_code == 2


def test_plan_of_llama():
    result = plan(*LLAMA_3_1_8B, "--memory", "80GiB", "--mean-tokens", "1366")
    expected = {"token_bytes": 128 << 10, "layer_bytes": 4 << 10, "tokens_per_page": 16, "row_bytes": 1 << 30}
    assert result.items() >= (expected | {"int32_token_limit": 32768, "total_tokens": 655_360}).items()
    schemes, sequences = result["schemes"], {"static": 80, "block_table_16": 477, "per_layer": 341, "vmmkv": 477}
    assert {name: scheme["sequences"] for name, scheme in schemes.items()} == sequences
    assert schemes["static"]["waste"] == pytest.approx(1 - 1366 / 8192)
    assert schemes["vmmkv"]["waste"] < 0.01 < 0.25 < schemes["per_layer"]["waste"]


def test_plan_reads_a_config(tmp_path: Path):
    path = tmp_path / "config.json"
    text = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64}
    text |= {"model_type": "gemma3_text", "hidden_size": 256, "max_position_embeddings": 4096}
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text, "dtype": "float32"}))
    result = plan("--config", str(path), "--memory", "1GiB")
    assert (result["token_bytes"], result["max_seq_len"], result["mean_tokens"]) == (2 * 2 * 64 * 4, 4096, 1024)
    result = plan("--config", str(path), "--memory", "1GiB", "--dtype", "float8_e4m3fn", "--max-seq-len", "100")
    assert (result["token_bytes"], result["max_seq_len"]) == (2 * 2 * 64, 100)


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ([*LLAMA_3_1_8B, "--memory", "much"], vmmkv.BudgetError),
        ([*LLAMA_3_1_8B, "--memory", "1MiB"], vmmkv.BudgetError),
        ([*LLAMA_3_1_8B, "--mean-tokens", "8193"], vmmkv.SequenceTooLongError),
        ([*LLAMA_3_1_8B, "--dtype", "float64"], vmmkv.DtypeError),
        ([*LLAMA_3_1_8B, "--max-seq-len", "999999999999"], vmmkv.LayoutError),
        (["--config", __file__], vmmkv.LayoutError),
        ([*2 * ["--model", "MODEL"], "--memory", "3MiB"], vmmkv.BudgetError),  # shares below a page
        ([*2 * ["--model", "MODEL", "--reserved", "55%"], "--memory", "1GiB"], vmmkv.BudgetError),
        *((["--config", number], vmmkv.LayoutError) for number in range(4)),
    ],
    ids=str,
)
def test_plan_raises_what_the_library_raises(args: list[str | int], error: type[Exception], tmp_path: Path):
    path, text = write_config(tmp_path / "model"), tmp_path / "config.json"
    if isinstance(args[-1], int):
        text.write_text(NO_CONFIGS[args[-1]])
    places = {"MODEL": str(path)} | dict.fromkeys(range(4), str(text))
    assert type(invoke("plan", *(str(places.get(word, word)) for word in args)).exception) is error


NO_CONFIGS = (
    "[1, 2]",
    '{"model_type": "llama", "num_hidden_layers": "x", "num_attention_heads": 4, "hidden_size": 64}',
    '{"model_type": ["llama"], "text_config": {"model_type": {}}}',
    "[" * 100_000,
)


def write_config(folder: Path, **sizes: int) -> Path:
    folder.mkdir()
    path = folder / "config.json"
    usual = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    path.write_text(
        json.dumps(usual | {"model_type": "llama", "hidden_size": 4096, "max_position_embeddings": 8192} | sizes)
    )
    return path


def test_plan_keeps_what_is_reserved(tmp_path: Path):
    """Against a pool with these reservations, which knows no sequences: bytes that each account may have."""
    large, small = write_config(tmp_path / "large"), write_config(tmp_path / "small", num_hidden_layers=16)
    models = "--model", str(large), "--model", str(small), "--memory", "1GiB", "--mean-tokens", "64"
    wanted = [random.randint(0, 250) << 21, random.randint(0, 250) << 21]  # whole pages
    result = plan(*models, *(word for nbytes in wanted for word in ("--reserved", str(nbytes))))
    pool = vmmkv.FramePool("1GiB", device="cpu")
    layout = vmmkv.KVLayout(1, 1, 64)
    caches = [vmmkv.KVCache(layout, 1, 1, pool=pool, reserved=nbytes) for nbytes in wanted]
    for of, cache, nbytes in zip(result["models"], caches, wanted):
        assert of["reserved_bytes"] == nbytes
        assert of["pool"]["total_tokens"] == cache.available_pages * pool.page_size // of["token_bytes"]
        assert of["reserved"]["total_tokens"] == nbytes // of["token_bytes"]
    count, costs = result["sequences_of_each"], [64 * of["token_bytes"] for of in result["models"]]
    begun = result["page_size"]  # at most so much of a sequence's last page is empty
    room = [sum(max(nbytes, each) for nbytes, each in zip(wanted, (n * (c + more) for c in costs))) for n, more in
            ((count, 0), (count + 1, begun))]  # fmt: skip
    assert room[0] <= 1 << 30 < room[1]


@pytest.mark.parametrize(
    ("models", "args"),
    [
        (0, []),
        (0, ["--layers", "0", "--kv-heads", "2", "--head-dim", "64"]),
        (0, [*LLAMA_3_1_8B, "--batch", "4"]),
        (0, [*LLAMA_3_1_8B, "--config", __file__]),
        (0, ["--config", "no/such/config.json"]),
        (1, ["--model", "."]),
        (1, ["--layers", "2"]),
        (2, ["--batch", "2", "--tokens", "8"]),
        (2, ["--reserved", "10%"]),
    ],
)
def test_plan_refuses_models_that_do_not_fit_together(models: int, args: list[str], tmp_path: Path):
    paths = [write_config(tmp_path / str(number)) for number in range(models)]
    result = invoke("plan", *(word for path in paths for word in ("--model", str(path))), *args)
    assert result.exit_code == 2
    assert "Usage" in result.stderr


def test_info_without_a_gpu_reports_the_host():
    result = run_vmmkv("info", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    facts = json.loads(result.stdout)
    assert (facts["kind"], facts["device"], facts["cuda_device_seen"]) == ("host", "cpu", False)
    assert facts["page_size"] == 2 << 20
    assert 0 < facts["free_bytes"] <= facts["total_bytes"]
    shown = run_vmmkv("info").stdout
    assert "No CUDA device was seen" in shown
    assert "\x1b" not in shown


@pytest.mark.gpu
def test_info_on_a_gpu():
    result = invoke("info", "--json")
    facts = json.loads(result.stdout)
    assert (facts["kind"], facts["cuda_device_seen"]) == ("cuda", True)
    assert {"exportable", "host_numa_pages", "fabric_handles", "cuda_driver"} <= facts.keys()


@pytest.mark.parametrize("args", [["info", "--device", "cuda"], ["plan", *LLAMA_3_1_8B, "--memory", "1.2.3GiB"]])
def test_an_error_is_one_line_on_stderr_and_status_2(args: list[str]):
    result = run_vmmkv(*args)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("vmmkv: asked for ")
    assert result.stderr.count("\n") == 1


def test_it_says_its_version():
    assert invoke("--version").stdout == f"vmmkv {vmmkv.__version__}\n"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_says_what_to_install_where_the_extra_is_missing(missing: str):
    result = run_python(f"""
        class Missing:
            def find_spec(name, *_):
                if name == {missing!r}:
                    raise ModuleNotFoundError(name=name)

        sys.meta_path.insert(0, Missing)
        from vmmkv.cli import main
        main()
    """)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f'vmmkv: {missing} is not installed; run: pip install "vmmkv[cli]"\n'
