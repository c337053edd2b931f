"""What users of transformers call on a cache beside `generate`: it does what `DynamicCache` does, or refuses it.

Pages on the CPU are 4 KiB and hold a few tokens; an access outside of them kills the process, which is the point.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import each_with_few, open_drivers_with, seed_alone
from generation import (
    LENGTHS,
    PAGE_SIZE,
    caches,
    check_same_generation,
    check_same_state,
    forward,
    random_kv,
    random_tokens,
    vmm_cache,
)
from generation import mixed_config as mixed_config
from tiny_models import DECODER, MODELS, VOCABULARY, WINDOW, tiny_model
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import vmmkv
from vmmkv.driver.driver import open_driver
from vmmkv.integrations.layers import VmmLayer
from vmmkv.integrations.transformers import VmmCache

HYBRIDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "falcon-h1": ("FalconH1ForCausalLM", "FalconH1Config", {
        **DECODER, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16,
        "mamba_chunk_size": 8,
    }),
    "zamba2": ("Zamba2ForCausalLM", "Zamba2Config", {
        **DECODER, "num_key_value_heads": 8, "mamba_d_state": 16, "use_mamba_kernels": False, "chunk_size": 8,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    }),
    "inkling": ("InklingForCausalLM", "InklingTextConfig", {
        **DECODER, "head_dim": 8, "swa_head_dim": 8, "swa_num_attention_heads": 8, "swa_num_key_value_heads": 4,
        "sliding_window_size": WINDOW, "d_rel": 4, "rel_extent": 16, "moe_intermediate_size": 16, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "layer_types": ["hybrid", "hybrid_sliding"] * 2,
    }),
}  # fmt: skip
"""Their layers keep K and V beside the states of linear attention."""


def make_model(model_class: str, config_class: str, sizes: dict[str, Any], attention: str = "sdpa") -> PreTrainedModel:
    config = getattr(transformers, config_class)
    modeling = importlib.import_module(config.__module__.replace("configuration", "modeling"))
    seed_alone(0)
    return getattr(modeling, model_class)._from_config(config(**sizes), attn_implementation=attention).eval()


Pair = tuple[VmmCache, DynamicCache]


@pytest.fixture
def pair(mixed_config: PreTrainedConfig) -> Pair:
    """A cache of windows and full attention, and what it is compared with."""
    return vmm_cache(mixed_config, "cpu", max_batch_size=8), DynamicCache(config=mixed_config)


# ---------------------------------------------------------------------- layers that keep more than K and V


@pytest.mark.parametrize(("name", "num_beams"), each_with_few(1, HYBRIDS, [1, 3]))
def test_hybrid_layers(name: str, num_beams: int, device: str) -> None:
    model = make_model(*HYBRIDS[name]).to(device)
    cache = vmm_cache(model.config, device)
    with warnings.catch_warnings():
        warnings.simplefilter("error", vmmkv.KeptLayersWarning)
        check_same_generation(
            model, random_tokens(model, 3, 12), DynamicCache(config=model.config), cache, num_beams=num_beams
        )
    kept = [layer for layer in DynamicCache(config=model.config).layers if isinstance(layer, DynamicLayer)]
    assert sum(isinstance(layer, VmmLayer) for layer in cache.layers) == len(kept) > 0
    assert all(kv_cache.stats().tokens for kv_cache in cache.kv_caches)


@torch.no_grad()
@pytest.mark.few(4)
@pytest.mark.parametrize("name", [*HYBRIDS, "qwen3-next"])
def test_hybrid_layers_between_generations(name: str) -> None:
    """Copies go on as the original does, selected sequences as if they had been there from the start; and a
    reset makes room for another number of sequences."""
    model = tiny_model(name, "sdpa", "cpu") if name in MODELS else make_model(*HYBRIDS[name])
    prompt, more, end = (random_tokens(model, 2, tokens, seed=tokens) for tokens in (20, 3, 2))
    reference, cache = caches(model)
    for each in (cache, reference):
        model(prompt, past_key_values=each)
    expected = model(more, past_key_values=reference).logits
    for twin in (copy.deepcopy(cache), cache):
        torch.testing.assert_close(model(more, past_key_values=twin).logits, expected, atol=1e-4, rtol=1e-4)
    order = torch.tensor([1, 1, 0])
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(2 * order)
    selected = caches(model)[1]
    for tokens in (prompt, more):
        model(tokens[order], past_key_values=selected)
    logits = [model(end[order], past_key_values=each).logits for each in (cache, selected)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    cache.reset()
    check_same_generation(model, random_tokens(model, 3, 12), caches(model)[0], cache)


def test_layers_of_other_kinds_are_named_once() -> None:
    config = transformers.DeepseekV4Config(num_hidden_layers=3)
    importlib.import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")  # which makes the layers known
    with pytest.warns(vmmkv.KeptLayersWarning) as caught:
        cache = VmmCache(config, 100)
    (message,) = [str(warning.message) for warning in caught]
    for index, (layer, expected) in enumerate(zip(cache.layers, DynamicCache(config=config).layers, strict=True)):
        if not isinstance(layer, VmmLayer):
            assert type(layer) is type(expected)
            assert type(layer).__name__ in message
            assert str(index) in message
    assert Path(caught[0].filename) == Path(__file__)


def test_a_model_without_k_and_v_is_told() -> None:
    config = transformers.MambaConfig(num_hidden_layers=2, hidden_size=32, vocab_size=VOCABULARY)
    with pytest.warns(vmmkv.KeptLayersWarning, match="no layer of this model keeps K and V"):
        cache = VmmCache(config, 100)
    assert cache.kv_caches == []
    assert not cache.is_compileable  # or generate() would compile, which it does for no DynamicCache


@pytest.mark.parametrize("name", HYBRIDS)
def test_compiled_caches_of_hybrid_layers_are_refused(name: str) -> None:
    model_class, config_class, sizes = HYBRIDS[name]
    assert getattr(transformers, model_class)  # a model brings the kinds of its layers with it
    with pytest.raises(vmmkv.UnsupportedError, match=r"compile=True.*Layer"):
        VmmCache(getattr(transformers, config_class)(**sizes, attn_implementation="vmmkv"), 100, compile=True)


# ---------------------------------------------------------------------- dtypes


@pytest.mark.parametrize(
    ("name", "attention"), each_with_few(1, ["llama-gqa", "mistral", "gpt2", "smollm3"], ["eager", "sdpa"])
)
def test_autocast(name: str, attention: str) -> None:
    """Rotary embeddings make K fp32, while V is bf16; layers without them, the first here, have both in bf16."""
    sizes = {**DECODER, "no_rope_layers": [0, 1, 0, 1], "initializer_range": 0.2}
    smollm3 = "SmolLM3ForCausalLM", "SmolLM3Config", sizes, attention
    model = make_model(*smollm3) if name == "smollm3" else tiny_model(name, attention, "cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, cache = caches(model)
        for _ in range(2):
            cache.reset()
            check_same_generation(model, random_tokens(model, 3, 12), caches(model)[0], cache)


@pytest.mark.parametrize(
    ("k_dtype", "v_dtype"), [("float32", "bfloat16"), ("float16", "bfloat16"), ("int8", "float16"), ("half", "half")]
)
def test_two_dtypes_are_kept_exactly(pair: Pair, k_dtype: str, v_dtype: str) -> None:
    cache, _ = pair
    forward("cpu", 2, 9, cache)
    cache.reset()  # and others than before
    k, v = (states * 50 for states in random_kv("cpu", 2, 30))
    k, v = k.to(getattr(torch, k_dtype)), v.to(getattr(torch, v_dtype))
    for tokens in (slice(0, 20), slice(20, 21), slice(21, 30)):
        for index in range(len(cache)):
            kept = cache.update(k[:, :, tokens], v[:, :, tokens], index)
    first = 30 - kept[0].shape[2]
    assert kept[0].dtype == cache.layers[0].dtype
    assert torch.equal(kept[0].double(), k[:, :, first:].double())
    assert torch.equal(kept[1].double(), v[:, :, first:].double())
    with pytest.raises(vmmkv.DtypeError, match=r"no dtype that holds|this cache holds"):
        cache.update(k.to(torch.float8_e5m2), v, 1)


# ---------------------------------------------------------------------- making a cache


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((None,), {}, vmmkv.ArgumentError, r"max_seq_len=None.*VmmCache\(model.config, max_seq_len\)"),
        (("4096",), {}, vmmkv.ArgumentError, "max_seq_len='4096'.*whole number"),
        ((-5,), {}, vmmkv.LayoutError, "max_seq_len=-5"),
        ((100,), {"max_batch_size": 0}, vmmkv.LayoutError, "max_batch_size=0"),
        ((100,), {"page_size": "2MiB"}, vmmkv.ArgumentError, "page_size='2MiB'"),
        ((100,), {"max_bytes": "a lot"}, vmmkv.BudgetError, "a lot"),
        ((100,), {"offloading": True}, vmmkv.UnsupportedError, "DynamicCache.*offloading=True"),
    ],
)
def test_wrong_arguments_are_refused_at_once(
    mixed_config: PreTrainedConfig, arguments: tuple[Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        VmmCache(mixed_config, *arguments, **options)


def test_caches_that_others_make_of_the_same_type_are_refused(pair: Pair, mixed_config: PreTrainedConfig) -> None:
    cache, _ = pair
    forward("cpu", 2, 9, cache)
    for arguments, options, message in (
        ((4096, mixed_config), {}, "got a int as config"),  # swapped
        ((tuple(cache),), {}, "got a tuple as config.*RAG"),  # RAG, for beams
        ((map(tuple, zip(cache, cache)),), {}, "got a map as config.*DataParallel"),
        ((), {"config": mixed_config, "offloading": False}, "max_seq_len=None.*T5Gemma"),
    ):
        with pytest.raises(vmmkv.ArgumentError, match=message):
            type(cache)(*arguments, **options)


def test_k_and_v_as_data_parallel_passes_them_on(pair: Pair) -> None:
    """The windows are told as well, or the layers would be taken for full attention."""
    forward("cpu", 2, 5, *pair)
    copies = [DynamicCache(iter(each)) for each in pair]
    assert [type(layer) for layer in copies[0].layers] == [type(layer) for layer in copies[1].layers]
    forward("cpu", 2, 9, *copies)
    check_same_state(*copies)


# ---------------------------------------------------------------------- the surface


def public(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


@pytest.mark.parametrize("theirs", [DynamicLayer, DynamicSlidingWindowLayer])
def test_nothing_that_deals_with_k_and_v_is_inherited(theirs: type) -> None:
    """A flag; 5.17's name for get_max_length, which it calls; and what is set for each layer."""
    inherited = {"supports_early_init", "get_max_cache_shape", "is_sliding"}
    assert public(theirs) - {*vars(VmmLayer)} - inherited == set()


def test_names_and_values_are_those_of_a_dynamic_cache(pair: Pair) -> None:
    cache, reference = pair
    differing = {"layers", "keys", "values", "is_initialized", "max_cache_len"}  # the last is 5.17's for max_seq_len
    for tokens in (0, 5, 9):
        if tokens:
            forward("cpu", 2, tokens, *pair)
        for ours, theirs in (pair, *zip(cache.layers, reference.layers, strict=True)):
            assert public(theirs) - public(ours) == set()
            selections = set() if ours is cache else {"batch_repeat_interleave", "batch_select_indices"}  # are refused
            for name in public(theirs) - differing - selections - {"layer_class_to_replicate"}:
                if callable(value := getattr(theirs, name)):
                    parameters = inspect.signature(value).parameters
                    assert list(inspect.signature(getattr(ours, name)).parameters) == list(parameters), name
                else:
                    assert getattr(ours, name) == value, name
        assert cache.is_initialized == bool(tokens)
        assert len(cache) == len(reference)
        for states, others in zip(cache, reference, strict=True):
            assert (states[2] is None) == (others[2] is None)
            assert states[2] is None or states[2] == others[2]
    with pytest.raises(TypeError, match="not subscriptable"):
        cache[0]


def test_what_users_of_one_layer_cannot_do(pair: Pair) -> None:
    """Assign K and V, which are views to write to, ask for other sequences, or offload."""
    cache, order = pair[0], torch.tensor([1, 0])
    cache.layers[0].reorder_cache(order)  # of nothing
    forward("cpu", 2, 9, *pair)
    for each in pair:
        each.layers[1].values.mul_(3)
    layer = cache.layers[1]
    with pytest.raises(AttributeError):
        layer.keys = layer.keys * 2
    for method in ("reorder_cache", "batch_repeat_interleave", "batch_select_indices"):
        with pytest.raises(vmmkv.UnsupportedError, match="VmmCache"):
            getattr(layer, method)(order)
    for method in (layer.offload, layer.prefetch):
        with pytest.raises(vmmkv.UnsupportedError, match=r"DynamicCache\(offloading=True\)"):
            method()
    check_same_state(*pair)


# ---------------------------------------------------------------------- what is written


def test_what_cannot_be_written_is_refused_by_name(pair: Pair) -> None:
    """Before the first tokens, and behind them."""
    cache, _ = pair
    k, v = random_kv("cpu", 2, 1)
    refused = [
        ((k, v, 99), IndexError, ""),
        ((k, v, "0"), TypeError, ""),
        ((k, v.int(), 0), vmmkv.DtypeError, "K as torch.float32 and V as torch.int32"),
        ((k.numpy(), v, 3), vmmkv.ShapeError, "K ndarray"),
        ((k[0], v[0], 3), vmmkv.ShapeError, r"K \[2, 1, 16\].*layer 3.*batch_size"),
        ((k, v[:1], 2), vmmkv.ShapeError, r"V \[1, 2, 1, 16\] for layer 2"),
        ((k, random_kv("cpu", 2, 2)[1], 0), vmmkv.ShapeError, r"\[2, 2, 1, 16\] and V \[2, 2, 2, 16\].*head_dim may"),
        ((*random_kv("cpu", 9, 1), 1), vmmkv.OutOfRowsError, "max_batch_size"),
    ]
    later = [
        ((*random_kv("cpu", 3, 1), 1), vmmkv.ShapeError, r"batch of 3.*holds 2.*reset\(\)"),
        ((*random_kv("cpu", 2, 1, heads=1), 1), vmmkv.ShapeError, "num_kv_heads=2"),
        ((k.double(), v.double(), 1), vmmkv.DtypeError, "float64.*float32.*autocast"),
        ((k.long(), v.long(), 0), vmmkv.DtypeError, r"torch.int64.*cache holds torch.float32"),
        ((k.to("meta"), v.to("meta"), 1), vmmkv.DeviceError, "meta"),
        ((*random_kv("cpu", 2, 197), 1), vmmkv.SequenceTooLongError, "206 tokens.*max_seq_len=200"),
    ]
    for those in (refused, [*refused[:-1], *later]):
        for arguments, error, message in those:
            with pytest.raises(error, match=message):
                cache.update(*arguments)
        forward("cpu", 2, 9, *pair)
        check_same_state(*pair)
    for dropped, error, message in ((-1.5, vmmkv.ArgumentError, r"-1\.5 tokens.*whole"), (3, ValueError, "-3 drops")):
        with pytest.raises(error, match=message):
            cache.crop(dropped)
    check_same_state(*pair)


@pytest.mark.parametrize("prompt", [5, 290], ids=["tokens that stay", "a window that moves"])
def test_too_many_tokens_are_counted_as_the_user_counts(mixed_config: PreTrainedConfig, prompt: int) -> None:
    """Rows of layers with a window begin with the first token that these keep."""
    cache = vmm_cache(mixed_config, "cpu", max_seq_len=300)
    forward("cpu", 1, prompt, cache)
    for layer in range(len(cache)):
        with pytest.raises(vmmkv.SequenceTooLongError, match=r"asked for 301 tokens.*max_seq_len=300"):
            cache.update(*random_kv("cpu", 1, 301 - prompt), layer)
    forward("cpu", 1, 300 - prompt, cache)


# ---------------------------------------------------------------------- which sequences


SELECTIONS: dict[str, Any] = {
    "a list": [2, 0],
    "numpy": np.array([1, 1, 2, 0]),
    "a mask": torch.tensor([True, False, True]),
    "a list of bools": [False, True, False],
    "negative": [-1, 0],
    "int32": torch.tensor([2, 2], dtype=torch.int32),
    "an empty list": [],
    "an empty tensor": torch.tensor([]),
    "a mask of nothing": torch.zeros(3).bool(),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_selections(pair: Pair, mixed_config: PreTrainedConfig, name: str) -> None:
    cache, reference = pair
    forward("cpu", 3, 10, *pair)
    vmm_cache(mixed_config, "cpu").batch_select_indices(SELECTIONS[name])  # of nothing
    cache.batch_select_indices(SELECTIONS[name])
    if not cache.get_seq_length():
        assert "a" in name
        assert [kv_cache.stats().tokens for kv_cache in cache.kv_caches] == [0, 0]
        reference = DynamicCache(config=mixed_config)
        forward("cpu", 2, 9, cache, reference)
    else:
        reference.batch_select_indices(SELECTIONS[name])
    check_same_state(cache, reference)


def test_selections_of_sequences_that_are_not_there(pair: Pair) -> None:
    cache, _ = pair
    forward("cpu", 3, 10, *pair)
    for call, given, error, message in (
        (cache.batch_select_indices, [0, 3], vmmkv.OutOfRangeError, r"sequences \[0, 3\]; the cache holds 3"),
        (cache.batch_select_indices, torch.ones(4).bool(), vmmkv.OutOfRangeError, "holds 3"),
        (cache.batch_select_indices, [0.5], vmmkv.OutOfRangeError, "holds 3"),
        (cache.batch_select_indices, [[0, 1]], vmmkv.ShapeError, "no list of them"),
        (cache.batch_select_indices, [0] * 9, vmmkv.OutOfRowsError, "max_batch_size"),
        (cache.reorder_cache, torch.tensor([0, 1, 3]), vmmkv.OutOfRangeError, "holds 3"),
        (cache.reorder_cache, torch.tensor([0, 1, -1]), vmmkv.OutOfRangeError, "holds 3"),
        (cache.reorder_cache, torch.zeros(9).long(), vmmkv.OutOfRowsError, "max_batch_size"),
        (cache.batch_repeat_interleave, 3, vmmkv.OutOfRowsError, "max_batch_size"),
        (cache.batch_repeat_interleave, -1, vmmkv.OutOfRangeError, "holds 3"),
    ):
        with pytest.raises(error, match=message):
            call(given)
        check_same_state(*pair)
    forward("cpu", 3, 1, *pair)
    check_same_state(*pair)


def test_a_selection_that_finds_no_memory_changes_nothing(mixed_config: PreTrainedConfig) -> None:
    """There is room for more rows of the layer of full attention, and then none for those of layers with windows."""
    config = copy.deepcopy(mixed_config)
    config.layer_types, config.sliding_window = ["full_attention", *["sliding_attention"] * 3], 100
    cache, reference = vmm_cache(config, "cpu", max_bytes=33 * PAGE_SIZE["cpu"]), DynamicCache(config=config)
    forward("cpu", 3, 30, cache, reference)
    with pytest.raises(vmmkv.OutOfPagesError):
        cache.batch_repeat_interleave(3)
    check_same_state(cache, reference)
    assert {kv_cache.stats().rows["live"] for kv_cache in cache.kv_caches} == {64}
    for kv_cache in cache.kv_caches:
        kv_cache.check()
    forward("cpu", 3, 1, cache, reference)
    check_same_state(cache, reference)


def test_a_crop_that_one_layer_refuses_changes_none() -> None:
    """A layer of linear attention has not recorded what it would go back to."""
    model = tiny_model("qwen3-next", "sdpa", "cpu")
    cache = vmm_cache(model.config, "cpu")
    with torch.no_grad():
        model(random_tokens(model, 2, 9), past_key_values=cache)
    cache.layers.reverse()  # full attention first
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-1)
    assert [layer.get_seq_length() for layer in cache.layers if isinstance(layer, VmmLayer)] == [9, 9]


# ---------------------------------------------------------------------- saving


def test_caches_are_not_saved(pair: Pair, mixed_config: PreTrainedConfig) -> None:
    for cache in (pair[0], vmm_cache(mixed_config, "cpu", compile=True)):
        with pytest.raises(vmmkv.UnsupportedError, match="deepcopy"):
            pickle.dumps(cache)


# ---------------------------------------------------------------------- several devices


@pytest.fixture
def _devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory under the name of any device that a test asks for: cpu:1 is as good as cuda:1 here."""

    def open_by_name(device: object, page_size: int | None) -> object:
        driver = open_driver("cpu", page_size)
        driver.device = torch.device(device)
        return driver

    open_drivers_with(monkeypatch, open_by_name)


def on(device: int, *states: torch.Tensor) -> list[torch.Tensor]:
    """K and V that say they are on device cpu:`device`."""
    kind = type("Elsewhere", (torch.Tensor,), {"device": torch.device("cpu", device)})
    return [each.as_subclass(kind) for each in states]


def forward_on(devices: list[int], rows: int, tokens: int, cache: VmmCache, reference: DynamicCache) -> None:
    """A forward pass of a model whose layers are on these devices."""
    for index, device in enumerate(devices):
        kv = random_kv("cpu", rows, tokens)
        cache.update(*on(device, *kv), index)
        reference.update(*kv, index)


def places(cache: VmmCache) -> list[tuple[int | None, int]]:
    """Device, and layers, of each of the `kv_caches`."""
    return sorted((kv_cache.device.index, kv_cache.layout.num_layers) for kv_cache in cache.kv_caches)


DEVICE_MAPS = [[0, 0, 0, 1, 1, 1], [1, 1, 0, 0, 2, 2], [0, 1, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5], [0, 1, 1, 1, 1, 0]]


@pytest.mark.usefixtures("_devices_by_name")
@pytest.mark.parametrize("devices", DEVICE_MAPS)
def test_each_device_has_rows_of_its_own(mixed_config: PreTrainedConfig, devices: list[int]) -> None:
    config = copy.deepcopy(mixed_config)
    config.num_hidden_layers, config.layer_types = 6, ["sliding_attention", "full_attention"] * 3
    cache, reference = vmm_cache(config, "cpu"), DynamicCache(config=config)
    expected = sorted(
        (device, sum(devices[index] == device for index in range(kind, 6, 2)))
        for kind in range(2)
        for device in set(devices[kind::2])
    )
    forward_on(devices, 2, 20, cache, reference)
    for tokens in (1, 3):
        check_same_state(cache, reference)
        assert places(cache) == expected
        forward_on(devices, 2, tokens, cache, reference)
    for each in (cache, reference):
        each.reorder_cache(torch.tensor([1, 0]))
        each.batch_repeat_interleave(2)
        each.batch_select_indices(torch.tensor([3, 0, 1]))
    twin = copy.deepcopy(cache)
    assert places(twin) == expected
    for each in (cache, twin):
        check_same_state(each, reference)
    forward_on(devices, 3, 1, twin, copy.deepcopy(reference))
    check_same_state(cache, reference)
    made = [kv_cache.stats().pages_created for kv_cache in cache.kv_caches]
    for moved, stays in ((devices, True), ([1] * 6, False), (devices, False)):  # between two batches, and back
        cache.reset()
        reference = DynamicCache(config=config)
        forward_on(moved, 3, 20, cache, reference)
        check_same_state(cache, reference)
        assert {kv_cache.device.index for kv_cache in cache.kv_caches} == set(moved)
        assert not stays or [kv_cache.stats().pages_created for kv_cache in cache.kv_caches] == made
    for kv_cache in cache.kv_caches:
        kv_cache.check()


@pytest.mark.usefixtures("_devices_by_name")
def test_tokens_do_not_move_between_devices(pair: Pair, mixed_config: PreTrainedConfig) -> None:
    forward_on([0, 0, 1, 1], 2, 9, *pair)
    k, v = random_kv("cpu", 2, 1)
    for kv, layer in ((on(1, k, v), 0), (on(0, k, v), 2), ((*on(0, k), *on(1, v)), 0)):
        with pytest.raises(vmmkv.DeviceError, match="cpu:1"):
            pair[0].update(*kv, layer)
    check_same_state(*pair)
    compiled = vmm_cache(mixed_config, "cpu", compile=True)
    compiled.update(*on(0, k, v), 0)
    with pytest.raises(vmmkv.DeviceError, match=r"layer 2 on cpu:1.*cpu:0.*compile=True"):
        compiled.update(*on(1, k, v), 2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "qwen3-next"])
def test_a_model_on_two_gpus(name: str) -> None:
    """The second half of the layers is on another device, and all that they are given is brought there."""
    model = copy.deepcopy(tiny_model(name, "sdpa", "cpu")).to("cuda:0")
    reference = [
        model.generate(random_tokens(model, 3, 12), do_sample=False, **LENGTHS),
        model.generate(random_tokens(model, 3, 12), do_sample=False, num_beams=3, **LENGTHS),
    ]

    def bring(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        device = next(module.parameters()).device

        def move(value: Any) -> Any:
            return value.to(device) if isinstance(value, torch.Tensor) else value

        return torch.utils._pytree.tree_map(move, (args, kwargs))

    for index, layer in enumerate(model.model.layers):
        layer.to(f"cuda:{index // 2}").register_forward_pre_hook(bring, with_kwargs=True)
    model.model.norm.register_forward_pre_hook(bring, with_kwargs=True)
    cache = vmm_cache(model.config, "cuda")
    for expected, mode in zip(reference, ({}, {"num_beams": 3}), strict=True):
        tokens = random_tokens(model, 3, 12)
        output = model.generate(tokens, past_key_values=cache, do_sample=False, **mode, **LENGTHS)
        assert torch.equal(output, expected)
        assert {kv_cache.device.index for kv_cache in cache.kv_caches} == {0, 1}
        cache.reset()
