"""The benchmark of 8-bit K and V, on a small model: that outliers are there, and what it says of caches."""

from __future__ import annotations

import json
import random

import pytest
import torch
from transformers import DynamicCache
from typer import Typer
from typer.testing import CliRunner

from benchmarks import eight_bits, eight_bits_tables, tables
from vmmkv import KVLayout

APP = Typer()
APP.command()(eight_bits.main)


def test_a_few_channels_of_k_are_many_times_the_rest() -> None:
    """Behind the rotary embedding, of each head, for all tokens."""
    model = eight_bits.make_model(20, layers=1)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.randint(eight_bits.VOCABULARY, (2, 50)), past_key_values=cache)
    sizes = cache.layers[0].keys.square().mean((0, 2)).sqrt()  # [heads, head_dim]
    rest, largest = sizes.median(1).values, sizes.topk(eight_bits.CHANNELS).values
    assert (largest.mean(1) > 8 * rest).all()
    assert (sizes.sort().values[:, : -eight_bits.CHANNELS] < 3 * rest[:, None]).all()
    values = cache.layers[0].values.square().mean((0, 2)).sqrt()
    assert (values.amax(1) < 3 * values.median(1).values).all()


def test_it_measures_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bits, "OUTLIERS", (1, 10))
    monkeypatch.setattr(eight_bits, "_installed", lambda package: None)  # they take seconds to import
    done = CliRunner().invoke(APP, ["--lengths", "20", "--batch", "1", "--steps", "3", "--layers", "1", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    distances = {(row["cache"], row["outliers"]): row["distance"] for row in result["logits"]}
    for outliers in (1, 10):
        assert 0 < distances["bf16", outliers] < distances["vmmkv int8", outliers] < 1
        assert distances["vmmkv int8", outliers] < distances["vmmkv fp8", outliers] < 1
    assert all(0 < result["attention"][name] < 0.1 for name in ("fp8", "int8"))
    assert tables.TABLES["eight-bits-logits"].write(result).count("\n") == 1 + 4
    assert tables.TABLES["eight-bits-rounding"].write(result).count("\n") == 1 + 2


def test_as_many_tokens_fit_as_a_layout_says() -> None:
    """With the scales that are kept; smaller ones would make room for 2 % more at most."""
    layers, heads = random.randint(1, 80), random.randint(1, 16)
    kept = KVLayout(layers, heads, eight_bits_tables.HEAD_DIM, torch.int8, scales="token_head")
    times = KVLayout(layers, heads, eight_bits_tables.HEAD_DIM).token_bytes / kept.token_bytes
    assert eight_bits_tables.tokens_for_bf16("fp32") == pytest.approx(times, rel=16 / kept.token_bytes)
    assert 1 < eight_bits_tables.tokens_for_bf16("fp16") / eight_bits_tables.tokens_for_bf16("fp32") < 1.02
