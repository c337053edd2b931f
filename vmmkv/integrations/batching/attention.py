"""The attention that transformers calls while a model runs on rows, and the loan of a model's attention to managers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.generation.continuous_batching.input_outputs import PagedAttentionArgs

from ...errors import UnsupportedAttentionError
from ..attention import NOT_ABOUT_ATTENTION
from .cache import RowCache
from .groups import Probe

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
    """Attention of a layer on rows. Raises `UnsupportedAttentionError` for a call without a batch of continuous
    batching, and for keywords that are not known here."""
    unknown = [name for name in told.keys() - KNOWN if told[name] is not None and told[name] is not False]
    unknown += ["dropout"] * bool(dropout) + ["attention_mask"] * (attention_mask is not None)
    cache = vmmkv_cache
    if isinstance(cache, Probe):
        _check_causal(module)
    is_in_batch = isinstance(cache, RowCache | Probe) and "block_table" in told
    if not is_in_batch or unknown:
        what = f"told its attention {', '.join(unknown)}" if is_in_batch else "called it without a batch of requests"
        raise UnsupportedAttentionError(
            f"{type(module).__name__} {what}, and attention on rows knows none of that; {ALONE}"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return cache.attend(module.layer_idx, query, key, value, told, scale, softcap or 0.0, s_aux), None


def _check_causal(module: Any) -> None:
    """Raise `UnsupportedAttentionError` if tokens see those behind them, as far as a layer and its config say."""
    if not all(getattr(each, "is_causal", True) for each in (module, getattr(module, "config", None))):
        raise UnsupportedAttentionError(
            f"{type(module).__name__} is not causal, and requests of a batch have no mask that shows tokens what comes "
            "behind them; if its config alone makes it so, give that is_decoder=True, or is_causal=True"
        )


AttentionInterface.register(NAME, torch.compiler.disable(attend_rows))  # type: ignore[no-untyped-call]


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
