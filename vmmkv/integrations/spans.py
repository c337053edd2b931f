"""`Spans`: a mask without elements. Kernels need two numbers of each sequence, not a byte for each query and key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..errors import UnsupportedAttentionError

NAME = "vmmkv"
"""The `attn_implementation` that reads them."""


def attention_of(config: PreTrainedConfig) -> str:
    """The name of the attention that a model runs."""
    return str(config.get_text_config(decoder=True)._attn_implementation)


_COPIES = torch.ops.aten.detach.default, torch.ops.aten.alias.default
_MOVE = torch.ops.aten._to_copy.default
_SLICE = torch.ops.aten.slice.Tensor


class Spans(Tensor):
    """A mask, which looks like a bool tensor `[batch, 1, q_length, kv_length]`, that says which tokens each query sees.

    Query i of a sequence is its token `end - q_length + i`. It sees the tokens from `first` to itself, and with a
    window only the last of them. Tokens are counted from where K and V begin.

    Models hand it on like any mask, some of them for the last queries only. Nothing else can be computed with it:
    kernels would still get the mask before that. Compilers and CUDA graphs see its two tensors, and its window as a
    constant.

    Args:
        first: int32 `[batch]`.
        end: int32 `[batch]`.
        window: tokens that a query sees at most, itself included; 0: all.
        shape: of the mask; below 2**31 tokens.
    """

    first: Tensor
    end: Tensor
    window: int

    @staticmethod
    def __new__(cls, first: Tensor, end: Tensor, window: int, shape: Sequence[int]) -> Spans:
        make: Callable[..., Spans] = Tensor._make_wrapper_subclass
        return make(cls, shape, dtype=torch.bool, device=first.device)

    def __init__(self, first: Tensor, end: Tensor, window: int, shape: Sequence[int]) -> None:
        self.first, self.end, self.window = first, end, window

    def as_bias(self, dtype: torch.dtype) -> Tensor:
        """The mask that it stands for, in `dtype`, to be added to scores as in transformers' eager attention."""
        q_length, kv_length = self.shape[2:]
        first, end = self.first.view(-1, 1, 1, 1), self.end.view(-1, 1, 1, 1)
        key = torch.arange(kv_length, device=self.device)
        query = end - q_length + torch.arange(q_length, device=self.device)[:, None]
        seen = (key >= first) & (key <= query)
        if self.window:
            seen &= key > query - self.window
        return torch.where(seen, torch.zeros((), dtype=dtype, device=self.device), torch.finfo(dtype).min)

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["first", "end"], self.window

    @classmethod
    def __tensor_unflatten__(
        cls, tensors: dict[str, Tensor], window: int, shape: Sequence[int], stride: Sequence[int]
    ) -> Spans:
        return cls(tensors["first"], tensors["end"], window, shape)

    def _stable_hash_for_caching(self) -> str:
        """The properties that compiled graphs depend on."""
        return f"{type(self).__qualname__} {tuple(self.shape)} {self.window} {self.device}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Spans:
        told = kwargs or {}
        spans: Any = args[0] if args else None
        if operation in _COPIES:
            return cls(spans.first, spans.end, spans.window, spans.shape)
        if operation is _MOVE and told.get("device") and told.get("dtype") in (torch.bool, None):
            return cls(spans.first.to(told["device"]), spans.end.to(told["device"]), spans.window, spans.shape)
        if operation is _SLICE and (shape := _without_first_queries(spans.shape, *args[1:])):
            return cls(spans.first, spans.end, spans.window, shape)
        raise UnsupportedAttentionError(
            f"the model computes with its attention mask ({operation}), and attn_implementation={NAME!r} has none to "
            "compute with: kernels are told which tokens each query sees. Load the model with "
            "attn_implementation='eager'; VmmCache works with that, too"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Spans(first={self.first}, end={self.end}, window={self.window}, shape={list(self.shape)})"


def _without_first_queries(
    shape: Sequence[int], dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[int, ...] | None:
    """The shape that a slice leaves of a mask, if that is all of it, or the last queries; else None."""
    kept = range(*slice(start, end, step).indices(shape[dim]))
    if kept == range(shape[dim]) or (dim == 2 and kept == range(kept.start, shape[dim])):
        return (*shape[:dim], len(kept), *shape[dim + 1 :])
    return None
