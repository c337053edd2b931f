"""The layouts of well-known models, against sizes worked out by hand and what transformers caches."""

from __future__ import annotations

import sys

import pytest
import torch
import transformers
from conftest import few
from parity.sizes import REFUSED, UNCOUNTED, check_size
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import vmmkv
from vmmkv.model_config import layout_from_config

LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA_3_27B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {
        "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
        "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16, "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 27},
}  # fmt: skip
GEMMA_4 = {
    "model_type": "gemma4_text", "global_head_dim": 512, "head_dim": 256, "hidden_size": 1536, "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3, "num_attention_heads": 8, "num_key_value_heads": 1,
    "num_kv_shared_layers": 2,
}  # fmt: skip
DEEPSEEK_V3 = {
    "hidden_size": 7168, "kv_lora_rank": 512, "model_type": "deepseek_v3", "num_attention_heads": 128,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "torch_dtype": "bfloat16", "v_head_dim": 128,
}  # fmt: skip
FALCON_40B = {
    "hidden_size": 8192, "model_type": "falcon", "multi_query": True, "new_decoder_architecture": True,
    "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8,
}  # fmt: skip
MLLAMA = {"model_type": "mllama", "text_config": {
    "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38], "hidden_size": 4096, "model_type": "mllama_text_model",
    "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
}}  # fmt: skip

SIZES = {
    "llama-3.1-8b": (LLAMA_3_1_8B, 128 * 1024),
    "gemma-3-27b": (GEMMA_3_27B, 62 * 2 * 2048 * 2),
    # The last two layers read the K and V of earlier ones; two of the others have wide heads.
    "gemma-4": (GEMMA_4, (2 * 256 + 2 * 512) * 2 * 2),
    "deepseek-v3": (DEEPSEEK_V3, 61 * (512 + 64) * 2),
    "falcon-40b": (FALCON_40B, 60 * 2 * 8192 * 2),  # transformers repeats the 8 KV heads before it caches them
    "llama-3.2-vision": (MLLAMA, 32 * 2 * 8 * 128 * 2),
}
"""Configs, and bytes of a token worked out by hand."""


@pytest.mark.parametrize("name", SIZES)
def test_bytes_per_token(name):
    config, token_bytes = SIZES[name]
    layout = layout_from_config(config)
    assert layout.token_bytes == token_bytes
    assert layout.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "step3p5", "num_attention_groups": 8}, "transformers does not"),
        ({"model_type": "some_wrapper", "text_config": {"model_type": "llama"}}, "transformers does not"),
        ({"model_type": None}, "transformers does not"),
        (DEEPSEEK_V3 | {"model_type": "deepseek_v32"}, "more than K and V"),
        ({"model_type": "jetmoe", "kv_channels": 128}, "does not run without weights"),
        ({"model_type": "mamba", "num_hidden_layers": 2}, "keeps no K and V"),
        ({"model_type": "t5"}, "encoder"),
        ({"num_attention_heads": 31}, "does not run without weights"),
    ],
)
def test_what_is_not_known_or_no_k_and_v_of_each_token_is_refused_by_name(config, reason):
    config = {key: value for key, value in LLAMA_3_1_8B.items() if key != "num_key_value_heads"} | config
    with pytest.raises(vmmkv.LayoutError, match=f"{config['model_type']}.*{reason}"):
        layout_from_config(config)


@pytest.mark.parametrize("kind", few(8, "kinds", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))))
def test_a_layout_has_the_bytes_by_which_a_cache_grows_or_is_refused(kind):
    expected = "refused" if kind in REFUSED else "none" if kind in UNCOUNTED else "same"
    outcome = check_size(kind)
    assert outcome.verdict == expected, outcome


def test_a_size_that_differs_is_noticed(monkeypatch):
    monkeypatch.setattr("parity.sizes.layout_from_config", lambda *_, **__: vmmkv.KVLayout(1, 1, 64))
    assert check_size("LlamaForCausalLM").verdict == "differs"


def test_asking_a_model_changes_nothing():
    config = transformers.Qwen3MoeConfig(hidden_size=128, num_hidden_layers=2)
    before, random, dtype = config.to_dict(), torch.get_rng_state(), torch.get_default_dtype()
    layout_from_config(config)
    assert config.to_dict() == before
    assert config._attn_implementation is None
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_default_dtype() is dtype


@pytest.fixture
def without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "vmmkv.integrations.cached_states", raising=False)


@pytest.mark.usefixtures("without_transformers")
def test_a_config_without_transformers_is_refused():
    with pytest.raises(vmmkv.LayoutError, match=r"pip install \"vmmkv\[hf\]"):
        layout_from_config(LLAMA_3_1_8B)


def test_null_sizes_are_as_good_as_none():
    without = {key: value for key, value in LLAMA_3_1_8B.items() if key != "num_key_value_heads"}
    layout = layout_from_config(without, layers_per_range=8)
    assert (layout.num_kv_heads, layout.head_dim, len(layout.record_bytes)) == (32, 128, 4)
    assert layout_from_config(without | {"num_key_value_heads": None, "head_dim": None}, layers_per_range=8) == layout


def test_dtype_is_the_callers_then_the_text_configs_then_the_configs():
    assert layout_from_config(LLAMA_3_1_8B, dtype=torch.float8_e4m3fn).dtype is torch.float8_e4m3fn
    assert layout_from_config(LLAMA_3_1_8B | {"dtype": "float16"}).dtype is torch.float16
    text = GEMMA_3_27B["text_config"] | {"dtype": "float32"}
    assert layout_from_config(GEMMA_3_27B | {"text_config": text}).dtype is torch.float32
    with pytest.raises(vmmkv.DtypeError, match="float64"):
        layout_from_config(LLAMA_3_1_8B | {"torch_dtype": "float64"})
