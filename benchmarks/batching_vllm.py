"""vLLM beside transformers' continuous batching: the same requests, model's shape and bytes for K and V, in a process
of its own, without prefix caching and with as many tokens in a step as its server takes."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.batching_tables import VLLM
from benchmarks.engine.checkpoints import read_config
from benchmarks.generate.models import CONFIGS, token_bytes
from benchmarks.serve.measure import free_memory
from benchmarks.serve.vllm_start import BLOCK, can_be_had, engine_options, model_config, serve_with_vllm
from benchmarks.serve.workloads import Workload

SEQUENCES = 256
"""The most that it serves at a time, as many as ours."""

Row = dict[str, Any]


def serve_beside(folder: Path | None, name: str, workload: Workload, nbytes: int, seconds: float, rounds: int) -> Row:
    """What vLLM reaches in rounds in which all requests wait, as many as it comes to in so many seconds; why not all,
    if it cannot be had or has not come to its end. Nothing but a model's weights may be on the GPU."""
    if not can_be_had(folder):
        return {"served": [], "reason": "there is no module vllm, and no --vllm with a folder of it"}
    free_memory()
    config = CONFIGS[name]
    prompts = [ids.tolist() for ids in workload.prompts(config.vocab_size, seed=0)]
    outputs = [request.output for request in workload.requests]
    with TemporaryDirectory() as place:
        written = model_config(read_config(config.to_dict()), config.max_position_embeddings)
        (Path(place) / "config.json").write_text(json.dumps(written))
        options = engine_options(
            Path(place),
            dtype=str(written["torch_dtype"]),
            max_seq_len=workload.max_seq_len,
            blocks=nbytes // (BLOCK * token_bytes(config)),
            sequences=SEQUENCES,
            step_tokens=0,
            caching=False,
        )
        work = {"prompts": prompts, "outputs": outputs, "runs": [None] * rounds}
        told = serve_with_vllm(Path(place), options, [work], folder, seconds)
    rows = [row_of(number, row, outputs) for number, row in enumerate(told.rows)]
    about = {key: value for key, value in options.items() if key != "model"} | told.about
    return {"version": told.version, "options": about, "served": rows, "reason": told.reason}


def row_of(number: int, told: Row, outputs: list[int]) -> Row:
    """What is reported of a round, as far as it is known."""
    unknown = dict.fromkeys(("first_token_s", "waste", "most_waste", "surplus_bytes"))
    return unknown | {
        "system": VLLM,
        "round": number,
        "finished": sum(tokens == output for tokens, output in zip(told["tokens"], outputs)),
        "seconds": told["seconds"],
        "tokens_per_s": sum(told["tokens"]) / told["seconds"],
        "peak_bytes": 0,
    }
