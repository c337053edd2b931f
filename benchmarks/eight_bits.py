"""Distance of a model's logits with 8-bit K and V, beside transformers' own quantized caches, where K has outliers.

    python -m benchmarks.eight_bits [--json]

In trained models a few channels of K are many times as large as the rest, the same ones for all tokens, and V has none:
KIVI (arXiv:2402.02750), KVQuant (arXiv:2401.18079), SmoothQuant (arXiv:2211.10438). So models of random weights get
such channels by a bias of K, where Qwen2 has one, in front of the rotary embedding, among those that it turns slowly.
All models compute in fp32, so that only K and V differ.

A prompt is read at once, and tokens after it one by one, the same ones with every cache. Distances are of the logits of
these, without each one's mean, against those of a cache of fp32. The group-wise caches of transformers keep up to 128
tokens behind the prompt as they are; caches that are not installed are left out (`pip install optimum-quanto hqq`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from transformers import Cache, DynamicCache, QuantizedCache, Qwen2Config, Qwen2ForCausalLM

from vmmkv.cli.output import JsonOutput
from vmmkv.integrations.transformers import VmmCache
from vmmkv.layout import KV_DTYPES

from .environment import environment, version_of
from .output import Lines, Row, deliver

OUTLIERS = 1, 10, 30
"""How many times the rest of K its outlier channels are."""
CHANNELS = 4
"""Of a head of 64 that are outliers, in pairs that are rotated together."""
LENGTHS = 128, 512
VOCABULARY = 512
PACKAGES = {"quanto": "optimum-quanto", "hqq": "hqq"}


def make_model(outliers: float, layers: int = 4) -> Qwen2ForCausalLM:
    """A small Qwen2 in fp32, of whose K a few channels are so many times the rest."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        attn_implementation="sdpa",
    )
    model = Qwen2ForCausalLM(config).eval()
    head_dim = config.hidden_size // config.num_attention_heads
    with torch.no_grad():
        for layer in model.model.layers:
            attention: Any = layer.self_attn
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                projection.weight.normal_(std=config.hidden_size**-0.5)  # Q, K and V of size 1
                projection.bias.zero_()
            attention.q_proj.weight.mul_(2)  # scores of size 2: tokens attend to some more than to others
            attention.o_proj.weight.normal_(std=config.hidden_size**-0.5)
            if outliers > 1:
                for head in attention.k_proj.bias.view(-1, head_dim):
                    first = head_dim // 4 + torch.randperm(head_dim // 4)[: CHANNELS // 2]
                    sizes = outliers * torch.empty(CHANNELS).uniform_(0.7, 1.3) * torch.randn(CHANNELS).sign()
                    head[torch.cat([first, first + head_dim // 2])] = sizes
    return model


class HalfCache(DynamicCache):
    """K and V in bf16, for a model that computes in fp32."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        kept = super().update(keys.bfloat16(), values.bfloat16(), layer_idx)
        return tuple(states.to(keys.dtype) for states in kept)


def makers(config: Any, max_seq_len: int) -> dict[str, Callable[[], Cache]]:
    """Caches, by name, with the bits that each keeps of a number, scales and zero points aside."""

    def ours(kv_dtype: str) -> Callable[[], Cache]:
        return lambda: VmmCache(config, max_seq_len, kv_dtype=kv_dtype, max_bytes="256MiB", page_size=4096)

    caches: dict[str, Callable[[], Cache]] = {
        "bf16": lambda: HalfCache(config=config),
        **{f"vmmkv {name}": ours(name) for name in KV_DTYPES},
        "transformers fp8": lambda: QuantizedCache("fp8", config),
    }
    groups = {"quanto 4 bits": ("quanto", 4, 0), "hqq 8 bits": ("hqq", 8, 1), "hqq 4 bits": ("hqq", 4, 1)}
    for name, (backend, nbits, axis) in groups.items():
        if version_of(PACKAGES[backend]):
            caches[f"transformers {name}"] = lambda backend=backend, nbits=nbits, axis=axis: QuantizedCache(  # type: ignore[misc]
                backend, config, nbits=nbits, axis_key=axis, axis_value=axis
            )
    return caches


def logits(model: Qwen2ForCausalLM, tokens: torch.Tensor, length: int, cache: Cache) -> torch.Tensor:
    """Of the tokens behind a prompt of so many, `[batch, tokens, vocabulary]`, without each one's mean."""
    with torch.no_grad():
        model(tokens[:, :length], past_key_values=cache, logits_to_keep=1)
        steps = [model(token, past_key_values=cache).logits for token in tokens[:, length:].split(1, 1)]
    found = torch.cat(steps, 1).double()
    return found - found.mean(-1, keepdim=True)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the norm."""
    return float((found - expected).norm() / expected.norm())


def measure(model: Qwen2ForCausalLM, length: int, batch: int, steps: int) -> list[Row]:
    """A row for each cache."""
    tokens = torch.randint(VOCABULARY, (batch, length + steps))
    expected = logits(model, tokens, length, DynamicCache(config=model.config))
    rows = []
    for name, make in makers(model.config, length + steps).items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that time has passed by
            found = logits(model, tokens, length, make())
        agreement = (found.argmax(-1) == expected.argmax(-1)).double().mean()
        rows.append({"cache": name, "distance": distance(found, expected), "agreement": float(agreement)})
    return rows


def main(
    lengths: Annotated[list[int] | None, typer.Option(min=1, help="Tokens of a prompt; 128 and 512.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Prompts of each length.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Tokens behind each.")] = 8,
    layers: Annotated[int, typer.Option(min=1, help="Of each model.")] = 4,
    json_output: JsonOutput = False,
) -> None:
    """Measure what 8-bit K and V do to logits."""
    rows = []
    for outliers in OUTLIERS:
        torch.manual_seed(0)
        model = make_model(outliers, layers)
        for length in lengths or LENGTHS:
            rows += [{"outliers": outliers, "length": length, **row} for row in measure(model, length, batch, steps)]
    result: Row = {
        "environment": environment(torch.device("cpu")),
        "packages": {name: version_of(name) for name in ("transformers", *PACKAGES.values())},
        "channels": CHANNELS,
        "layers": layers,
        "tokens": batch * steps,
        "logits": rows,
    }
    distances = "Logits' distance from those of a cache of fp32, and the same first choice"
    deliver(result, json_output, {distances: table})


def table(result: Row) -> Lines:
    """A line for each cache and length of prompts, a column for each kind of outliers."""
    found = {(row["cache"], row["length"], row["outliers"]): row for row in result["logits"]}
    kinds = sorted({row["outliers"] for row in result["logits"]})
    lines = []
    for length, cache in dict.fromkeys((row["length"], row["cache"]) for row in result["logits"]):
        of = [found[cache, length, kind] for kind in kinds]
        lines.append((f"{length:,}", cache, *(f"{row['distance']:.1%}, {row['agreement']:.0%}" for row in of)))
    columns = (f"outliers of K {kind} x" if kind > 1 else "no outliers" for kind in kinds)
    return ("prompt", "K and V in", *columns), lines


if __name__ == "__main__":
    typer.run(main)
