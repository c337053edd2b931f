"""vLLM beside ours: the same requests, model's shape and bytes for K and V, in a process of its own.

It serves at saturation, as `LLM.generate` does, whose answers come when they are whole. Its rounds follow ours, which
hold no memory then but weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

from benchmarks.engine.model import Config
from benchmarks.geometry import free_memory
from benchmarks.output import Row
from benchmarks.processes import run_command
from vmmkv.cli.output import errors

from .measure import REUSE, SATURATION, SEED, Settings, middle
from .workloads import Workload

NAMES = ["vllm", f"vllm+{REUSE}"]
"""Without prefix caching, and with it."""
SHARE = 0.5
"""Of the time: kept for vLLM, which starts for more than a minute."""
BLOCK = 16
"""Tokens of a block."""
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
STEP_TOKENS = 8192
"""Of a step, at least: with Llama-3.1-8B's shape vLLM serves faster with them than with as few as ours has, and it
takes as many itself as a server on such a GPU."""
LINES = 20
"""Of its log, that are shown if it fails, or is stopped."""
MISSING = "there is no module vllm, and no --vllm with a folder of it"


def can_be_had(folder: Path | None) -> bool:
    """Whether there is a folder in which vLLM is unpacked, or it is installed."""
    return folder is not None or find_spec("vllm") is not None


class Served(NamedTuple):
    """Results of a process.

    Attributes:
        version: vLLM's; None: it did not start.
        about: its options, environment, versions and stand-ins.
        rows: one for each run.
        reason: why there are no more, if it did not come to its end.
    """

    version: str | None
    about: Row
    rows: list[Row]
    reason: str


def serve(
    config: Row,
    works: list[Row],
    folder: Path | None,
    seconds: float,
    *,
    dtype: str,
    max_seq_len: int,
    blocks: int,
    sequences: int,
    step_tokens: int,
    caching: bool,
) -> Served:
    """Have vLLM serve works in a process that imports nothing of ours.

    Args:
        config: a `config.json`; weights are random.
        works: each has `prompts`, token ids, `outputs`, how many tokens follow, and `rounds`.
        folder: in which vLLM is unpacked; None: it is installed.
    """
    options: Row = {
        "load_format": "dummy",
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
    }  # others are vLLM's: CUDA graphs, asynchronous scheduling, the attention
    with TemporaryDirectory() as place:
        job, results, log = (Path(place) / name for name in ("job.json", "results.jsonl", "log"))
        (Path(place) / "config.json").write_text(json.dumps(config))
        job.write_text(json.dumps({"options": {"model": place} | options, "works": works}))
        results.touch()
        reason = run(job, results, log, folder, seconds)
        about, *rows = map(json.loads, results.read_text().splitlines() or ["null"])
    if about is None:
        return Served(None, options, [], reason)
    return Served(about.pop("version"), options | {"environment": ENVIRONMENT} | about, rows, reason)


def run(job: Path, results: Path, log: Path, folder: Path | None, seconds: float) -> str:
    """Run the process; return why it did not come to its end."""
    paths = [path for path in (str(folder or ""), os.environ.get("PYTHONPATH")) if path]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-P", str(Path(__file__).with_name("vllm_process.py")), str(job), str(results)]
    with log.open("w") as file:
        status = run_command(command, seconds, stdout=file.fileno(), stderr=subprocess.STDOUT, environment=environment)
    if status == 0:
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors.print("\n".join(lines[-LINES:]), highlight=False, markup=False)
    if status is None:
        return "not reached in time"
    return lines[-1] if lines and status > 0 else f"it ended with {status}"  # a killed process has not said why


def model_config(config: Config, max_seq_len: int) -> Row:
    """A shape in the words of a `config.json`."""
    return {
        "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": max_seq_len,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def serve_beside(
    result: Row, settings: Settings, workloads: list[Workload], rounds: int, folder: Path | None, name: str
) -> None:
    """Add a row for each workload to a result, and what was not reached, and why."""
    if not can_be_had(folder):
        result["skipped"].append({"backend": name, "reason": MISSING})
        return
    free_memory()
    model = settings.model
    works = [
        {
            "prompts": [ids.tolist() for ids in workload.prompts(model.config.vocab_size, SEED)],
            "outputs": [request.output for request in workload.requests],
            "rounds": rounds,
        }
        for workload in workloads
    ]
    told = serve(
        model_config(model.config, model.angles.shape[1]),
        works,
        folder,
        settings.deadline - perf_counter(),
        dtype=str(model.dtype).removeprefix("torch."),
        max_seq_len=max(workload.max_seq_len for workload in workloads),
        blocks=settings.max_bytes // (BLOCK * model.config.kv_layout(model.dtype).token_bytes),
        sequences=settings.max_sequences,
        step_tokens=settings.chunk + settings.max_sequences,
        caching=name == NAMES[1],
    )
    result.setdefault("vllm_options", {})[name] = told.about
    if told.version is None:
        result["skipped"].append({"backend": name, "reason": told.reason})
        return
    result["peers"]["vllm"] = told.version
    for number, workload in enumerate(workloads):
        about: Row = {"trace": workload.name, "load": SATURATION, "backend": name}
        rows = [about | figures(workload, row) for row in told.rows if row["work"] == number]
        result["serving"] += [middle(rows)] if rows else []
        result["missed"] += [f"{workload.name}, {name}: {told.reason}"] * (rounds - len(rows))


def figures(workload: Workload, told: Row) -> Row:
    """Figures of a round, in the words of ours, as far as they are known."""
    finished = sum(tokens == request.output for tokens, request in zip(told["tokens"], workload.requests))
    return {
        "requests": len(workload.requests),
        "finished": finished,
        "seconds": told["seconds"],
        "output_tokens_per_s": sum(told["tokens"]) / told["seconds"],
    }
