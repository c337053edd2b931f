"""Models in the shapes of real ones, with random weights: nothing is downloaded."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings"),
)
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "original_max_position_embeddings": 8192}
CONFIGS: dict[str, PreTrainedConfig] = {
    "Llama-3.1-8B": LlamaConfig(
        **dict(zip(SIZES, (128_256, 4096, 14_336, 32, 32, 8, 128, 131_072))),
        rms_norm_eps=1e-5,
        rope_parameters=LLAMA_3 | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        bos_token_id=128_000,
        eos_token_id=None,  # random weights must not end a sequence
    ),
    **{
        f"Qwen3-{size}": Qwen3Config(
            **dict(zip(SIZES, (151_936, width, 3 * width, 28, 16, 8, 128, 40_960))),
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            tie_word_embeddings=True,
        )
        for size, width in (("0.6B", 1024), ("1.7B", 2048))
    },
    "tiny": LlamaConfig(**dict(zip(SIZES, (512, 64, 128, 2, 4, 2, 16, 512))), bos_token_id=1, eos_token_id=None),
}


def build(name: str, layers: int | None, device: torch.device) -> PreTrainedModel:
    """A model in bf16, its weights drawn on the device; of `layers` layers, or as many as the real one has."""
    config = CONFIGS[name]
    if layers is not None:
        sizes = config.to_dict() | {"num_hidden_layers": layers}
        sizes.pop("layer_types", None)  # one for each layer; the config finds them by itself
        config = type(config).from_dict(sizes)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a decode step reads: of an embedding table that is no output layer it reads single rows."""
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    rows_only = 0 if output is embedding else embedding.nbytes
    return sum(weight.nbytes for weight in model.parameters()) - rows_only


def token_bytes(config: PreTrainedConfig) -> int:
    """Bytes of K and V of one token in all layers, in bf16."""
    return config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * torch.bfloat16.itemsize
