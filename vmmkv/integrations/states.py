"""K and V that look like those a model gave, and are not: `ScaledStates` are kept as 8-bit numbers and their scales,
`WholeRows` have memory for live tokens only, and nothing but vmmkv's attention can read them.

`vmmkv.kernels.quantized` says how numbers are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import DtypeError, UnsupportedAttentionError, UnsupportedError
from ..kernels.checks import ATTENTION_DTYPES
from ..kernels.quantized import dequantize, quantize
from .masks import NAME

PIECE = 1 << 22  # numbers that are rounded, or made wide, at a time, which takes a few times 16 MiB in fp32


def check_quantizable(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Raises `DtypeError` unless K and V of a dtype can be kept in 8 bits."""
    if dtype not in ATTENTION_DTYPES:
        known = ", ".join(str(each).removeprefix("torch.") for each in ATTENTION_DTYPES)
        raise DtypeError(f"got K and V as {dtype} to keep as {kv_dtype}; they must be one of {known}")


class ScaledStates(Tensor):
    """K or V, by its shape `[batch, num_kv_heads, tokens, head_dim]`, of which 8 bits of each number are kept.

    Each operation works on a copy of all of it, in its dtype. It cannot be written to. Compilers and CUDA graphs see
    its two tensors.

    Args:
        numbers: e4m3fn or int8, of that shape and any strides.
        scales: fp32 `[batch, num_kv_heads, tokens]`, any strides.
        dtype: of K and V in the model.
    """

    numbers: Tensor
    scales: Tensor

    __torch_function__: Any = torch._C._disabled_torch_function_impl  # results are plain tensors

    @staticmethod
    def __new__(cls, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> ScaledStates:
        make: Callable[..., ScaledStates] = Tensor._make_wrapper_subclass
        return make(cls, numbers.shape, dtype=dtype, device=numbers.device)

    def __init__(self, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self.numbers, self.scales = numbers, scales

    def dequantized(self) -> Tensor:
        """A copy, in its dtype."""
        states = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for here in _pieces(self.numbers):
            states[:, :, here] = dequantize(self.numbers[:, :, here], self.scales[:, :, here], self.dtype)
        return states

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["numbers", "scales"], self.dtype

    @classmethod
    def __tensor_unflatten__(
        cls, tensors: dict[str, Tensor], dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
    ) -> ScaledStates:
        return cls(tensors["numbers"], tensors["scales"], dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if operation in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            states: Any = args[0]
            return cls(states.numbers, states.scales, states.dtype)
        if _writes_to(operation, args, kwargs or {}):
            raise _read_only(str(operation))
        args, kwargs = tree_map_only(cls, cls.dequantized, (args, kwargs or {}))
        return operation(*args, **kwargs)

    def __setitem__(self, place: Any, states: Any) -> NoReturn:
        """Raises `UnsupportedError`: torch would write to a copy."""
        raise _read_only("an assignment")

    def data_ptr(self) -> NoReturn:
        """Raises `UnsupportedError`: there is no memory with these numbers."""
        raise UnsupportedError(
            "asked for the address of K or V of 8 bits, which attn_implementation='vmmkv' and operations of torch can "
            "read; make the VmmCache without kv_dtype"
        )

    def __dlpack__(self, *_: Any, **__: Any) -> NoReturn:
        """Raises `UnsupportedError`: torch would hand out the address 0."""
        self.data_ptr()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ScaledStates({list(self.shape)}, {self.dtype}, kept as {self.numbers.dtype})"


def _read_only(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"asked for {what} on K or V of 8 bits, which would write to a copy; they are written by VmmCache.update() only"
    )


def _writes_to(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation writes to `ScaledStates` that it was given."""
    known = operation._schema.arguments
    given = [*zip(known, args), *((each, kwargs.get(each.name)) for each in known)]
    written = [value for each, value in given if each.is_write]
    return any(isinstance(leaf, ScaledStates) for leaf in tree_leaves(written))


def write_quantized(states: Tensor, numbers: Tensor, scales: Tensor) -> None:
    """Writes K or V as 8-bit numbers and their scales, all three as in `ScaledStates`: the bits that the append kernel
    writes, where it cannot run."""
    for here in _pieces(states):
        new_numbers, new_scales = quantize(states[:, :, here], numbers.dtype)
        numbers[:, :, here], scales[:, :, here] = new_numbers, new_scales


def _pieces(states: Tensor) -> Iterator[slice]:
    """Tokens of K or V, `[batch, num_kv_heads, tokens, head_dim]`, some at a time."""
    tokens = states.shape[2]
    step = max(PIECE * tokens // max(states.numel(), 1), 1)
    return (slice(first, first + step) for first in range(0, tokens, step))


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
