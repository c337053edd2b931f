"""The layouts of well-known models, against sizes worked out by hand and what transformers caches."""

from __future__ import annotations

import pytest
import torch
import transformers

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


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        pytest.param(LLAMA_3_1_8B, 128 * 1024, id="llama-3.1-8b"),
        pytest.param(GPT_2, 12 * 2 * 768 * 2, id="gpt-2"),
        pytest.param(GEMMA_3_27B, 62 * 2 * 2048 * 2, id="gemma-3-27b"),
        pytest.param(DEEPSEEK_V3, 61 * (512 + 64) * 2, id="deepseek-v3"),
        pytest.param(FALCON_7B, 32 * 2 * 64 * 2, id="falcon-7b"),
        # transformers repeats the 8 KV heads before it caches them.
        pytest.param(FALCON_40B, 60 * 2 * 8192 * 2, id="falcon-40b"),
    ],
)
def test_bytes_per_token(config, token_bytes):
    layout = layout_from_config(config)
    assert layout.token_bytes == token_bytes
    assert layout.dtype is torch.bfloat16


def test_latents_are_one_head_with_a_narrower_v():
    layout = layout_from_config(DEEPSEEK_V3)
    assert (layout.num_kv_heads, layout.head_dim, layout.v_head_dim) == (1, 512, 64)


def test_null_sizes_are_as_good_as_none():
    without = {key: value for key, value in LLAMA_3_1_8B.items() if key != "num_key_value_heads"}
    layout = layout_from_config(without)
    assert (layout.num_kv_heads, layout.head_dim) == (32, 128)
    assert layout_from_config(without | {"num_key_value_heads": None, "head_dim": None}) == layout


def test_layers_that_share_k_and_v_are_not_counted():
    assert layout_from_config(LLAMA_3_1_8B | {"num_kv_shared_layers": 12}).num_layers == 20


def test_dtype_is_the_callers_then_the_text_configs_then_the_configs():
    assert layout_from_config(LLAMA_3_1_8B, dtype=torch.float8_e4m3fn).dtype is torch.float8_e4m3fn
    assert layout_from_config(LLAMA_3_1_8B | {"dtype": "float16"}).dtype is torch.float16
    text = GEMMA_3_27B["text_config"] | {"dtype": "float32"}
    assert layout_from_config(GEMMA_3_27B | {"text_config": text}).dtype is torch.float32
    with pytest.raises(vmmkv.DtypeError, match="float64"):
        layout_from_config(LLAMA_3_1_8B | {"torch_dtype": "float64"})


def test_layers_per_range_reaches_the_layout():
    assert len(layout_from_config(LLAMA_3_1_8B, layers_per_range=8).record_bytes) == 4


def cached_layout(model: torch.nn.Module, tokens: int = 3) -> list[tuple[int, int, int]]:
    """Per layer the KV heads, width of K and width of V that transformers really caches."""
    cache = model(torch.zeros(1, tokens, dtype=torch.long)).past_key_values
    return [(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in cache.layers]


SMALL = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**SMALL, num_key_value_heads=2, intermediate_size=64),
        transformers.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=32, intermediate_size=64),
        transformers.GPT2Config(vocab_size=50, n_embd=64, n_layer=3, n_head=4),
        transformers.FalconConfig(**SMALL),
        transformers.FalconConfig(**SMALL, new_decoder_architecture=True, num_kv_heads=2),
        transformers.GPTBigCodeConfig(vocab_size=50, n_embd=64, n_layer=3, n_head=4),
        transformers.DeepseekV3Config(
            **SMALL, num_key_value_heads=4, intermediate_size=64, first_k_dense_replace=3, kv_lora_rank=32
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_agrees_with_what_transformers_caches(config):
    layout = layout_from_config(config)
    with torch.inference_mode():
        cached = cached_layout(transformers.AutoModelForCausalLM.from_config(config).eval())
    assert cached == [(layer.num_kv_heads, layer.k_head_dim, layer.v_head_dim) for layer in layout.layers]


def test_nested_config_that_leaves_class_defaults_out_is_refused_and_a_loaded_one_is_not():
    # Of Gemma 3 12B: head_dim is 256 by the class's default, and not hidden_size / num_attention_heads.
    text = {"hidden_size": 3840, "num_attention_heads": 16, "num_hidden_layers": 48, "num_key_value_heads": 8}
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **text}}
    with pytest.raises(vmmkv.LayoutError, match="leaves out head_dim"):
        layout_from_config(config)
    layout = layout_from_config(transformers.Gemma3Config(text_config=config["text_config"]))
    assert layout.token_bytes == 48 * 2 * 8 * 256 * 2


def test_missing_sizes_are_named_with_what_there_is():
    with pytest.raises(vmmkv.LayoutError, match=r"num_hidden_layers or n_layer or num_layers .*d_state, model_type"):
        layout_from_config({"model_type": "mamba", "d_state": 16})


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"full_attention_interval": 4}, "full_attention_interval"),
        ({"global_head_dim": 512}, "global_head_dim"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
    ],
)
def test_layers_that_keep_different_things_are_refused(extra, named):
    with pytest.raises(vmmkv.LayoutError, match=named):
        layout_from_config(LLAMA_3_1_8B | extra)
