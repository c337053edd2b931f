"""Tensors that stand in for masks, K and V; only vmmkv's attention reads what they are made of.

`Spans` are a mask, in place of the mask of eager attention, where they say it all. `ScaledStates` are K or V that are
kept as 8-bit numbers and their scales; `vmmkv.kernels.quantized` says how numbers are made. `WholeRows` are K or V with
memory for live tokens only.

The mask of SDPA is bool; some models compute with masks, and know only those that are added to scores. Of transformers
`make_mask` depends on how `masking_utils` composes mask functions, and on the keywords that it gives to masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedConfig
from transformers.masking_utils import and_masks, causal_mask_function, eager_mask, sliding_window_overlay
from transformers.utils import logging

from ..errors import DtypeError, UnsupportedAttentionError, UnsupportedError
from ..kernels.checks import ATTENTION_DTYPES
from ..kernels.quantized import dequantize, quantize

NAME = "vmmkv"  # the `attn_implementation` that reads them
_COPIES = torch.ops.aten.detach.default, torch.ops.aten.alias.default
_MOVE = torch.ops.aten._to_copy.default
_SLICE = torch.ops.aten.slice.Tensor
PIECE = 1 << 22  # numbers that are rounded, or made wide, at a time, which takes a few times 16 MiB in fp32
MAX_TOKENS = 2**31 - 1  # of K and V: spans are int32

logger = logging.get_logger(__name__)


class Spans(Tensor):
    """A mask without elements, which looks like a bool tensor `[batch, 1, q_length, kv_length]`, and says which tokens
    each query sees.

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


def attention_of(config: PreTrainedConfig) -> str:
    """The name of the attention that a model runs."""
    return str(config.get_text_config(decoder=True)._attn_implementation)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The function that transformers calls to make a mask; its arguments are those of `eager_mask`.

    It checks whether the attention mask pads on the left, which waits for the GPU. Inside graphs it cannot: there the
    device asserts it.

    Returns:
        `Spans`, or what `eager_mask` returns if spans cannot express which tokens each query sees.
    """
    window = _window_of(mask_function, q_length, kwargs)
    end, first = q_offset + q_length, torch.zeros(batch_size, dtype=torch.int64, device=device)
    lacking = "this pattern of attention" if window is None or kv_length > MAX_TOKENS else None
    if not lacking and attention_mask is not None:
        first, left_padded = _left_padding(attention_mask, end)
        if torch.compiler.is_compiling() or (left_padded.is_cuda and torch.cuda.is_current_stream_capturing()):
            torch._assert_async(left_padded, "the attention mask must pad on the left only")
        elif not left_padded:
            lacking = "attention masks other than left padding"
    if window is None or lacking:
        warn(str(lacking))
        if not getattr(kwargs.get("config"), "is_causal", True):
            kwargs["allow_is_bidirectional_skip"] = False  # its attention would take no mask for a causal one
        return eager_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,  # type: ignore[arg-type]
            kv_offset,
            mask_function,
            attention_mask,
            device=device,
            **kwargs,
        )
    if window:
        first = torch.clamp(first, min=q_offset + 1 - window)
    first, last = (token - kv_offset for token in (first, torch.zeros_like(first) + end))
    return Spans(first.clamp(min=0).int(), last.clamp(min=0).int(), window, (batch_size, 1, q_length, kv_length))


def _window_of(mask_function: Callable[..., Any], q_length: int, kwargs: dict[str, Any]) -> int | None:
    """The window of a causal mask, 0 if it has none; None of any other mask."""
    if kwargs.get("use_vmap"):
        return None
    if mask_function is causal_mask_function:
        return 0
    if getattr(mask_function, "__code__", None) is not _AND:
        return None
    if torch.compiler.is_compiling():  # a compiler cannot look into functions
        is_altered = not kwargs.get("allow_is_causal_skip", True) and q_length > 1
        is_other = "allow_is_bidirectional_skip" in kwargs or getattr(kwargs["config"], "attention_chunk_size", None)
        window = None if is_altered or is_other else kwargs.get("local_size")
    else:
        overlay, *others = _captured(mask_function)
        is_window = others == [causal_mask_function] and getattr(overlay, "__code__", None) is _WINDOW
        window = _captured(overlay) if is_window else None
    return window if window and window > 0 else None


def _captured(function: Callable[..., Any]) -> Any:
    """The content of the closure of a function that transformers has made."""
    (cell,) = function.__closure__ or ()
    return cell.cell_contents


_AND, _WINDOW = and_masks(causal_mask_function).__code__, sliding_window_overlay(1).__code__
"""Causal windows of transformers are `and_masks(sliding_window_overlay(window), causal_mask_function)`."""


def _left_padding(attention_mask: Tensor, end: int | Tensor) -> tuple[Tensor, Tensor]:
    """Each sequence's first token, int64 `[batch]`, and whether all tokens from there to `end` are unmasked."""
    token = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    first = (attention_mask.cumsum(-1) == 0).sum(-1)
    seen = attention_mask | (token < first[:, None]) | (token >= end)
    return first, seen.all() & torch.as_tensor(end <= attention_mask.shape[1], device=token.device)


def warn(lacking: str) -> None:
    """Warns once that something runs without kernels."""
    if torch.compiler.is_compiling():
        return
    logger.warning_once(
        f'attn_implementation="{NAME}" has no kernels for {lacking}; attention runs on SDPA (or the model\'s own) there'
    )


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
        if operation in _COPIES:
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
        if operation in _COPIES:
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
