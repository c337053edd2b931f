"""Models as transformers saves them: their shapes and weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .model import Config, Model


def load_model(folder: Path, max_seq_len: int, device: torch.device, dtype: torch.dtype) -> Model:
    """A Llama or Qwen3 as transformers saves it: `config.json` and safetensors files.

    Raises:
        ValueError: another kind of model.
    """
    from safetensors import safe_open

    config = read_config(json.loads((folder / "config.json").read_text()))
    files = [safe_open(path, "pt", device=str(device)) for path in sorted(folder.glob("*.safetensors"))]
    names = {name: file for file in files for name in file.keys()}  # noqa: SIM118, it is no dictionary

    def read(*parts: str) -> torch.Tensor:
        return torch.cat([names[f"{part}.weight"].get_tensor(f"{part}.weight").to(dtype) for part in parts])

    weights = {"embed": read("model.embed_tokens"), "norm": read("model.norm")}
    if not config.tie_word_embeddings:
        weights["lm_head"] = read("lm_head")
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}"
        weights[f"{layer}.input_norm"] = read(f"{at}.input_layernorm")
        weights[f"{layer}.post_norm"] = read(f"{at}.post_attention_layernorm")
        weights[f"{layer}.qkv"] = read(*(f"{at}.self_attn.{name}_proj" for name in "qkv"))
        weights[f"{layer}.o"] = read(f"{at}.self_attn.o_proj")
        weights[f"{layer}.gate_up"] = read(f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj")
        weights[f"{layer}.down"] = read(f"{at}.mlp.down_proj")
        if config.qk_norm:
            norms = (f"{at}.self_attn.{name}_norm" for name in "qk")
            counts = config.num_heads, config.num_kv_heads
            weights[f"{layer}.qk_norm"] = torch.cat([read(norm).expand(n, -1) for norm, n in zip(norms, counts)])
    return Model(config, weights, max_seq_len)


def read_config(config: Mapping[str, Any]) -> Config:
    """Of a `config.json`."""
    kind = config["model_type"]
    if kind not in ("llama", "qwen3") or config.get("attention_bias") or config.get("mlp_bias"):
        raise ValueError(f"got a model of type {kind!r}; this engine knows Llama and Qwen3, without biases")
    theta = {"rope_theta": config.get("rope_theta", 10_000.0)}
    return Config(
        config["vocab_size"],
        config["hidden_size"],
        config["intermediate_size"],
        config["num_hidden_layers"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        kind == "qwen3",
        config.get("tie_word_embeddings", False),
        config["rms_norm_eps"],
        config.get("rope_parameters") or theta | (config.get("rope_scaling") or {}),
    )
