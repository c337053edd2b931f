"""What a `ContinuousBatchingConfig` means on rows: its defaults, what it cannot ask for, and its sizes in bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from transformers.generation.continuous_batching.initialization import resolve_compile_configs

from ...driver.limits import memory as host_memory
from ...errors import UnsupportedError

OWN_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of `torch.compile` that capture CUDA graphs."""
SAFETY_MARGIN = 0.05
"""The share of memory that new requests leave to those that grow, in the "fifo" scheduler; transformers: 0.15."""
ALIKE = (
    "max_batch_tokens", "max_requests_per_batch", "allow_block_sharing", "scheduler_type", "safety_margin",
    "use_async_batching", "use_cuda_graph",
)  # fmt: skip
"""Settings that decide which forward passes there are, and of what shape."""


def with_defaults(config: Any, device: torch.device) -> Any:
    """A copy of a `ContinuousBatchingConfig`, with the defaults of rows."""
    config, on_gpu = copy.deepcopy(config), device.type == "cuda"
    defaults = {"use_cuda_graph": (on_gpu, on_gpu), "use_async_batching": on_gpu, "max_memory_percent": 0.8}
    if config.scheduler_type == "fifo":
        defaults["safety_margin"] = SAFETY_MARGIN
    for name, value in defaults.items():
        if getattr(config, name) is None:
            setattr(config, name, value)
    return config


def check_processors(processors: Iterable[object]) -> None:
    """Raise `UnsupportedError` if a logits processor is not for batches."""
    for each in processors:
        if getattr(each, "supports_continuous_batching", None) is False:
            raise UnsupportedError(
                f"asked for {type(each).__name__} with drop_unsupported_processors=False; of a batch it would see the "
                "last token of each request alone. Leave out what asks for it (repetition_penalty, say), or the False"
            )


def compiles(config: Any, of_model: Any) -> bool:
    """Resolve which passes are compiled, by the config and the model's own; returns whether any is."""
    resolve_compile_configs(config, getattr(of_model, "compile_config", None), False, True)
    compiled = [each for each in (config.varlen_compile_config, config.decode_compile_config) if each is not None]
    for each in compiled:
        if each.fullgraph:
            raise UnsupportedError(
                "asked for fullgraph=True; on rows compiled forward passes leave attention to kernels"
            )
        if each.mode in OWN_GRAPHS or (each.options or {}).get("triton.cudagraphs"):
            raise UnsupportedError(
                f"asked for mode={each.mode!r}, which captures CUDA graphs of its own; on rows whole forward passes "
                'are captured. Give mode="default" or "max-autotune-no-cudagraphs"'
            )
    return bool(compiled)


def budget(config: Any, token_bytes: int) -> float | str:
    """The limit of a pool, by the bytes of a token on its device."""
    if config.num_blocks is not None:
        return int(config.num_blocks * block_bytes(config, token_bytes))
    return f"{100 * config.max_memory_percent:g}%"


def block_bytes(config: Any, token_bytes: int) -> int:
    """Bytes of one of transformers' blocks."""
    return int(config.page_size * token_bytes)


def decode_sizes(most: int) -> list[int]:
    """Batch sizes of decode up to so many requests, ascending: powers of two up to 16, then steps of 16, or of an
    eighth of the power of two below. None is 1 unless all are: `torch.compile` makes a program of its own for 1."""
    sizes = [min(2, most)]
    while sizes[-1] < most:
        last = sizes[-1]
        sizes.append(min(2 * last if last < 16 else last + max(16, (1 << last.bit_length()) // 16), most))
    return sizes


def host_bytes(config: Any) -> int:
    """Bytes of host memory for tokens that are moved there."""
    if config.cpu_offload_space is None:
        _, total = host_memory()
        return int(config.cpu_offload_space_safety_threshold * total)
    return int(config.cpu_offload_space * 2**30)
