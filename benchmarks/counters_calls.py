"""Calls of which counters are read: each behind one that it is compared with, made as they are where they are timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch

from vmmkv.kernels.arguments import LATENT_DIM

from .attention.batches import Case, make_batch
from .attention.cases import attention
from .attention.layouts import KV, layouts
from .attention.prompts import TOKENS, make_prompt
from .attention.shapes import Geometry, make_call
from .attention.small import PROMPT, append_prompt, copy_row
from .attention.timing import Call

Making = Callable[[torch.device], AbstractContextManager[Call]]
"""Makes data for a call; the memory of rows is given back in the end."""


@contextmanager
def attend(
    part: str,
    batch: int,
    tokens: int,
    q_len: int,
    device: torch.device,
    *,
    kernel: str = "auto",
    layout: str = "contiguous",
) -> Iterator[Call]:
    """Decode or prefill, with heads of 128."""
    data = make_batch(Case(part, "", (tokens,) * batch, q_len), device)
    with layouts(data, (layout,)) as (kv,):
        yield attention(data, kv, kernel)


@contextmanager
def decode_shape(shape: Geometry, batch: int, tokens: int, device: torch.device) -> Iterator[Call]:
    """Decode of other heads, on contiguous tensors."""
    call, _, _ = make_call(shape, batch, tokens, device)
    yield call


@contextmanager
def prefill_shape(shape: Geometry, device: torch.device) -> Iterator[Call]:
    """Prefill of a prompt, of other heads or of K and V in 8 bits, on contiguous tensors."""
    call, _ = make_prompt(shape, TOKENS, device)
    yield call


@contextmanager
def move(make: Callable[[KV], Call], layout: str, device: torch.device) -> Iterator[Call]:
    """A prompt's way into a row, or from it to another."""
    data = make_batch(Case("small", "", (PROMPT, PROMPT)), device)
    with layouts(data, (layout,)) as (kv,):
        yield make(kv)


def append_copy(kv: KV) -> Call:
    """`append` of what sequence 0 holds to sequence 1."""
    return append_prompt(kv, torch.stack(kv.row(0, PROMPT)))


CALLS: dict[str, Making] = {
    "decode, mma, 64 x 4096": partial(attend, "decode", 64, 4096, 1),
    "decode, mma, 64 x 4096, token-major": partial(attend, "decode", 64, 4096, 1, layout="token-major"),
    "decode, mma, 64 x 4096, 4 queries": partial(attend, "decode", 64, 4096, 4),
    "decode, mma, 64 x 4096, 8 queries": partial(attend, "decode", 64, 4096, 8),
    "decode, mma, 64 x 16384": partial(attend, "decode", 64, 16_384, 1),
    "decode, mma, 64 x 16384, heads of 80": partial(decode_shape, Geometry(80), 64, 16_384),
    "decode, mma, 64 x 16384, latents, 16 heads": partial(decode_shape, Geometry(LATENT_DIM, heads=16), 64, 16_384),
    "decode, wgmma, 64 x 16384, latents, 128 heads": partial(decode_shape, Geometry(LATENT_DIM, heads=128), 64, 16_384),
    "decode, mma, 16 x 16384": partial(attend, "decode", 16, 16_384, 1),
    "decode, mma, 16 x 16384, token-major": partial(attend, "decode", 16, 16_384, 1, layout="token-major"),
    "prefill, wgmma, causal 1 x 16384": partial(attend, "prefill", 1, 16_384, 16_384),
    "prefill, wgmma, causal 4 x 4096": partial(attend, "prefill", 4, 4096, 4096),
    "prefill, wgmma, causal 1 x 8192": partial(prefill_shape, Geometry()),
    "prefill, wgmma, causal 1 x 8192, heads of 64": partial(prefill_shape, Geometry(64)),
    "prefill, wgmma, causal 1 x 8192, heads of 80": partial(prefill_shape, Geometry(80)),
    "prefill, wgmma, causal 1 x 8192, heads of 96": partial(prefill_shape, Geometry(96)),
    "prefill, wgmma, causal 1 x 8192, latents, 16 heads": partial(prefill_shape, Geometry(LATENT_DIM, heads=16)),
    "prefill, mma, causal 1 x 16384": partial(attend, "prefill", 1, 16_384, 16_384, kernel="mma"),
    "prefill, mma, causal 1 x 8192": partial(attend, "prefill", 1, TOKENS, TOKENS, kernel="mma"),
    "prefill, mma, causal 1 x 8192, fp8": partial(prefill_shape, Geometry(kv_dtype=torch.float8_e4m3fn)),
    "append, 16384 tokens": partial(move, append_copy, "contiguous"),
    "append, 16384 tokens, token-major": partial(move, append_copy, "token-major"),
    "copy_tokens, 16384 tokens": partial(move, copy_row, "contiguous"),
    "copy_tokens, 16384 tokens, token-major": partial(move, copy_row, "token-major"),
}
"""By their names in the result. Where nothing is said heads are 128 wide, and there is one query a sequence, on
contiguous tensors. On Hopper prefill's own choice is wgmma, but for K and V in 8 bits, and decode's of latents where
they have more than 32 heads."""
