"""Tiny random models of every family that the transformers cache is tested with: nothing is downloaded."""

from __future__ import annotations

import copy
import functools

import pytest
import transformers
from conftest import seed_alone
from transformers import PreTrainedModel

WINDOW = 7
VOCABULARY = 97

DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "bos_token_id": 1,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 1024, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
ENCODER_DECODER = {"vocab_size": VOCABULARY, "d_model": 64, "pad_token_id": 0, "eos_token_id": None}
MIXED = {"sliding_window": WINDOW, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

MODELS = {
    "llama-mha": ("Llama", "ForCausalLM", {**DECODER, "num_key_value_heads": 8}),
    "llama-gqa": ("Llama", "ForCausalLM", DECODER),
    "mistral": ("Mistral", "ForCausalLM", {**DECODER, "sliding_window": WINDOW}),
    "qwen3": ("Qwen3", "ForCausalLM", {**DECODER, "head_dim": 16}),
    "gemma2": ("Gemma2", "ForCausalLM", {**DECODER, **MIXED}),
    "gemma3": ("Gemma3", "ForCausalLM", {**DECODER, **MIXED}),
    # The last two layers read the K and V of earlier ones; heads are 8 wide in windows and 16 elsewhere.
    "gemma4": ("Gemma4", "ForCausalLM", {
        **DECODER, **MIXED, "layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6,
        "num_kv_shared_layers": 2, "global_head_dim": 16, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    }),
    "deepseek-v3": ("DeepseekV3", "ForCausalLM", {
        **DECODER, **EXPERTS, "num_key_value_heads": 8, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 12, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 3,
    }),
    "gpt2": ("GPT2", "LMHeadModel", {
        "vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 3, "n_head": 8, "pad_token_id": 0, "eos_token_id": None,
    }),
    "gpt-oss": ("GptOss", "ForCausalLM", {**DECODER, **EXPERTS, **MIXED, "num_local_experts": 4}),
    "qwen3-next": ("Qwen3Next", "ForCausalLM", {
        **DECODER, **EXPERTS, "head_dim": 8, "num_experts": 4, "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    }),
    "bart": ("Bart", "ForConditionalGeneration", {
        **ENCODER_DECODER, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    }),
    "t5": ("T5", "ForConditionalGeneration", {
        **ENCODER_DECODER, "d_kv": 64, "d_ff": 64, "num_layers": 3, "num_heads": 8, "decoder_start_token_id": 0,
    }),
}  # fmt: skip

WIDE = {
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
    "initializer_range": 0.2,
}  # fmt: skip
WIDE_MIXED = {**WIDE, "layer_types": ["sliding_attention", "full_attention"]}
WIDE_MODELS = {
    f"{name}-wide": (*MODELS[name][:2], {**MODELS[name][2], **sizes})
    for name, sizes in {
        **dict.fromkeys(("llama-gqa", "mistral", "qwen3"), WIDE),
        "gemma2": {**WIDE_MIXED, "attn_logit_softcapping": 2.0},
        **dict.fromkeys(("gemma3", "gpt-oss"), WIDE_MIXED),
    }.items()
}
"""Their heads are wide enough for vmmkv's own kernels, and their weights large enough for attention to matter."""

LEAST = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "bos_token_id": 1,
    "num_attention_heads": 4, "max_position_embeddings": 256, "eos_token_id": None, "pad_token_id": 0,
    "initializer_range": 0.2,
}  # fmt: skip
LEAST_MODELS = {
    # Neighbours are turned with each other, not halves; one norm for attention and MLP.
    "cohere": ("Cohere", "ForCausalLM", {**LEAST, "num_key_value_heads": 2}),
    # Half of each head is turned; Q, K and V come from one product.
    "gpt-neox": ("GPTNeoX", "ForCausalLM", {**LEAST, "num_attention_heads": 2, "rotary_pct": 0.5}),
    "mixtral": ("Mixtral", "ForCausalLM", {**LEAST, "num_key_value_heads": 2, "num_local_experts": 2}),
    # Norms behind attention, and over all heads of Q and of K.
    "olmo2": ("Olmo2", "ForCausalLM", {**LEAST, "num_key_value_heads": 1}),
}
"""As small as can be: for tests that all kinds of attention pass through."""


@functools.cache
def tiny_model(name: str, attention: str, device: str, seed: int = 0) -> PreTrainedModel:
    """A model in fp32 with random weights; the same one for the same arguments."""
    family, head, sizes = {**MODELS, **WIDE_MODELS, **LEAST_MODELS}[name]
    config = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    seed_alone(seed)
    model = getattr(transformers, family + head)._from_config(config(**sizes), attn_implementation=attention)
    return model.to(device).eval()


def shortened(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that ends behind the second layer, for what takes long with each of them."""
    model = copy.deepcopy(model)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:2], 2
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:2]
    return model


def skip_unsupported(name: str, attention: str, device: str) -> None:
    """Skips what transformers does not run with any cache."""
    family, head, _ = {**MODELS, **WIDE_MODELS}[name]
    model_class = getattr(transformers, family + head)
    if (attention == "sdpa" and not model_class._supports_sdpa) or (
        attention == "flex_attention"
        # It has no attention sinks on the CPU; T5's position bias, of batch 1, is indexed by the sequence.
        and (not model_class._supports_flex_attn or name == "t5" or (name == "gpt-oss" and device == "cpu"))
    ):
        pytest.skip(f"transformers has no {attention} for {name}")
