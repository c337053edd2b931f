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
from generation import LENGTHS, PAGE_SIZE, caches, random_tokens, vmm_cache
from tiny_models import DECODER, MODELS, VOCABULARY, WINDOW, tiny_model
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import vmmkv
from vmmkv.driver.driver import open_driver
from vmmkv.integrations.batch import Batch
from vmmkv.integrations.layers import VmmLayer
from vmmkv.integrations.transformers import VmmCache

HYBRIDS = {
    "falcon-h1": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {
            **DECODER,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_chunk_size": 8,
        },
    ),
    "zamba2": (
        "Zamba2ForCausalLM",
        "Zamba2Config",
        {
            **DECODER,
            "num_key_value_heads": 8,
            "mamba_d_state": 16,
            "use_mamba_kernels": False,
            "chunk_size": 8,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
        },
    ),
    "inkling": (
        "InklingForCausalLM",
        "InklingTextConfig",
        {
            **DECODER,
            "head_dim": 8,
            "swa_head_dim": 8,
            "swa_num_attention_heads": 8,
            "swa_num_key_value_heads": 4,
            "sliding_window_size": WINDOW,
            "d_rel": 4,
            "rel_extent": 16,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["hybrid", "hybrid_sliding"] * 2,
        },
    ),
}
"""Their layers keep K and V beside the states of linear attention."""


def make_model(model_class: str, config_class: str, sizes: dict[str, Any], attention: str = "sdpa") -> PreTrainedModel:
    config = getattr(transformers, config_class)
    modeling = importlib.import_module(config.__module__.replace("configuration", "modeling"))
    seed_alone(0)
    return getattr(modeling, model_class)._from_config(config(**sizes), attn_implementation=attention).eval()


def check_same_tokens(model: PreTrainedModel, made: list[Cache], rows: int = 3, **kwargs: Any) -> None:
    """Generates with each of the caches, and compares sequences and logits."""
    tokens = random_tokens(model, rows, 12)
    kwargs = {"attention_mask": torch.ones_like(tokens), "do_sample": False, **LENGTHS, **kwargs}
    kwargs |= {"return_dict_in_generate": True, "output_logits": True}
    expected, *outputs = [model.generate(tokens, past_key_values=cache, **kwargs) for cache in made]
    for output in outputs:
        assert torch.equal(output.sequences, expected.sequences)
        for logits, reference in zip(output.logits, expected.logits, strict=True):
            torch.testing.assert_close(logits, reference, atol=1e-4, rtol=1e-4)


@pytest.fixture
def config() -> PreTrainedConfig:
    """Windows and full attention in turn, two layers of each."""
    return tiny_model("gemma3", "vmmkv", "cpu").config


def random_kv(rows: int, tokens: int, heads: int = 2, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return torch.randn(2, rows, heads, tokens, 16, dtype=dtype).unbind(0)


def forward(rows: int, tokens: int, *caches: Cache) -> None:
    """What a forward pass does to caches."""
    for index in range(len(caches[0])):
        kv = random_kv(rows, tokens)
        for cache in caches:
            cache.update(*kv, index)


def check_same_state(cache: Cache, reference: Cache) -> None:
    assert cache.get_seq_length() == reference.get_seq_length()
    for states, expected in zip(cache, reference, strict=True):
        assert all(map(torch.equal, states[:2], expected[:2]))


# ---------------------------------------------------------------------- layers that keep more than K and V


@pytest.mark.parametrize(("name", "num_beams"), each_with_few(1, HYBRIDS, [1, 3]))
def test_hybrid_layers(name: str, num_beams: int, device: str) -> None:
    model = make_model(*HYBRIDS[name]).to(device)
    cache = vmm_cache(model.config, device)
    with warnings.catch_warnings():
        warnings.simplefilter("error", vmmkv.KeptLayersWarning)
        check_same_tokens(model, [DynamicCache(config=model.config), cache], num_beams=num_beams)
    kept = [layer for layer in DynamicCache(config=model.config).layers if isinstance(layer, DynamicLayer)]
    assert sum(isinstance(layer, VmmLayer) for layer in cache.layers) == len(kept) > 0
    assert all(kv_cache.stats().tokens for kv_cache in cache.kv_caches)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_layers_between_generations(name: str) -> None:
    """A copy goes on as the original does; a reset makes room for another number of sequences."""
    model = make_model(*HYBRIDS[name])
    cache, reference = vmm_cache(model.config, "cpu"), DynamicCache(config=model.config)
    prompt, more = random_tokens(model, 2, 20), random_tokens(model, 2, 3, seed=5)
    with torch.no_grad():
        for each in (cache, reference):
            model(prompt, past_key_values=each)
        twins = [copy.deepcopy(cache), cache]
        expected = model(more, past_key_values=reference).logits
        for twin in twins:
            torch.testing.assert_close(model(more, past_key_values=twin).logits, expected, atol=1e-4, rtol=1e-4)
    cache.reset()
    check_same_tokens(model, [DynamicCache(config=model.config), cache])


@pytest.mark.parametrize("name", ["qwen3-next", "falcon-h1", "zamba2"])
def test_sequences_are_selected_with_all_that_layers_keep(name: str) -> None:
    """Against the same sequences in another order from the start."""
    model = tiny_model(name, "sdpa", "cpu") if name in MODELS else make_model(*HYBRIDS[name])
    prompt, more = random_tokens(model, 3, 12), random_tokens(model, 4, 2, seed=5)
    order = torch.tensor([2, 0, 2, 1])
    cache, expected = vmm_cache(model.config, "cpu"), vmm_cache(model.config, "cpu")
    with torch.no_grad():
        model(prompt, past_key_values=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(2 * order)
        model(prompt[order], past_key_values=expected)
        logits = [model(more, past_key_values=each).logits for each in (cache, expected)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


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
    model = (
        make_model("SmolLM3ForCausalLM", "SmolLM3Config", sizes, attention)
        if name == "smollm3"
        else tiny_model(name, attention, "cpu")
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = caches(model)
        for _ in range(2):
            check_same_tokens(model, made)
            for cache in made:
                cache.reset()
            made[0] = DynamicCache(config=model.config)  # 5.17 zeroes it, but keeps its length


@pytest.mark.parametrize(
    ("k_dtype", "v_dtype"), [("float32", "bfloat16"), ("float16", "bfloat16"), ("int8", "float16")]
)
def test_two_dtypes_are_kept_exactly(config: PreTrainedConfig, k_dtype: str, v_dtype: str) -> None:
    cache = vmm_cache(config, "cpu")
    k, v = (states * 50 for states in random_kv(2, 30))
    k, v = k.to(getattr(torch, k_dtype)), v.to(getattr(torch, v_dtype))
    for tokens in (slice(0, 20), slice(20, 21), slice(21, 30)):
        for index in range(len(cache)):
            kept = cache.update(k[:, :, tokens], v[:, :, tokens], index)
    first = 30 - kept[0].shape[2]
    assert torch.equal(kept[0].double(), k[:, :, first:].double())
    assert torch.equal(kept[1].double(), v[:, :, first:].double())
    with pytest.raises(vmmkv.DtypeError, match="no dtype that holds"):
        cache.update(k.to(torch.float8_e5m2), v, 1)


def test_another_dtype_after_a_reset(config: PreTrainedConfig) -> None:
    cache = vmm_cache(config, "cpu")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for index in range(len(cache)):
            k, v = random_kv(2, 9, dtype=dtype)
            assert cache.update(k, v, index)[0].dtype == dtype
            assert cache.layers[index].dtype == dtype
        cache.reset()


# ---------------------------------------------------------------------- making a cache


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((None,), {}, vmmkv.ArgumentError, r"max_seq_len=None.*VmmCache\(model.config, max_seq_len\)"),
        (("4096",), {}, vmmkv.ArgumentError, "max_seq_len='4096'.*whole number"),
        ((4096.0,), {}, vmmkv.ArgumentError, "max_seq_len=4096.0"),
        ((True,), {}, vmmkv.ArgumentError, "max_seq_len=True.*whole number"),
        ((-5,), {}, vmmkv.LayoutError, "max_seq_len=-5"),
        ((0,), {}, vmmkv.LayoutError, "max_seq_len=0"),
        ((100,), {"max_batch_size": 0}, vmmkv.LayoutError, "max_batch_size=0"),
        ((100,), {"max_batch_size": None}, vmmkv.ArgumentError, "max_batch_size=None"),
        ((100,), {"page_size": "2MiB"}, vmmkv.ArgumentError, "page_size='2MiB'"),
        ((100,), {"page_size": -1}, vmmkv.LayoutError, "page_size=-1"),
        ((100,), {"max_bytes": "a lot"}, vmmkv.BudgetError, "a lot"),
        ((100,), {"offloading": True}, vmmkv.UnsupportedError, "DynamicCache.*offloading=True"),
    ],
)
def test_wrong_arguments_are_refused_at_once(
    config: PreTrainedConfig, arguments: tuple[Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        VmmCache(config, *arguments, **options)


def test_numbers_of_other_types(config: PreTrainedConfig) -> None:
    cache, reference = VmmCache(config, np.int64(200), max_batch_size=torch.tensor(4)), DynamicCache(config=config)
    forward(2, 9, cache, reference)
    check_same_state(cache, reference)


def test_caches_that_others_make_of_the_same_type_are_refused(config: PreTrainedConfig) -> None:
    cache = vmm_cache(config, "cpu")
    forward(2, 9, cache)
    for arguments, options, message in (
        ((4096, config), {}, "got a int as config"),  # swapped
        ((tuple(cache),), {}, "got a tuple as config.*RAG"),  # RAG, for beams
        ((map(tuple, zip(cache, cache)),), {}, "got a map as config.*DataParallel"),
        ((), {"config": config, "offloading": False}, "max_seq_len=None.*T5Gemma"),
    ):
        with pytest.raises(vmmkv.ArgumentError, match=message):
            type(cache)(*arguments, **options)


def test_t5gemma_makes_its_cross_attention_cache_anew() -> None:
    side = {
        **{name: size for name, size in DECODER.items() if name != "max_position_embeddings"},
        "head_dim": 8,
        "num_hidden_layers": 2,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
    }
    sizes = {"encoder": dict(side), "decoder": dict(side), "vocab_size": VOCABULARY}
    model = make_model("T5GemmaForConditionalGeneration", "T5GemmaConfig", sizes, "eager")
    made = [
        EncoderDecoderCache(each, DynamicCache())
        for each in (DynamicCache(config=model.config), vmm_cache(model.config, "cpu"))
    ]
    check_same_tokens(model, made, decoder_start_token_id=2)
    both = EncoderDecoderCache(vmm_cache(model.config, "cpu"), vmm_cache(model.config, "cpu"))
    with pytest.raises(vmmkv.ArgumentError, match="T5Gemma"):
        check_same_tokens(model, [both], decoder_start_token_id=2)


def test_k_and_v_as_data_parallel_passes_them_on(config: PreTrainedConfig) -> None:
    """The windows are told as well, or the layers would be taken for full attention."""
    cache, reference = vmm_cache(config, "cpu"), DynamicCache(config=config)
    forward(2, 5, cache, reference)
    copies = [DynamicCache(iter(each)) for each in (cache, reference)]
    assert [type(layer) for layer in copies[0].layers] == [type(layer) for layer in copies[1].layers]
    forward(2, 9, *copies)
    check_same_state(*copies)


# ---------------------------------------------------------------------- the surface


def public(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


@pytest.mark.parametrize("theirs", [DynamicLayer, DynamicSlidingWindowLayer])
def test_nothing_that_deals_with_k_and_v_is_inherited(theirs: type) -> None:
    """transformers' own would treat them as tensors that can be replaced."""
    inherited = {
        "supports_early_init",  # a flag
        "get_max_cache_shape",  # 5.17's name for get_max_length, which it calls
        "is_sliding",  # set for each layer
    }
    assert public(theirs) - {*vars(VmmLayer)} - inherited == set()


def test_attributes_are_those_of_a_dynamic_cache(config: PreTrainedConfig) -> None:
    cache, reference = vmm_cache(config, "cpu"), DynamicCache(config=config)
    for tokens in (0, 5, 9):
        if tokens:
            forward(2, tokens, cache, reference)
        assert public(reference) - public(cache) == set()
        for name in public(reference) - {"layers", "is_initialized", "max_cache_len"}:  # 5.17's name for max_seq_len
            if not callable(value := getattr(reference, name)):
                assert getattr(cache, name) == value, name
        for layer, expected in zip(cache.layers, reference.layers, strict=True):
            assert public(expected) - public(layer) == set()
            for name in public(expected) - {"keys", "values", "is_initialized"}:
                if not callable(value := getattr(expected, name)):
                    assert getattr(layer, name) == value, name
        assert cache.is_initialized == bool(tokens)
        assert len(cache) == len(reference)
        for states, others in zip(cache, reference, strict=True):
            assert (states[2] is None) == (others[2] is None)
            assert states[2] is None or states[2] == others[2]
    with pytest.raises(TypeError, match="not subscriptable"):
        cache[0]


def test_methods_take_what_those_of_a_dynamic_cache_take(config: PreTrainedConfig) -> None:
    cache, reference = vmm_cache(config, "cpu"), DynamicCache(config=config)
    for ours, theirs in ((cache, reference), *zip(cache.layers, reference.layers, strict=True)):
        for name in public(theirs):
            if callable(getattr(theirs, name)) and name not in (
                "layer_class_to_replicate",
                "batch_repeat_interleave",
                "batch_select_indices",
            ):
                parameters = inspect.signature(getattr(theirs, name)).parameters
                assert list(inspect.signature(getattr(ours, name)).parameters) == list(parameters), name


def test_a_shallow_copy_is_an_alias(config: PreTrainedConfig) -> None:
    """As of a `DynamicCache`: the layers are shared."""
    made = vmm_cache(config, "cpu"), DynamicCache(config=config)
    aliases = [copy.copy(each) for each in made]
    forward(2, 9, *aliases)
    forward(2, 1, *made)
    check_same_state(*made)
    check_same_state(*aliases)
    aliases[0].reset()
    assert made[0].get_seq_length() == 0


def test_assignments_are_refused(config: PreTrainedConfig) -> None:
    cache, reference = vmm_cache(config, "cpu"), DynamicCache(config=config)
    forward(2, 9, cache, reference)
    for each in (cache, reference):
        each.layers[1].values.mul_(3)
    with pytest.raises(AttributeError):
        cache.layers[1].keys = cache.layers[1].keys * 2
    check_same_state(cache, reference)


def test_one_layer_is_not_asked_for_other_sequences(config: PreTrainedConfig) -> None:
    cache, order = vmm_cache(config, "cpu"), torch.tensor([1, 0])
    cache.layers[0].reorder_cache(order)
    forward(2, 9, cache)
    for method in ("reorder_cache", "batch_repeat_interleave", "batch_select_indices"):
        with pytest.raises(vmmkv.UnsupportedError, match="VmmCache"):
            getattr(cache.layers[0], method)(order)


def test_offloading_is_refused(config: PreTrainedConfig) -> None:
    cache = vmm_cache(config, "cpu")
    forward(2, 9, cache)
    for layer in cache.layers:
        for method in (layer.offload, layer.prefetch):
            with pytest.raises(vmmkv.UnsupportedError, match=r"DynamicCache\(offloading=True\)"):
                method()


# ---------------------------------------------------------------------- what is written


def test_what_cannot_be_written_is_named(config: PreTrainedConfig) -> None:
    cache, reference = vmm_cache(config, "cpu"), DynamicCache(config=config)
    k, v = random_kv(2, 1)
    refused = [
        ((k, v, 99), IndexError, ""),
        ((k, v, "0"), TypeError, ""),
        ((k, v.int(), 0), vmmkv.DtypeError, "K as torch.float32 and V as torch.int32"),
        ((k.numpy(), v, 3), vmmkv.ShapeError, "K ndarray"),
        ((k, None, 3), (vmmkv.ShapeError, AttributeError), "NoneType"),
        ((k[0], v[0], 3), vmmkv.ShapeError, r"K \[2, 1, 16\].*layer 3.*batch_size"),
        ((k[0, 0, 0], v[0, 0, 0], 2), vmmkv.ShapeError, r"K \[16\].*layer 2"),
        ((k, v[:1], 2), vmmkv.ShapeError, r"V \[1, 2, 1, 16\] for layer 2"),
        ((*random_kv(2, 20), 99), IndexError, ""),
        ((random_kv(2, 20)[0], random_kv(2, 19)[0], 0), vmmkv.ShapeError, r"\[2, 2, 20, 16\] and V \[2, 2, 19, 16\]"),
    ]
    for _ in range(2):
        for arguments, error, message in refused:
            with pytest.raises(error, match=message):
                cache.update(*arguments)
        forward(2, 9, cache, reference)
        check_same_state(cache, reference)
    with pytest.raises(vmmkv.DtypeError, match=r"torch.int64.*cache holds torch.float32"):
        cache.update(k.long(), v.long(), 0)
    with pytest.raises(vmmkv.ArgumentError, match=r"-1\.5 tokens.*whole number"):
        cache.crop(-1.5)
    check_same_state(cache, reference)


@pytest.mark.parametrize("prompt", [5, 290], ids=["tokens that stay", "a window that moves"])
def test_too_many_tokens_are_counted_as_the_user_counts(config: PreTrainedConfig, prompt: int) -> None:
    """Rows of layers with a window begin with the first token that these keep."""
    cache = vmm_cache(config, "cpu", max_seq_len=300)
    forward(1, prompt, cache)
    for layer in range(len(cache)):
        with pytest.raises(vmmkv.SequenceTooLongError, match=r"asked for 301 tokens.*max_seq_len=300"):
            cache.update(*random_kv(1, 301 - prompt), layer)
    forward(1, 300 - prompt, cache)
    with pytest.raises(vmmkv.SequenceTooLongError, match="asked for 301 tokens"):
        vmm_cache(config, "cpu", max_seq_len=300).update(*random_kv(1, 301), 0)


# ---------------------------------------------------------------------- which sequences


SELECTIONS: dict[str, Any] = {
    "a list": [2, 0],
    "numpy": np.array([1, 1, 2, 0]),
    "a mask": torch.tensor([True, False, True]),
    "a list of bools": [False, True, False],
    "negative": [-1, 0],
    "int32": torch.tensor([2, 2], dtype=torch.int32),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_selections(config: PreTrainedConfig, name: str) -> None:
    cache, reference = vmm_cache(config, "cpu"), DynamicCache(config=config)
    forward(3, 10, cache, reference)
    for each in (cache, reference):
        each.batch_select_indices(SELECTIONS[name])
    check_same_state(cache, reference)


@pytest.mark.parametrize("nothing", [[], torch.tensor([]), torch.tensor([], dtype=torch.long), torch.zeros(3).bool()])
def test_of_no_sequences_nothing_is_left(config: PreTrainedConfig, nothing: Any) -> None:
    cache, reference = vmm_cache(config, "cpu"), DynamicCache(config=config)
    cache.batch_select_indices(nothing)
    forward(3, 10, cache)
    cache.batch_select_indices(nothing)
    assert cache.get_seq_length() == 0
    assert [kv_cache.stats().tokens for kv_cache in cache.kv_caches] == [0, 0]
    forward(2, 9, cache, reference)
    check_same_state(cache, reference)


def test_selections_of_sequences_that_are_not_there(config: PreTrainedConfig) -> None:
    cache, reference = vmm_cache(config, "cpu", max_batch_size=8), DynamicCache(config=config)
    forward(3, 10, cache, reference)
    for call, error, message in (
        (lambda: cache.batch_select_indices([0, 3]), vmmkv.OutOfRangeError, r"sequences \[0, 3\]; the cache holds 3"),
        (lambda: cache.batch_select_indices(torch.ones(4).bool()), vmmkv.OutOfRangeError, "holds 3"),
        (lambda: cache.batch_select_indices([0.5]), vmmkv.OutOfRangeError, "holds 3"),
        (lambda: cache.batch_select_indices("all"), vmmkv.OutOfRangeError, "holds 3"),
        (lambda: cache.batch_select_indices([[0, 1]]), vmmkv.ShapeError, "no list of them"),
        (lambda: cache.batch_select_indices(1), vmmkv.ShapeError, "no list of them"),
        (lambda: cache.batch_select_indices([0] * 9), vmmkv.OutOfRowsError, "max_batch_size"),
        (lambda: cache.reorder_cache(torch.tensor([0, 1, 3])), vmmkv.OutOfRangeError, "holds 3"),
        (lambda: cache.reorder_cache(torch.tensor([0, 1, -1])), vmmkv.OutOfRangeError, "holds 3"),
        (lambda: cache.reorder_cache(torch.zeros(9).long()), vmmkv.OutOfRowsError, "max_batch_size"),
        (lambda: cache.batch_repeat_interleave(3), vmmkv.OutOfRowsError, "max_batch_size"),
        (lambda: cache.batch_repeat_interleave(-1), vmmkv.OutOfRangeError, "holds 3"),
    ):
        with pytest.raises(error, match=message):
            call()
        check_same_state(cache, reference)
    forward(3, 1, cache, reference)
    check_same_state(cache, reference)


def test_a_selection_that_finds_no_memory_changes_nothing(config: PreTrainedConfig) -> None:
    """There is room for more rows of the layer of full attention, and then none for those of layers with windows."""
    config = copy.deepcopy(config)
    config.layer_types = ["full_attention", *["sliding_attention"] * 3]
    config.sliding_window = 100
    cache, reference = vmm_cache(config, "cpu", max_bytes=33 * PAGE_SIZE["cpu"]), DynamicCache(config=config)
    forward(3, 30, cache, reference)
    with pytest.raises(vmmkv.OutOfPagesError):
        cache.batch_repeat_interleave(3)
    check_same_state(cache, reference)
    assert {kv_cache.stats().rows["live"] for kv_cache in cache.kv_caches} == {64}
    for kv_cache in cache.kv_caches:
        kv_cache.check()
    forward(3, 1, cache, reference)
    check_same_state(cache, reference)


def test_a_crop_that_one_layer_refuses_changes_none() -> None:
    """A layer of linear attention has not recorded what it would go back to."""
    model = tiny_model("qwen3-next", "sdpa", "cpu")
    config = copy.deepcopy(model.config)
    cache = vmm_cache(config, "cpu")
    with torch.no_grad():
        model(random_tokens(model, 2, 9), past_key_values=cache)
    cache.layers.reverse()  # full attention first
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-1)
    assert [layer.get_seq_length() for layer in cache.layers if isinstance(layer, VmmLayer)] == [9, 9]


@pytest.mark.simulator
def test_a_copy_of_a_compiled_cache_whose_window_has_moved(device: str) -> None:
    """Its tokens lie at their positions, and the pages before them are not there."""
    head_dim = 64 if device == "cpu" else 256  # for which there are kernels: then windows give pages back
    sizes = {**DECODER, "num_hidden_layers": 2, "head_dim": head_dim, "sliding_window": WINDOW}
    config = transformers.MistralConfig(**sizes, attn_implementation="vmmkv")
    cache = vmm_cache(config, device, max_seq_len=3000, compile=True)
    expected = [[], []]

    def forward(cache: VmmCache, tokens: int) -> list[torch.Tensor]:
        cache.get_mask_sizes(tokens, 0)
        made = []
        for layer in range(2):
            k, v = torch.randn(2, 1, 2, tokens, head_dim, device=device)
            made.append(cache.update(k, v, layer)[0])
            expected[layer] = [*expected[layer], k][-WINDOW - 10 :]
        return made

    forward(cache, 700)
    for _ in range(650):
        forward(cache, 1)
    twin = copy.deepcopy(cache)
    assert all(kv_cache.stats().pages["used"] < 100 for kv_cache in twin.kv_caches)
    for layer, whole in enumerate(forward(twin, 1)):
        recent = torch.cat(expected[layer], dim=2)[:, :, -WINDOW:]
        assert torch.equal(whole.states[:, :, 1351 - WINDOW : 1351], recent)


def test_caches_are_not_saved(config: PreTrainedConfig) -> None:
    for compile in (False, True):
        with pytest.raises(vmmkv.UnsupportedError, match="deepcopy"):
            pickle.dumps(vmm_cache(config, "cpu", compile=compile))


# ---------------------------------------------------------------------- several devices


@pytest.fixture
def _devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory under the name of any device that a test asks for: cpu:1 is as good as cuda:1 here."""

    def open_by_name(device: object, page_size: int | None) -> object:
        driver = open_driver("cpu", page_size)
        driver.device = torch.device(device)
        return driver

    open_drivers_with(monkeypatch, open_by_name)


def on(device: int, states: torch.Tensor) -> torch.Tensor:
    """K or V that say they are on device cpu:`device`."""
    kind = type("Elsewhere", (torch.Tensor,), {"device": torch.device("cpu", device)})
    return states.as_subclass(kind)


def forward_on(devices: list[int], rows: int, tokens: int, cache: VmmCache, reference: DynamicCache) -> None:
    """A forward pass of a model whose layers are on these devices."""
    for index, device in enumerate(devices):
        k, v = random_kv(rows, tokens)
        cache.update(on(device, k), on(device, v), index)
        reference.update(k, v, index)


def places(cache: VmmCache) -> list[tuple[int | None, int]]:
    """Device, and layers, of each of the `kv_caches`."""
    return sorted((kv_cache.device.index, kv_cache.layout.num_layers) for kv_cache in cache.kv_caches)


DEVICE_MAPS = [[0, 0, 0, 1, 1, 1], [1, 1, 0, 0, 2, 2], [0, 1, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5], [0, 1, 1, 1, 1, 0]]


@pytest.mark.usefixtures("_devices_by_name")
@pytest.mark.parametrize("devices", DEVICE_MAPS)
def test_each_device_has_rows_of_its_own(config: PreTrainedConfig, devices: list[int]) -> None:
    config = copy.deepcopy(config)
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
    cache.reset()
    made = [kv_cache.stats().pages_created for kv_cache in cache.kv_caches]
    reference = DynamicCache(config=config)
    forward_on(devices, 3, 20, cache, reference)
    check_same_state(cache, reference)
    assert [kv_cache.stats().pages_created for kv_cache in cache.kv_caches] == made
    for kv_cache in cache.kv_caches:
        kv_cache.check()


@pytest.mark.usefixtures("_devices_by_name")
def test_a_model_that_moves_between_two_batches(config: PreTrainedConfig) -> None:
    cache = vmm_cache(config, "cpu")
    for devices in ([0] * 4, [1] * 4, [1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0], [0] * 4):
        reference = DynamicCache(config=config)
        for tokens in (9, 1):
            forward_on(devices, 2, tokens, cache, reference)
        check_same_state(cache, reference)
        assert {kv_cache.device.index for kv_cache in cache.kv_caches} == set(devices)
        cache.reset()


@pytest.mark.usefixtures("_devices_by_name")
def test_a_move_that_finds_no_memory_changes_nothing(config: PreTrainedConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, reference = vmm_cache(config, "cpu"), DynamicCache(config=config)
    kv = random_kv(2, 9)
    for index in range(2):
        cache.update(*(on(0, states) for states in kv), index)
        reference.update(*kv, index)
    before = places(cache)

    def no_memory(*args: object) -> None:
        raise vmmkv.OutOfPagesError("none left", requested=1, available=0)

    with monkeypatch.context() as patch:
        patch.setattr(Batch, "copy", no_memory)
        with pytest.raises(vmmkv.OutOfPagesError):
            cache.update(*(on(1, states) for states in kv), 2)
    assert places(cache) == before
    for index in range(2, 4):
        cache.update(*(on(1, states) for states in kv), index)
        reference.update(*kv, index)
    check_same_state(cache, reference)
    assert places(cache) == [(0, 1), (0, 1), (1, 1), (1, 1)]


@pytest.mark.usefixtures("_devices_by_name")
def test_tokens_do_not_move_between_devices(config: PreTrainedConfig) -> None:
    cache, reference = vmm_cache(config, "cpu"), DynamicCache(config=config)
    forward_on([0, 0, 1, 1], 2, 9, cache, reference)
    k, v = random_kv(2, 1)
    for kv, layer in (((on(1, k), on(1, v)), 0), ((on(0, k), on(0, v)), 2), ((on(0, k), on(1, v)), 0)):
        with pytest.raises(vmmkv.DeviceError, match="cpu:1"):
            cache.update(*kv, layer)
    check_same_state(cache, reference)
    compiled = vmm_cache(config, "cpu", compile=True)
    compiled.update(on(0, k), on(0, v), 0)
    with pytest.raises(vmmkv.DeviceError, match=r"layer 2 on cpu:1.*cpu:0.*compile=True"):
        compiled.update(on(1, k), on(1, v), 2)


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
