"""mixed: attention of a step in which prompts, or chunks of them, and single tokens of other sequences are mixed.

Prefill's kernel has one block of threads read all of a sequence for each head and 64 queries or more, which is slow
where there is one query. So single tokens go to decode's kernel, which cuts sequences into equal shares, and the rest
to prefill's. Which is which they see on the device.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from . import attention, row_decode, row_latents, row_prefill
from .arguments import LATENT_DIM, Variant
from .attention import Call, Keys, Plan
from .checks import check_integer
from .plans import Plans


def mixed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    max_prompts: int | None = None,
    out: torch.Tensor | None = None,
    kernel: str = "auto",
) -> torch.Tensor:
    """Attention of any number of new tokens per sequence, causal, on the current stream.

    Computes what `prefill` does, but faster if some sequences have one new token: a decode step beside prompts.
    Arguments, result and errors are those of `prefill`, and:

    Args:
        max_prompts: at least the number of sequences with more than one new token; outputs of further ones would be
            missing. It saves blocks of threads that find nothing to do: 32 a sequence, with 32 heads (none on Hopper).
            None: all may be prompts.

    Raises:
        ValueError, TypeError: also for `max_prompts` that is negative or no integer.
    """
    out = attention.output_like(q) if out is None else out
    run = torch.ops.vmmkv.mixed if torch.compiler.is_compiling() else _mixed
    indices = cu_seqlens, seq_lens, rows, starts, block_table
    run(q, k, v, out, *indices, sinks, k_scales, v_scales, scale, window, softcap, max_prompts, kernel)
    return out


def _mixed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor | None,
    starts: torch.Tensor | None,
    block_table: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
    scale: float | None,
    window: int,
    softcap: float,
    max_prompts: int | None,
    kernel: str,
) -> None:
    tensors = (q, k, v, out, cu_seqlens, seq_lens, rows, starts, block_table, sinks, k_scales, v_scales)
    calls, addresses = _calls.find(tensors, scale, window, softcap, kernel, max_prompts)
    for call in calls:
        attention.launch(call, addresses)


torch.library.custom_op("vmmkv::mixed", _mixed, mutates_args=("out",))


@lru_cache(1024)
def _prepare(
    scale: float | None, window: int, softcap: float, name: str, max_prompts: int | None, geometry: Keys
) -> list[Call]:
    """Checks a call, chooses its kernels and prepares their launches."""
    plans = _choose_plans(window > 0, softcap > 0, name, geometry, max_prompts)
    return [attention.prepare(plan, geometry, scale, window, softcap) for plan in plans]


_calls = Plans(_prepare)


def _choose_plans(windowed: bool, softcapped: bool, name: str, geometry: Keys, max_prompts: int | None) -> list[Plan]:
    """Checks a call's geometry and chooses the kernels: two on tensor cores, or the one without them."""
    if max_prompts is not None and check_integer("max_prompts", max_prompts) < 0:
        raise ValueError(f"got max_prompts {max_prompts}; it must not be negative")
    prompts = row_prefill.make_plan(True, windowed, softcapped, name, geometry, True, max_prompts)
    variant, *_ = prompts.kernel.constants
    if not variant.mixed:
        return [prompts]
    dtype, head_dim, heads_per_kv, _, *others = variant
    given, variant = attention.check(geometry), Variant(dtype, head_dim, heads_per_kv, 1, *others)
    if head_dim == LATENT_DIM:
        return [row_latents.decode_plan(given, variant, "mma" if name == "mma" else "auto"), prompts]
    return [row_decode.make_plan(given, variant), prompts]
