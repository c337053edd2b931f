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
"""Of the memory, what is left to requests that grow before others begin, in their order; transformers has three times
as much for blocks."""
ALIKE = (
    "max_batch_tokens", "max_requests_per_batch", "allow_block_sharing", "scheduler_type", "safety_margin",
    "use_async_batching", "use_cuda_graph",
)  # fmt: skip
"""What decides which forward passes there are, and of what shape."""


def with_defaults(config: Any, device: torch.device) -> Any:
    """A `ContinuousBatchingConfig` for rows."""
    config = copy.deepcopy(config)
    on_gpu = device.type == "cuda"
    if config.use_cuda_graph is None:
        config.use_cuda_graph = (on_gpu, on_gpu)
    if config.use_async_batching is None:
        config.use_async_batching = on_gpu
    if config.max_memory_percent is None:
        config.max_memory_percent = 0.8
    if config.safety_margin is None and config.scheduler_type == "fifo":
        config.safety_margin = SAFETY_MARGIN
    return config


def check_processors(processors: Iterable[object]) -> None:
    """Raises `UnsupportedError` where some of what changes logits is not for batches, and is to be kept."""
    for each in processors:
        if getattr(each, "supports_continuous_batching", None) is False:
            raise UnsupportedError(
                f"asked for {type(each).__name__} with drop_unsupported_processors=False; of a batch it would see the "
                "last token of each request alone. Leave out what asks for it (repetition_penalty, say), or the False"
            )


def compiles(config: Any, of_model: Any) -> bool:
    """Whether forward passes are to be compiled. Puts what a model's own config says of it into a
    `ContinuousBatchingConfig`, and has decode a path of its own, which transformers has for its own kernels.

    Raises:
        UnsupportedError: they are to be compiled as they cannot be on rows.
    """
    resolve_compile_configs(config, getattr(of_model, "compile_config", None), False, True)
    compiled = config.varlen_compile_config, config.decode_compile_config
    for each in compiled:
        _check_compiling(each)
    return any(compiled)


def _check_compiling(config: Any) -> None:
    """Raises `UnsupportedError` where a `CompileConfig` asks for what cannot be done on rows."""
    if config is None:
        return
    if config.fullgraph:
        raise UnsupportedError("asked for fullgraph=True; on rows compiled forward passes leave attention to kernels")
    if config.mode in OWN_GRAPHS or (config.options or {}).get("triton.cudagraphs"):
        raise UnsupportedError(
            f"asked for mode={config.mode!r}, which captures CUDA graphs of its own; on rows whole forward passes are "
            'captured. Give mode="default" or "max-autotune-no-cudagraphs"'
        )


def budget(config: Any, token_bytes: int) -> float | str:
    """The most that K and V may take."""
    if config.num_blocks is not None:
        return int(config.num_blocks * block_bytes(config, token_bytes))
    return f"{100 * config.max_memory_percent:g}%"


def block_bytes(config: Any, token_bytes: int) -> int:
    """Of one of transformers' blocks, where a token has so many."""
    return int(config.page_size * token_bytes)


def decode_sizes(most: int) -> list[int]:
    """Batch sizes of decode, ascending, up to so many requests: powers of two up to 16, and steps of 16, or of an
    eighth of the power of two before them, so that a batch is padded by no more than that. None is 1, unless all are:
    `torch.compile` makes a program of its own for that."""
    sizes = [min(2, most)]
    while sizes[-1] < most:
        last = sizes[-1]
        sizes.append(min(2 * last if last < 16 else last + max(16, (1 << last.bit_length()) // 16), most))
    return sizes


def host_bytes(config: Any) -> int:
    """What may be moved to the host."""
    if config.cpu_offload_space is None:
        _, total = host_memory()
        return int(config.cpu_offload_space_safety_threshold * total)
    return int(config.cpu_offload_space * 2**30)
