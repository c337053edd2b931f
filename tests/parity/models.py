"""Small random models of every causal and sequence-to-sequence kind that transformers has: nothing is downloaded."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

WINDOW = 7
LAYERS = 4

SIZES = {
    **dict.fromkeys(("vocab_size", "hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim"), 128),
    **dict.fromkeys(("embedding_size", "emb_dim", "vocab_size_per_layer_input"), 128),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "d_inner", "dim_ff"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size", "expert_ffn_hidden_size"), 96),
    **dict.fromkeys(("shared_expert_intermediate_size", "dense_intermediate_size", "shared_intermediate_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "index_n_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "index_head_dim", "attention_head_dim"), 64),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "kv_lora_rank", "q_lora_rank", "o_lora_rank"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window", "attention_window_size"), WINDOW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    **dict.fromkeys(("n_shared_experts", "topk_group", "num_key_value_heads", "bos_token_id"), 1),
    **dict.fromkeys(("attention_chunk_size", "index_topk", "keep_window_size", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 16),
    "qk_head_dim": 64,
    "attn_logit_softcapping": 2.0,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "use_sliding_window": True,
}
"""What makes a configuration small, wherever it has a setting of such a name, and what it can do visible: heads that
vmmkv has kernels for, and windows, chunks and choices of tokens that are shorter than the prompts."""

DECODER = {"is_decoder": True}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"), DECODER),
    **dict.fromkeys(("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"), DECODER),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl"), DECODER),
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"n_embd": 256, "n_head": 4},
    "cohere_compass_text": {"rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE}},
    "ctrl": {"dff": 96},
    "dbrx": {"attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "diffllama": {"num_key_value_heads": 2},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "git": {"image_size": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "led": {"attention_window": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 4, "n_groups": 1},
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"] * 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "moshi": {"audio_vocab_size": 32, "sliding_window": 64},  # its masks have no window
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "nllb-moe": {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 64,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 64,
    },
    "xmod": {**DECODER, "default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""What single kinds of models need besides, by `model_type`."""

LEFT_OUT = {
    "BltForCausalLM": "several models with a cache each, and a configuration that no cache can be made of",
    "CpmAntForCausalLM": "puts tokens of its own before the prompt, which the attention mask leaves out",
    "EncoderDecoderModel": "two models, each a kind of its own",
    "MiniMaxForCausalLM": "refuses every cache but its own",
    "ProphetNetForCausalLM": "takes no prompt with a cache, only single tokens",
    "ProphetNetForConditionalGeneration": "takes no prompt with a cache, only single tokens",
}
"""Kinds that are not run, and why."""

UNPADDED = {"RecurrentGemmaForCausalLM": "its recurrent layers read what attention makes of padding"}
"""Kinds whose logits depend on padding in transformers itself, and why."""


def kinds() -> dict[str, type[PreTrainedModel]]:
    """The classes of models, by name."""
    mappings = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    names = {name for mapping in mappings for name in mapping.values()}
    return {name: getattr(transformers, name) for name in sorted(names)}


def why_left_out(kind: str) -> str | None:
    """Why a kind is not run; None if it is."""
    model_class = kinds()[kind]
    if kind in LEFT_OUT:
        return LEFT_OUT[kind]
    if "text_config" in model_class.config_class.sub_configs:
        return "its language model is a kind of its own"
    if not {"past_key_values", "cache"} & inspect.signature(model_class.forward).parameters.keys():  # since 5.24 so
        return "keeps no K and V in a cache of transformers"
    return None


def config_of(kind: str) -> PreTrainedConfig:
    """The configuration of a small model of one kind."""
    config_class = kinds()[kind].config_class
    return config_class(**sizes_of(config_class))


def whole_config_of(kind: str) -> PreTrainedConfig:
    """The same, as a `config.json` has it: of a model whose language model is of this kind, where that has no other."""
    own = kinds()[kind].config_class
    types = [name for name, of in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if of == kind]
    classes = [CONFIG_MAPPING[name] for name in types]
    config_class = own if own in classes or not classes else classes[0]
    return config_class(**sizes_of(config_class))


def build(kind: str, attention: str = "eager", device: str = "cpu") -> PreTrainedModel:
    """A model of one kind in fp32, with the same weights at each call."""
    torch.manual_seed(0)
    model = kinds()[kind]._from_config(config_of(kind), attn_implementation=attention)
    torch.manual_seed(0)
    stir(model)
    return model.to(device).eval()


def sizes_of(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """The settings that make a configuration, and those within it, small."""
    known = vars(config_class())
    sizes: dict[str, Any] = {name: size for name, size in SIZES.items() if name in known}
    if "kv_lora_rank" in known:  # K and V have as many heads as queries, and parts of heads have widths of their own
        sizes |= {"num_key_value_heads": 2, "head_dim": SIZES["qk_rope_head_dim"]}
    if types := known.get("layer_types"):
        distinct = list(dict.fromkeys(types))
        if distinct == ["full_attention"] and "sliding_window" in known:
            distinct = ["sliding_attention", "full_attention"]
        sizes["layer_types"] = [distinct[layer % len(distinct)] for layer in range(LAYERS)]
    for name, part in config_class.sub_configs.items():
        part_class = type(known.get(name)) if part is AutoConfig else part
        if issubclass(part_class, PreTrainedConfig):
            sizes[name] = {"model_type": part_class.model_type} | sizes_of(part_class)
    return sizes | OVERRIDES.get(config_class.model_type, {})


@torch.no_grad()
def stir(model: PreTrainedModel) -> None:
    """Gives weights a size with which attention decides what comes out, and sinks, gates and norms one of their own."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        elif not name.endswith("A_log"):
            fan_in = math.prod(parameter.shape[1:]) if parameter.dim() == 2 else parameter.shape[-1]
            parameter.normal_(0, fan_in**-0.5)
