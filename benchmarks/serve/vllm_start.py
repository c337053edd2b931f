"""vLLM in a process of its own: where it is, what it is told of a model's shape, and how it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engine.model import Config
from benchmarks.processes import run_command
from vmmkv.cli.output import errors

BLOCK = 16
"""Tokens of a block."""
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
STEP_TOKENS = 8192
"""Of a step, at least: with Llama-3.1-8B's shape vLLM serves faster with them than with as few as ours has, and it
takes as many itself as a server on such a GPU."""
LINES = 20
"""Of its log, that are shown if it fails, or is stopped."""


def can_be_had(folder: Path | None) -> bool:
    """Whether there is a folder in which it is unpacked, or it is installed."""
    return folder is not None or find_spec("vllm") is not None


def engine_options(
    model: Path, *, dtype: str, max_seq_len: int, blocks: int, sequences: int, step_tokens: int, caching: bool
) -> dict[str, Any]:
    """Of `vllm.LLM`, for a folder with a `config.json` and, unless weights are to be random, with safetensors. What is
    not named is as vLLM has it: CUDA graphs, asynchronous scheduling, the attention."""
    return {
        "model": str(model),
        "load_format": "auto" if any(model.glob("*.safetensors")) else "dummy",
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "max_model_len": max_seq_len,
        "block_size": BLOCK,
        "num_gpu_blocks_override": blocks,
        "gpu_memory_utilization": 0.6,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": max(step_tokens, STEP_TOKENS),
        "enable_prefix_caching": caching,
        "disable_log_stats": True,
    }


class Served(NamedTuple):
    """What a process has told.

    Attributes:
        version: vLLM's.
        about: what it runs on: its environment, versions, stand-ins.
        rows: one for each run.
        reason: why there is no more, if it did not come to its end.
    """

    version: str | None
    about: dict[str, Any]
    rows: list[dict[str, Any]]
    reason: str


def serve_with_vllm(
    place: Path, options: dict[str, Any], works: list[dict[str, Any]], folder: Path | None, seconds: float
) -> Served:
    """Has a process serve works, of which each has `prompts` and `outputs`, the ids and how many tokens are to follow,
    and `runs`, of each the times when requests come, or None; it leaves its files in a place."""
    job, results = place / "job.json", place / "results.jsonl"
    results.touch()
    job.write_text(json.dumps({"options": options, "works": works}))
    reason = run_vllm("vllm_process", job, results, folder, seconds)
    about, *rows = map(json.loads, results.read_text().splitlines() or ["null"])
    if about is None:
        return Served(None, {}, [], reason)
    return Served(about.pop("version"), {"environment": ENVIRONMENT} | about, rows, reason)


def run_vllm(script: str, job: Path, results: Path, folder: Path | None, seconds: float) -> str:
    """Runs one of the scripts beside this one, which imports nothing of ours, with vLLM from a folder or as it is
    installed; returns why it did not come to its end."""
    paths = [str(folder)] if folder else []
    paths += [path for path in [os.environ.get("PYTHONPATH")] if path]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)}
    log = job.with_name("log")
    command = [sys.executable, "-P", str(Path(__file__).with_name(f"{script}.py")), str(job), str(results)]
    with log.open("w") as file:
        status = run_command(command, seconds, stdout=file.fileno(), stderr=subprocess.STDOUT, environment=environment)
    if status == 0:
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors.print("\n".join(lines[-LINES:]), highlight=False, markup=False)
    if status is None:
        return "not reached in time"
    return lines[-1] if lines and status > 0 else f"it ended with {status}"  # who is killed has not said why


def model_config(config: Config, max_seq_len: int) -> dict[str, Any]:
    """A shape in the words of a `config.json`."""
    kind = "qwen3" if config.qk_norm else "llama"
    return {
        "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope["rope_theta"],
        "max_position_embeddings": max_seq_len,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
