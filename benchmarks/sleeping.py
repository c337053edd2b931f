"""How long vLLM's sleep mode takes to give memory to another model, and to have it back.

    python -m benchmarks.sleeping [--vllm DIR] [--model NAME] [--memory 10GiB] [--rounds N] [--json]

Models that share a card without a pool in common take turns: one sleeps, its weights go to the host and its K and V are
dropped, and another wakes up. `benchmarks.pools` measures how long as many bytes take to move from one cache to another
on one pool, where weights stay. vLLM runs in a process of its own. Needs an NVIDIA GPU, and vLLM.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from benchmarks.environment import environment, print_result
from vmmkv.budget import parse_bytes
from vmmkv.cli.options import JsonOutput
from vmmkv.cli.output import console, errors, format_bytes, make_table

from .engine.model import MODELS
from .serve.vllm_start import BLOCK, can_be_had, model_config, run_vllm

Row = dict[str, Any]
MAX_SEQ_LEN = 8192
PARTS = {
    "to sleep": "sleep_ms",
    "to wake up with weights": "wake_weights_ms",
    "to have memory for K and V again": "wake_kv_ms",
}
"""What is timed, and the fields of a round."""


def main(
    vllm: Annotated[Path | None, typer.Option(exists=True, file_okay=False, help="In which vLLM is unpacked.")] = None,
    model: Annotated[str, typer.Option(help=f"Of {', '.join(MODELS)}.")] = "llama-3.1-8b",
    memory: Annotated[str, typer.Option(help="For K and V.")] = "10GiB",
    rounds: Annotated[int, typer.Option(min=1, help="The median is told.")] = 5,
    seconds: Annotated[float, typer.Option(min=1, help="After which vLLM is stopped.")] = 300.0,
    json_output: JsonOutput = False,
) -> None:
    """Measure vLLM's sleep mode."""
    if model not in MODELS:
        raise typer.BadParameter(f"--model {model}: it must be one of {', '.join(MODELS)}")
    if not can_be_had(vllm):
        errors.print("There is no module vllm, and no --vllm with a folder of it.", style="red")
        raise typer.Exit(1)
    nbytes = parse_bytes(memory, free=0)
    version, *rows = measure(vllm, model, nbytes, rounds, seconds)
    result: Row = {
        "environment": environment(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "model": model,
        "kv_bytes": nbytes,
        "rounds": rows,
    }
    result["environment"]["packages"]["vllm"] = version["version"]
    if json_output:
        print_result(result)
    else:
        show(result)


def measure(vllm: Path | None, model: str, nbytes: int, rounds: int, seconds: float) -> list[Row]:
    """What the process tells: vLLM's version, and a row for each round."""
    with TemporaryDirectory() as folder:
        job, results = (Path(folder) / name for name in ("job.json", "results.jsonl"))
        (Path(folder) / "config.json").write_text(json.dumps(model_config(MODELS[model], MAX_SEQ_LEN)))
        job.write_text(json.dumps({"options": engine_options(folder, model, nbytes), "rounds": rounds}))
        results.touch()
        reason = run_vllm("sleeping_process", job, results, vllm, seconds)
        found = [json.loads(line) for line in results.read_text().splitlines()]
        if reason or len(found) != 1 + rounds:
            reason = reason or f"it wrote {len(found)} lines instead of {1 + rounds}"
            errors.print(f"vLLM: {reason}", style="red", highlight=False, markup=False)
            raise typer.Exit(1)
        return found


def engine_options(folder: str, model: str, nbytes: int) -> Row:
    """Of `vllm.LLM`: random weights, and so many bytes of K and V."""
    token_bytes = MODELS[model].kv_layout(torch.bfloat16).token_bytes
    return {
        "model": folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": MAX_SEQ_LEN,
        "block_size": BLOCK,
        "num_gpu_blocks_override": nbytes // (BLOCK * token_bytes),
        "gpu_memory_utilization": 0.6,
        "enable_sleep_mode": True,
        "disable_log_stats": True,
    }


def table(result: Row) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns, and a line for each part of a turn."""
    rows = result["rounds"]
    lines = []
    for what, name in PARTS.items():
        times = [row[name] for row in rows]
        lines.append((what, f"{median(times):,.0f} ({min(times):,.0f} to {max(times):,.0f})"))
    return (f"vLLM {result['environment']['packages']['vllm']}, {result['model']}", "ms"), lines


def show(result: Row) -> None:
    freed = format_bytes(int(median(row["freed_bytes"] for row in result["rounds"])))
    console.print(make_table(f"Sleep mode: {freed} are free while it sleeps", *table(result)))


if __name__ == "__main__":
    typer.run(main)
