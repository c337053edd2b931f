"""What those that serve begin with: usual sizes, a model by its name, and what is told of a workload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import typer

from benchmarks.engine.checkpoints import load_model, read_config
from benchmarks.engine.model import MODELS, Config, Model, random_model

from .workloads import Usual, Workload

GPU = Usual("llama-3.1-8b", "16GiB", 8192, 16_384, shorten=1)
HOST = Usual("tiny", "1MiB", 512, 512, shorten=16)
LARGEST = 0.9
"""Of the budget: requests that would take more are left out."""


def longest_request(config: Config, dtype: torch.dtype, max_bytes: int) -> int:
    """Tokens of the longest request that is served from so many bytes of K and V."""
    return int(LARGEST * max_bytes) // config.kv_layout(dtype).token_bytes


def find_config(model: str) -> Config:
    """Of a model by name, or in a folder."""
    if model in MODELS:
        return MODELS[model]
    path = Path(model) / "config.json"
    if not path.is_file():
        raise typer.BadParameter(f"{model}: it must be one of {', '.join(MODELS)}, or a folder with a config.json")
    return read_config(json.loads(path.read_text()))


def make_model(name: str, config: Config, positions: int, device: torch.device, dtype: torch.dtype) -> Model:
    """With random weights, or with those of a folder."""
    if name in MODELS:
        return random_model(config, positions, device, dtype)
    return load_model(Path(name), positions, device, dtype)


def describe(workload: Workload) -> dict[str, Any]:
    return {
        "name": workload.name,
        "requests": len(workload.requests),
        "tokens": workload.tokens,
        "prompt_tokens": sum(request.prompt for request in workload.requests),
        "known_tokens": workload.known_tokens(),
        "output_tokens": sum(request.output for request in workload.requests),
        "max_seq_len": workload.max_seq_len,
        "longest": workload.longest,
        "left_out": workload.left_out,
    }
