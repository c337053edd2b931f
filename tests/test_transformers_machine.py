"""A `VmmCache` of any kind in any order of operations, against a `DynamicCache` that does the same, bit for bit."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROUNDS
from generation import PAGE_SIZE, RoundingCache, inside_a_graph, vmm_cache
from generation import reference_kernels as reference_kernels
from tiny_models import tiny_model
from transformers import DynamicCache

from vmmkv.integrations import stand_ins
from vmmkv.integrations.attention import kernels_take
from vmmkv.integrations.stand_ins import ScaledStates, WholeRows

KINDS: list[tuple[dict[str, Any], int]] = [
    ({}, 64),
    ({"compile": True}, 64),
    ({"compile": True}, 8),
    ({"kv_dtype": "int8"}, 24),
    ({"kv_dtype": "fp8"}, 24),
]
"""Options of caches, and the width of heads: kernels take those of 64."""


class Pair:
    """A cache and its reference. Of its layers some never write, others write an image now and then."""

    def __init__(self, options: dict[str, Any], width: int, device: str, random: np.random.Generator) -> None:
        self.config = copy.deepcopy(tiny_model("gemma3", "vmmkv", "cpu").config)
        self.width, self.device, self.random, self.recording = width, device, random, random.random() < 0.4
        self.kv_dtype = options.get("kv_dtype")
        self.dtype = torch.bfloat16 if self.kv_dtype and random.random() < 0.5 else torch.float32
        if self.kv_dtype and random.random() < 0.3:
            self.config._attn_implementation = "flex_attention"
        self.has_whole_rows = "compile" in options and kernels_take(*self.random_kv(1, 1))
        self.cache = vmm_cache(self.config, device, max_batch_size=8, **options)
        self.reset()

    def reset(self) -> None:
        self.cache.reset()
        self.reference = (  # a new one: 5.17 zeroes it, but keeps its length
            RoundingCache(self.config, self.kv_dtype) if self.kv_dtype else DynamicCache(config=self.config)
        )
        self.rows, self.newest = int(self.random.integers(1, 4)), 0
        kinds = self.random.permutation(["text", "text", "image", "silent"])
        windows = [kind == "sliding_attention" for kind in self.config.layer_types]
        self.layers: dict[str, list[int]] = {"text": [], "image": [], "silent": []}
        for index, (kind, is_window) in enumerate(zip(kinds, windows)):
            self.layers["text" if self.recording or (is_window and kind == "image") else kind].append(index)
        for each in (self.cache, self.reference) if self.recording else ():
            each.activate_past_recording()

    @property
    def length(self) -> int:
        return self.reference.get_seq_length(self.layers["text"][0])

    def random_kv(self, rows: int, tokens: int) -> list[torch.Tensor]:
        """K and V: four tokens of two layers fill a page if they are 64 wide."""
        shape = rows, PAGE_SIZE[self.device] // 4096, tokens, self.width
        spread = torch.randn(self.width, device=self.device).exp() if self.kv_dtype else 1
        return [(torch.randn(shape, device=self.device) * spread).to(self.dtype) for _ in "kv"]

    def forward(self, tokens: int, *, is_asked: bool, graph: bool = False) -> None:
        order, before = self.layers["text"], self.length
        is_whole = self.has_whole_rows and before > 0 and (is_asked or graph)
        if is_asked:
            for _ in range(self.random.integers(1, 3)):
                sizes = self.cache.get_mask_sizes(tokens, int(self.random.choice(order)))
                assert (sizes == (200, 0)) == (self.has_whole_rows and before > 0)
        with inside_a_graph() if graph else nullcontext():
            for index in order:
                self.update(index, tokens, is_whole)
        if self.layers["image"] and not graph and self.random.random() < 0.3 and self.length < 100:
            for index in self.layers["image"]:
                self.update(index, 13, is_whole=False)
        self.newest += tokens

    def update(self, index: int, tokens: int, is_whole: bool) -> None:
        kv = self.random_kv(self.rows, tokens)
        visible, _ = self.reference.get_mask_sizes(tokens, index)
        states, expected = self.cache.update(*kv, index), self.reference.update(*kv, index)
        end = self.reference.get_seq_length(index)
        for got, want in zip(states, expected):
            assert got.shape[2] == (200 if is_whole else visible)
            assert got.dtype == self.dtype
            assert isinstance(got, WholeRows) == is_whole
            assert isinstance(got, ScaledStates) <= (self.config._attn_implementation == "vmmkv")
            live = got.states[:, :, end - visible : end] if is_whole else got
            assert torch.equal(live, want[:, :, -visible:])  # 5.17 gives more while it records

    def write_over(self) -> None:
        """Writes to the views of K and V."""
        for layer, expected in zip(self.cache.layers, self.reference.layers):
            if expected.is_initialized and expected.keys.numel():
                new = torch.randn_like(expected.keys)
                layer.keys.copy_(new)
                expected.keys.copy_(new)
                layer.values.mul_(3)
                expected.values.mul_(3)

    def check(self) -> None:
        for index, (layer, expected) in enumerate(zip(self.cache.layers, self.reference.layers)):
            assert self.cache.get_seq_length(index) == self.reference.get_seq_length(index)
            if self.reference.get_seq_length(index):
                assert torch.equal(layer.keys, expected.keys)
                assert torch.equal(layer.values, expected.values)
            else:
                assert layer.keys is layer.values is None
        for kv_cache in self.cache.kv_caches:
            kv_cache.check()

    def both(self, name: str, *arguments: object) -> None:
        for each in (self.cache, self.reference):
            getattr(each, name)(*arguments)


@pytest.mark.parametrize(("options", "width"), KINDS, ids=str)
@pytest.mark.parametrize("trial", range(2 * ROUNDS))
@pytest.mark.usefixtures("reference_kernels")
def test_any_operations_in_any_order(
    trial: int, options: dict[str, Any], width: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the layers, with and without a mask, in graphs and outside of them; copies hold what they held."""
    monkeypatch.setattr(stand_ins, "PIECE", 300)  # so that most is rounded in several
    seed = np.random.SeedSequence().entropy
    print(f"{seed=}")
    random = np.random.default_rng(seed)
    pair = Pair(options, width, device, random)
    others: list[Pair] = []
    looking, sharing = random.integers(2, size=2)  # who looks at K and V, or writes to them, has them shared no more
    operations = ["forward"] * 3 + ["ask", "crop", "reorder", "repeat", "select", "copy"]
    operations += ["graph"] * 4 if pair.has_whole_rows else []
    operations += ["write"] * (not sharing and pair.kv_dtype is None)
    for _ in range(60):
        operation, tokens = random.choice([*operations, "reset"]), int(random.integers(1, 13))
        if operation == "reset" or pair.length > 150:
            pair.reset()
        elif operation == "forward" or not pair.length:
            pair.forward(tokens, is_asked=bool(random.integers(2)))
        elif operation == "graph":
            pair.forward(tokens, is_asked=True, graph=True)
        elif operation == "ask":
            pair.cache.get_mask_sizes(tokens, pair.layers["text"][0])
            pair.cache.get_mask_sizes(tokens + 1, pair.layers["text"][0])  # so that no pass that comes was asked for
            pair.cache.get_mask_sizes(40, pair.layers["text"][0])
        elif operation == "crop" and pair.recording:
            pair.both("crop", -int(random.integers(0, pair.newest + 1)))
            pair.newest = 0
        elif operation == "reorder":
            pair.both("reorder_cache", torch.from_numpy(random.integers(0, pair.rows, pair.rows)).to(device))
        elif operation == "repeat" and pair.rows <= 4:
            pair.both("batch_repeat_interleave", 2)
            pair.rows *= 2
        elif operation == "select":
            kept = random.permutation(pair.rows)[: random.integers(1, pair.rows + 1)]
            pair.both("batch_select_indices", torch.from_numpy(kept).to(device))
            pair.rows = len(kept)
        elif operation == "write":
            pair.write_over()
        elif operation == "copy":
            others = [*others[-5:], copy.copy(pair)]
            pair.cache, pair.reference = copy.deepcopy(pair.cache), copy.deepcopy(pair.reference)
            if random.integers(2):
                pair, others[-1] = others[-1], pair
        if looking:
            pair.check()
    for each in (pair, *others):
        each.check()
