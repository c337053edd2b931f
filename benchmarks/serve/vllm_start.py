"""vLLM in a process of its own: where it is, what it is told of a model's shape, and how it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.engine.model import Config
from benchmarks.processes import run_command
from vmmkv.cli.output import errors

BLOCK = 16
"""Tokens of a block."""
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
LINES = 20
"""Of its log, that are shown if it fails, or is stopped."""


def can_be_had(folder: Path | None) -> bool:
    """Whether there is a folder in which it is unpacked, or it is installed."""
    return folder is not None or find_spec("vllm") is not None


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
