"""The attention that transformers calls while a model runs on rows, and the loan of a model's attention to managers.

A batch is packed: new tokens of many sequences one behind the other, with K and V in rows. On a GPU kernels attend,
from rows and lengths on the device: nothing waits for the host, and one captured graph serves every length. Elsewhere
torch attends to one sequence after another. Of transformers it depends on the keywords that continuous batching gives
to attention.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.generation.continuous_batching.input_outputs import PagedAttentionArgs

from ...cache import KVCache
from ...errors import UnsupportedAttentionError
from ...kernels import append, decode, mixed
from ...kernels.quantized import dequantize, quantize
from ..attention import NOT_ABOUT_ATTENTION, kernels_take
from .model import LeftToAttention, Probe

NAME = "vmmkv_rows"  # the `attn_implementation` of models that run on rows
ALONE = (
    "stop every manager that runs the model, or one of the same config. Then, and of a copy that was made under a "
    "manager, vmmkv.integrations.continuous_batching.disable(model) leaves the model to transformers"
)
"""What helps where a manager runs the model."""
KNOWN = {*PagedAttentionArgs.__annotations__, *NOT_ABOUT_ATTENTION, "sliding_window", "logits_to_keep"}
"""Keywords of attention that are heeded, or mean nothing to it."""


def attend_rows(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    vmmkv_cache: Any = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **told: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer on rows. Raises `UnsupportedAttentionError` if the call has no batch of continuous batching
    or has keywords that are not known here; and, where a `Probe` runs the model, if tokens of the layer see later ones.
    """
    unknown = [name for name in told.keys() - KNOWN if told[name] is not None and told[name] is not False]
    unknown += ["dropout"] * bool(dropout) + ["attention_mask"] * (attention_mask is not None)
    cache, config = vmmkv_cache, getattr(module, "config", None)
    if isinstance(cache, Probe) and not all(getattr(each, "is_causal", True) for each in (module, config)):
        raise UnsupportedAttentionError(
            f"{type(module).__name__} is not causal, and requests of a batch have no mask that shows tokens what comes "
            "behind them; if its config alone makes it so, give that is_decoder=True, or is_causal=True"
        )
    is_in_batch = isinstance(cache, LeftToAttention) and "block_table" in told
    if not is_in_batch or unknown:
        what = f"told its attention {', '.join(unknown)}" if is_in_batch else "called it without a batch of requests"
        raise UnsupportedAttentionError(
            f"{type(module).__name__} {what}, and attention on rows knows none of that; {ALONE}"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = {"scale": scale, "softcap": softcap or 0.0, "sinks": s_aux}
    return cache.attend(module.layer_idx, query, key, value, told, **options), None


AttentionInterface.register(NAME, torch.compiler.disable(attend_rows))  # type: ignore[no-untyped-call]


class Packed(NamedTuple):
    """Where the tokens of a batch are: int32 tensors on its device."""

    cu_seqlens: Tensor  # `[batch + 1]`, where new tokens of each sequence begin; those behind the last are padding
    rows: Tensor  # `[batch]`, the row of each sequence
    starts: Tensor  # `[batch]`, its tokens, new ones left out
    lengths: Tensor  # `[batch]`, its tokens, new ones included
    max_prompts: int  # the most sequences that have more than one new token; 0: each has one

    def news(self) -> list[tuple[int, int, slice]]:
        """Of each sequence the row, the tokens before the new ones, and where these are."""
        bounds = self.cu_seqlens.tolist()
        return [*zip(self.rows.tolist(), self.starts.tolist(), map(slice, bounds[:-1], bounds[1:]))]


class Kept(NamedTuple):
    """K and V of a layer in rows, `[rows, max_seq_len, num_kv_heads, head_dim]`, and the scales of 8-bit ones,
    `[rows, max_seq_len, num_kv_heads]`."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None


def kept_in(cache: KVCache, layer: int) -> Kept:
    """K and V of a layer in the rows of a cache."""
    return Kept(*(cache.kv(layer) if cache.layout.scales is None else cache.scaled_kv(layer)))


def write_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kept: Kept,
    batch: Packed,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write K and V of new tokens, `[tokens, num_kv_heads, head_dim]`, into rows. Returns the attention of `query`,
    `[tokens, num_heads, head_dim]`, each token to its own sequence up to itself: `[tokens, num_heads, v_head_dim]`."""
    k, v, k_scales, v_scales = kept
    output: Tensor
    if kernels_take(key, value):
        scales = {"k_scales": k_scales, "v_scales": v_scales}
        append(key, value, k, v, batch.rows, batch.starts, batch.cu_seqlens, **scales)
        sinks = None if sinks is None else sinks.float().contiguous()
        options = {"rows": batch.rows, "sinks": sinks, "scale": scale, "window": window, "softcap": softcap, **scales}
        if batch.max_prompts:
            output = mixed(query, k, v, batch.cu_seqlens, batch.lengths, max_prompts=batch.max_prompts, **options)
        else:
            output = decode(query.unsqueeze(1), k, v, batch.lengths, **options).squeeze(1)
        return output
    output = query.new_zeros(*query.shape[:2], v.shape[-1])
    for row, start, new in batch.news():
        if (length := start + new.stop - new.start) == start:
            continue
        first = max(start + 1 - window, 0) if window else 0
        read = []
        for given, states, scale_of in ((key, k, k_scales), (value, v, v_scales)):
            if scale_of is None:
                states[row, start:length] = given[new]
                read.append(states[row, first:length])
            else:
                states[row, start:length], scale_of[row, start:length] = quantize(given[new], states.dtype)
                read.append(dequantize(states[row, first:length], scale_of[row, first:length], query.dtype))
        distance = (torch.arange(start, length)[:, None] - torch.arange(first, length)).to(query.device)
        sees = (distance >= 0) & (distance < (window or length))
        q, keys, values = (each.transpose(0, 1) for each in (query[new], *read))
        output[new] = _attend_to_one(q, keys, values, sees, scale, softcap, sinks).transpose(0, 1)
    return output


def _attend_to_one(
    q: Tensor, k: Tensor, v: Tensor, sees: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attention of one sequence: `q` `[num_heads, queries, head_dim]`, `k` and `v` `[num_kv_heads, tokens, ...]`."""
    if not softcap and sinks is None:
        q, k, v = (each.unsqueeze(0) for each in (q, k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale, enable_gqa=True).squeeze(0)
    k, v = (states.repeat_interleave(q.shape[0] // k.shape[0], dim=0) for states in (k, v))
    scores = q @ k.transpose(1, 2) * scale
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~sees, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
    weights = scores.float().softmax(dim=-1).to(v.dtype)
    return weights[..., : k.shape[1]] @ v


@dataclass
class Loan:
    """The attention of a config, which names it: all models of the config attend alike."""

    config: Any
    before: str | None = None  # the attention that they had, if that is known
    users: WeakSet[object] = field(default_factory=WeakSet)  # the managers that run one of them


_lock = threading.RLock()  # guards the loans: threads may begin and end with one model
_loans: WeakKeyDictionary[PreTrainedModel, Loan] = WeakKeyDictionary()  # by model; models of one config share a loan
_borrows: Counter[int] = Counter()  # by the id of a config: how often its models were borrowed


def borrow(model: Any, user: object) -> None:
    """Have a model attend to rows until all users give it back."""
    with _lock:
        _borrows[id(model.config)] += 1  # first of all: `left_alone` must not miss what follows
        before = model.config._attn_implementation
        model.set_attn_implementation(NAME)
        loan = _loans[model] = _loan_of(model.config) or Loan(model.config)
        if before != NAME:
            loan.before = before
        loan.users.add(user)


@contextmanager
def left_alone(model: Any, refused: Exception) -> Iterator[None]:
    """Raise `refused` if a model, or one of its config, is borrowed now, or before the end: masks that were made for
    one attention would meet the other."""
    config = model.config
    with _lock:
        if _loan_of(config) is not None:
            raise refused
        before = _borrows[id(config)]
    try:
        yield
    except Exception as error:
        if _borrows[id(config)] == before:
            raise
        raise refused from error
    if _borrows[id(config)] != before:
        raise refused


def give_back(model: Any, user: object) -> None:
    """Have a model attend as before, unless it has other users. Does nothing if this user does not have it."""
    with _lock:
        if loan := _loans.get(model):
            loan.users.discard(user)
            _end_unused(loan)


def restore(model: Any) -> None:
    """Have a model without users attend as before; a copy that was made under a manager as transformers chooses."""
    with _lock:
        loan = _loan_of(model.config)
        if loan is None and model.config._attn_implementation == NAME:
            loan = _loans[model] = Loan(model.config)
        if loan is not None:
            _end_unused(loan)


def _loan_of(config: Any) -> Loan | None:
    return next((loan for loan in _loans.values() if loan.config is config), None)


def _end_unused(loan: Loan) -> None:
    for model in [] if loan.users else [model for model, its in _loans.items() if its is loan]:
        del _loans[model]
        model.set_attn_implementation(loan.before or model.get_correct_attn_implementation(None))
