"""The layout that vmmkv finds for one kind of model, against the bytes by which transformers' cache grows."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

import vmmkv
from vmmkv.model_config import layout_from_config

from .check import Outcome
from .models import build, whole_config_of

TOKENS = 6
"""As many as the smallest attention window keeps, and more than a convolution reads."""

CACHE_LAYERS = (CacheLayerMixin, LinearAttentionCacheLayerMixin)

REFUSED = {
    *("BartForCausalLM", "BigBirdPegasusForCausalLM", "BlenderbotForCausalLM", "BlenderbotSmallForCausalLM"),
    *("MBartForCausalLM", "MarianForCausalLM", "MvpForCausalLM", "PLBartForCausalLM", "PegasusForCausalLM"),
    *("ProphetNetForCausalLM", "WhisperForCausalLM"),
    *("MusicgenForCausalLM", "MusicgenMelodyForCausalLM"),  # these have encoders
    *("AXK2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "Dots3NoteForCausalLM"),
    *("GlmMoeDsaForCausalLM", "HYV4ForCausalLM", "MiniMaxM3VLForCausalLM", "Qwen4ExpForCausalLM"),  # these keep more
    *("FalconMambaForCausalLM", "MambaForCausalLM", "Mamba2ForCausalLM", "OpenAIGPTLMHeadModel"),
    *("RecurrentGemmaForCausalLM", "RwkvForCausalLM", "XLMWithLMHeadModel", "xLSTMForCausalLM"),  # keep no K and V
    "BltForCausalLM",  # several models with a cache each
    "CpmAntForCausalLM",  # puts tokens of its own before the prompt
    "Gemma4UnifiedAssistantForCausalLM",  # reads the K and V of another model
    "JetMoeForCausalLM",  # its routing needs numbers
    *("ReformerModelWithLMHead", "XLNetLMHeadModel"),  # do not run in bf16, or as decoders, with their own settings
}
"""Kinds whose layout is refused, and why."""

UNCOUNTED = {
    "Gemma3nForConditionalGeneration",  # its images need timm
    "Gemma4AssistantForCausalLM",  # transformers refuses the config of its own defaults
}
"""Kinds of which no small model can be made."""


def check_size(kind: str) -> Outcome:
    """Compares a layout from a `config.json` with a cache; "none" if no small model of this kind can be made."""
    try:
        layout = layout_from_config(whole_config_of(kind).to_dict(), dtype=torch.float32)
        grown = token_bytes(kind)
    except vmmkv.LayoutError as error:
        return Outcome("refused", str(error))
    except Exception as error:  # whatever the code of a config or a model raises
        return Outcome("none", f"{type(error).__name__}: {error}")
    planned = sum(layer.num_kv_heads * (layer.k_head_dim + layer.v_head_dim) for layer in layout.layers) * 4
    return Outcome("same" if planned == grown else "differs", f"{planned} bytes a token, and a cache grows by {grown}")


def token_bytes(kind: str) -> int:
    """By how many bytes a cache grows with a token, in real forward passes in fp32."""
    model = build(kind)
    tokens = torch.full((1, TOKENS), 5)
    with torch.inference_mode():
        fewer, more = (held_bytes(model(part, use_cache=True)) for part in (tokens[:, 1:], tokens))
    return more - fewer


def held_bytes(value: Any, inside: bool = False) -> int:
    """Bytes of all tensors in the caches of an output."""
    if isinstance(value, torch.Tensor):
        return value.nbytes if inside else 0
    if isinstance(value, Cache):
        return held_bytes(vars(value), True)
    if isinstance(value, dict):
        return sum(held_bytes(each, inside) for each in value.values())
    if isinstance(value, list | tuple):
        return sum(held_bytes(each, inside) for each in value)
    return held_bytes(vars(value), inside) if isinstance(value, CACHE_LAYERS) else 0
