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
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
GPT_2 = {"model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024}
GEMMA_3_27B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 27},
}
# The class's head_dim is 256, and not hidden_size / num_attention_heads.
GEMMA_3_12B = {
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 3840,
        "model_type": "gemma3_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
    },
}
GEMMA_4 = {
    "model_type": "gemma4_text",
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_size": 1536,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 2,
}
DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "model_type": "deepseek_v3",
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}
FALCON_7B = {
    "hidden_size": 4544,
    "model_type": "falcon",
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "torch_dtype": "bfloat16",
}
FALCON_40B = FALCON_7B | {
    "hidden_size": 8192,
    "new_decoder_architecture": True,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_kv_heads": 8,
}
LFM2_350M = {
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 1024,
    "model_type": "lfm2",
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
}
LLAMA_3_2_VISION = {
    "model_type": "mllama",
    "text_config": {
        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
        "hidden_size": 4096,
        "model_type": "mllama_text_model",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
    },
}
LLAMA_4_SCOUT = {
    "model_type": "llama4",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5120,
        "model_type": "llama4_text",
        "num_attention_heads": 40,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
    },
}
LONGCAT_FLASH = {
    "hidden_size": 6144,
    "kv_lora_rank": 512,
    "model_type": "longcat_flash",
    "num_attention_heads": 64,
    "num_layers": 28,
    "qk_rope_head_dim": 64,
}
MINIMAX_M2_5 = {
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_size": 3072,
    "model_type": "minimax_m2",
    "num_attention_heads": 48,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
}
GPT_OSS_20B = {
    "head_dim": 64,
    "hidden_size": 2880,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "sliding_window": 128,
}
QWEN3_NEXT = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "model_type": "qwen3_next",
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
}
ZAMBA2_2_7B = {
    "attention_head_dim": 160,
    "hidden_size": 2560,
    "layers_block_type": [("mamba", "hybrid")[layer % 6 == 5] for layer in range(54)],
    "model_type": "zamba2",
    "num_attention_heads": 32,
    "num_hidden_layers": 54,
    "num_key_value_heads": 32,
}


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        pytest.param(LLAMA_3_1_8B, 128 * 1024, id="llama-3.1-8b"),
        pytest.param(GPT_2, 12 * 2 * 768 * 2, id="gpt-2"),
        pytest.param(GEMMA_3_27B, 62 * 2 * 2048 * 2, id="gemma-3-27b"),
        pytest.param(GEMMA_3_12B, 48 * 2 * 8 * 256 * 2, id="gemma-3-12b"),
        # The last two layers read the K and V of earlier ones; two of the others have wide heads.
        pytest.param(GEMMA_4, (2 * 256 + 2 * 512) * 2 * 2, id="gemma-4"),
        pytest.param(DEEPSEEK_V3, 61 * (512 + 64) * 2, id="deepseek-v3"),
        pytest.param(FALCON_7B, 32 * 2 * 64 * 2, id="falcon-7b"),
        # transformers repeats the 8 KV heads before it caches them.
        pytest.param(FALCON_40B, 60 * 2 * 8192 * 2, id="falcon-40b"),
        pytest.param(LFM2_350M, 6 * 2 * 8 * 64 * 2, id="lfm2-350m"),
        pytest.param(LLAMA_3_2_VISION, 32 * 2 * 8 * 128 * 2, id="llama-3.2-vision"),
        pytest.param(LLAMA_4_SCOUT, 48 * 2 * 8 * 128 * 2, id="llama-4"),
        pytest.param(LONGCAT_FLASH, 28 * 2 * (512 + 64) * 2, id="longcat-flash"),  # two attentions in a layer
        pytest.param(MINIMAX_M2_5, 62 * 2 * 8 * 128 * 2, id="minimax-m2.5"),
        pytest.param(GPT_OSS_20B, 24 * 2 * 8 * 64 * 2, id="gpt-oss-20b"),
        pytest.param(QWEN3_NEXT, 12 * 2 * 2 * 256 * 2, id="qwen3-next"),
        pytest.param(ZAMBA2_2_7B, 9 * 2 * 32 * 160 * 2, id="zamba2-2.7b"),
    ],
)
def test_bytes_per_token(config, token_bytes):
    layout = layout_from_config(config)
    assert layout.token_bytes == token_bytes
    assert layout.dtype is torch.bfloat16


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"model_type": "baichuan_m1", "num_swa_key_value_heads": 8}, id="baichuan-m1"),
        pytest.param({"model_type": "hunyuan", "use_cla": True, "cla_share_factor": 2}, id="hunyuan-large"),
        pytest.param({"model_type": "kimi_k3", "linear_attn_config": {"kda_layers": [1, 2, 3]}}, id="kimi-k3"),
        pytest.param({"model_type": "minimax_m1", "attn_type_list": [0, 0, 0, 1] * 8}, id="minimax-m1"),
        pytest.param({"model_type": "step3p5", "num_attention_groups": 8}, id="step-3.5"),
        pytest.param({"model_type": "some_wrapper", "text_config": {"model_type": "llama"}}, id="some_wrapper"),
        pytest.param({"model_type": None}, id="None"),
    ],
)
def test_types_that_transformers_does_not_have_are_refused_by_name(config):
    sizes = {key: value for key, value in LLAMA_3_1_8B.items() if key not in config}
    with pytest.raises(vmmkv.LayoutError, match=f"model_type={config['model_type']!r}: transformers does not"):
        layout_from_config(sizes | config)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        pytest.param({"model_type": "deepseek_v4", "num_hidden_layers": 4}, "more than K and V", id="deepseek-v4"),
        pytest.param(DEEPSEEK_V3 | {"model_type": "deepseek_v32"}, "more than K and V", id="deepseek-v3.2"),
        pytest.param(DEEPSEEK_V3 | {"model_type": "glm_moe_dsa"}, "more than K and V", id="glm-5"),
        pytest.param({"model_type": "jetmoe", "kv_channels": 128}, "does not run without weights", id="jetmoe"),
        pytest.param({"model_type": "mamba", "num_hidden_layers": 2}, "keeps no K and V", id="mamba"),
        pytest.param({"model_type": "t5"}, "encoder", id="t5"),
        pytest.param(LLAMA_3_1_8B | {"num_attention_heads": 31}, "does not run without weights", id="odd"),
    ],
)
def test_what_is_no_k_and_v_of_each_token_is_refused_by_name(config, reason):
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


def test_latents_are_one_head_with_a_narrower_v():
    layout = layout_from_config(DEEPSEEK_V3)
    assert (layout.num_kv_heads, layout.head_dim, layout.v_head_dim) == (1, 512, 64)


def test_null_sizes_are_as_good_as_none():
    without = {key: value for key, value in LLAMA_3_1_8B.items() if key != "num_key_value_heads"}
    layout = layout_from_config(without)
    assert (layout.num_kv_heads, layout.head_dim) == (32, 128)
    assert layout_from_config(without | {"num_key_value_heads": None, "head_dim": None}) == layout


def test_dtype_is_the_callers_then_the_text_configs_then_the_configs():
    assert layout_from_config(LLAMA_3_1_8B, dtype=torch.float8_e4m3fn).dtype is torch.float8_e4m3fn
    assert layout_from_config(LLAMA_3_1_8B | {"dtype": "float16"}).dtype is torch.float16
    text = GEMMA_3_27B["text_config"] | {"dtype": "float32"}
    assert layout_from_config(GEMMA_3_27B | {"text_config": text}).dtype is torch.float32
    with pytest.raises(vmmkv.DtypeError, match="float64"):
        layout_from_config(LLAMA_3_1_8B | {"torch_dtype": "float64"})


def test_layers_per_range_reaches_the_layout():
    assert len(layout_from_config(LLAMA_3_1_8B, layers_per_range=8).record_bytes) == 4
