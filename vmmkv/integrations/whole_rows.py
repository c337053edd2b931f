"""`WholeRows`: K or V of rows that have memory for live tokens only, which nothing but vmmkv's attention can read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import UnsupportedAttentionError
from .spans import NAME


class WholeRows(Tensor):
    """K or V, by its shape `[batch, num_kv_heads, max_seq_len, head_dim]`, for kernels that are told the lengths.

    All else would read on to where no memory is, and end the process: nothing can be computed with it. Compilers and
    CUDA graphs see its two tensors, and have its window as a constant.

    Args:
        states: the rows.
        lengths: int32 `[batch]`, the tokens so far, the newest ones included.
        window: tokens that a token attends to, itself included; None: all.
    """

    states: Tensor
    lengths: Tensor
    window: int | None

    @staticmethod
    def __new__(cls, states: Tensor, lengths: Tensor, window: int | None) -> WholeRows:
        make: Callable[..., WholeRows] = Tensor._make_wrapper_subclass
        return make(cls, states.shape, strides=states.stride(), dtype=states.dtype, device=states.device)

    def __init__(self, states: Tensor, lengths: Tensor, window: int | None) -> None:
        self.states, self.lengths, self.window = states, lengths, window

    def __tensor_flatten__(self) -> tuple[list[str], int | None]:
        return ["states", "lengths"], self.window

    @classmethod
    def __tensor_unflatten__(
        cls, tensors: dict[str, Tensor], window: int | None, shape: Sequence[int], stride: Sequence[int]
    ) -> WholeRows:
        return cls(tensors["states"], tensors["lengths"], window)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> WholeRows:
        if operation in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            rows: Any = args[0]
            return cls(rows.states, rows.lengths, rows.window)
        raise _unreadable(str(operation))

    def data_ptr(self) -> NoReturn:
        """Raises `UnsupportedAttentionError`."""
        raise _unreadable("their address")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"WholeRows({list(self.shape)}, lengths={self.lengths}, window={self.window})"


def _unreadable(asked: str) -> UnsupportedAttentionError:
    return UnsupportedAttentionError(
        f"asked for {asked} of K or V in whole rows, which have memory for live tokens only: this VmmCache was made "
        f"with compile=True, for models with attn_implementation={NAME!r}, and something else reads it. Undo "
        "set_attn_implementation(), give VmmCache the config of the model that runs, or make it without compile=True"
    )
