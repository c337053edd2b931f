"""What kernels ask of their arguments, checked before anything is launched; and how a checked call is found again.

All but the addresses is checked once for each geometry: looking at tensors costs more than launching a kernel. What a
call's tensors come to is its *plan*, prepared once and found again by one look at the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Number
from operator import index, is_, itemgetter
from types import NoneType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch._C._dynamo.guards import TensorGuards

from .arguments import LATENT_DIM, LATENT_V_DIM, v_dim_of
from .compiler import SIMULATED
from .quantized import LARGEST

ALIGNMENT = 16  # bytes that a thread moves at a time; addresses and strides are multiples of it


class Geometry(NamedTuple):
    """A tensor without its data. Strides are in elements."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


Key = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
"""The fields of a `Geometry`: a plain tuple is made in half the time."""


def keys(tensors: tuple[torch.Tensor | None, ...]) -> tuple[Key | None, ...]:
    """Returns the geometries of tensors that may be missing; raises `TypeError` for an argument that is no tensor."""
    try:
        return tuple([(t.shape, t.stride(), t.dtype, t.device) if t is not None else None for t in tensors])
    except AttributeError:
        others = [each for each in tensors if not isinstance(each, torch.Tensor | None)]
        raise TypeError(f"got {type(others[0]).__name__} {others[0]!r:.80}; it must be a tensor") from None


def check_integer(name: str, number: int) -> int:
    """Returns the number, which may be numpy's; raises `TypeError` unless it is an integer."""
    try:
        return index(number)
    except TypeError:
        raise TypeError(f"got {name} {number!r}; it must be an integer") from None


def check_device(device: torch.device) -> None:
    """Kernels run on CUDA devices, or on host memory in the simulator."""
    if device.type not in ("cuda", "cpu") or (device.type == "cpu") != SIMULATED:
        raise ValueError(
            f"got tensors on {device}; they must be on a CUDA device, or, where NUMBA_ENABLE_CUDASIM=1 was set before "
            "the first import, on the CPU"
        )


def refuse_alignment(*pointers: int) -> None:
    """Raises `ValueError` for addresses, one of which is not a multiple of 16 bytes."""
    got = ", ".join(map(hex, pointers))
    raise ValueError(f"got tensors at {got}; their addresses must be multiples of {ALIGNMENT} bytes")


def check_new(k: Geometry, v: Geometry) -> None:
    """K and V of new tokens: as many tokens and heads, in whole vectors."""
    check_device(k.device)
    if len(k.shape) != 3 or len(v.shape) != 3 or k.shape[:2] != v.shape[:2]:
        raise ValueError(f"got k {list(k.shape)} and v {list(v.shape)}; both must be [tokens, num_kv_heads, head_dim]")
    if 0 in k.shape[1:]:
        raise ValueError(f"got k {list(k.shape)}; num_kv_heads and head_dim must be 1 at least")
    if k.dtype != v.dtype or k.device != v.device:
        raise ValueError(f"got k of {k.dtype} on {k.device} and v of {v.dtype} on {v.device}; they must be the same")
    _check_vectors("k", k)
    _check_vectors("v", v)


def check_cache(name: str, cache: Geometry, like: Geometry | None = None) -> None:
    """A cache in whole vectors, that tensors like `like` can be written to."""
    if len(cache.shape) != 4:
        raise ValueError(f"got {name} {list(cache.shape)}; it must be [rows, tokens, num_kv_heads, head_dim]")
    if like is not None:
        if cache.shape[2:] != like.shape[-2:]:
            heads, width = like.shape[-2:]
            raise ValueError(
                f"got {name} {list(cache.shape)} for {list(like.shape)}; it must end in [{heads}, {width}]"
            )
        _check_kind(name, cache, like.dtype, like.device)
    _check_vectors(name, cache)


def check_scales(
    name: str, cache: Geometry, like: Geometry, scales: Geometry | None, rows: Geometry | None = None
) -> None:
    """8-bit numbers and a scale of each token and head, for tensors like `like`; or of each of the `rows` that a tensor
    has, and head. The name begins with k or v."""
    scales_name = f"{name[0]}_scales"
    if scales is None:
        raise TypeError(f"got {name} of {cache.dtype} for {like.dtype} without {scales_name}, which it must have")
    if cache.dtype not in LARGEST or like.dtype not in ATTENTION_DTYPES:
        raise TypeError(
            f"got {scales_name} for {name} of {cache.dtype} and {like.dtype}; {name} must be one of "
            f"{', '.join(map(str, LARGEST))}, the other one of {', '.join(map(str, ATTENTION_DTYPES))}"
        )
    _check_kind(scales_name, scales, torch.float32, cache.device)
    shape = cache.shape[:3] if rows is None else (*rows.shape[:1], *cache.shape[2:3])
    if scales.shape != shape:
        raise ValueError(f"got {scales_name} {list(scales.shape)}; it must be {list(shape)}")


def check_indices(device: torch.device, shape: tuple[int, ...], **tensors: Geometry | None) -> None:
    """Index tensors, those that are given: int32, on the device, of the given shape, without gaps."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        _check_kind(name, tensor, torch.int32, device)
        if len(shape) != 1 or tensor.shape != shape or not _follow(tensor):
            raise ValueError(f"got {name} {list(tensor.shape)}; it must be contiguous {list(shape)}")


def check_block_table(device: torch.device, table: Geometry, cache: Geometry) -> None:
    """A block table, and blocks of whole units of 16 tokens, which is how many kernels look up at a time."""
    if len(table.shape) != 2 or not _follow(table):
        raise ValueError(f"got block_table {list(table.shape)}; it must be [max_sequences, max_blocks], in order")
    _check_kind("block_table", table, torch.int32, device)
    if not cache.shape[1] or cache.shape[1] % 16:
        raise ValueError(f"got blocks of {cache.shape[1]} tokens; the block size must be a multiple of 16")


def _check_kind(name: str, tensor: Geometry, dtype: torch.dtype, device: torch.device) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"got {name} of {tensor.dtype}; it must be {dtype}")
    if tensor.device != device:
        raise ValueError(f"got {name} on {tensor.device}; the other tensors are on {device}")


def check_written(**tensors: Geometry) -> None:
    """Refuses tensors to write to that repeat themselves by a stride of 0; other overlaps are not found."""
    for name, tensor in tensors.items():
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.strides)):
            raise ValueError(f"got {name} of strides {tensor.strides}; it must not repeat itself, since it is written")


def _follow(tensor: Geometry) -> bool:
    """Whether elements of the last dimension follow each other."""
    return tensor.strides[-1] == 1 or tensor.shape[-1] <= 1


def _check_vectors(name: str, tensor: Geometry) -> None:
    if not tensor.shape[-1]:  # nothing of it is moved
        return
    size = tensor.dtype.itemsize
    steps = [tensor.shape[-1] * size, *(stride * size for stride in tensor.strides[:-1])]
    if tensor.strides[-1] != 1 or any(step % ALIGNMENT for step in steps):
        raise ValueError(
            f"{name} has strides {tensor.strides} and a last dimension of {tensor.shape[-1]}: the last stride must be "
            f"1, its width and other strides multiples of {ALIGNMENT} bytes"
        )


ATTENTION_DTYPES = torch.float32, torch.float16, torch.bfloat16  # dtypes that kernels compute with


def check_rotation(k: Geometry, query: Geometry, rotated: Geometry, cos: Geometry, sin: Geometry) -> None:
    """Queries `[tokens, num_heads, head_dim]` like `k`, where they go, and angles `[tokens, rotary_dim]`."""
    if k.dtype not in ATTENTION_DTYPES:
        raise TypeError(f"got k of {k.dtype} to rotate; it must be one of {', '.join(map(str, ATTENTION_DTYPES))}")
    check_written(rotated=rotated)
    tokens, _, head_dim = k.shape
    if len(query.shape) != 3 or query.shape[::2] != (tokens, head_dim) or rotated.shape != query.shape:
        raise ValueError(
            f"got query {list(query.shape)} and rotated {list(rotated.shape)} for k {list(k.shape)}; "
            "both must be [tokens, num_heads, head_dim]"
        )
    if cos.shape != sin.shape or len(cos.shape) != 2 or cos.shape[0] != tokens or not 0 < cos.shape[1] <= head_dim:
        raise ValueError(
            f"got cos {list(cos.shape)} and sin {list(sin.shape)} for k {list(k.shape)}; "
            "both must be [tokens, rotary_dim], not wider than heads"
        )
    if cos.shape[1] * k.dtype.itemsize % (2 * ALIGNMENT):
        raise ValueError(f"got cos {list(cos.shape)} of {cos.dtype}; half its width must be a multiple of 16 bytes")
    for name, tensor in {"query": query, "rotated": rotated, "cos": cos, "sin": sin}.items():
        _check_kind(name, tensor, k.dtype, k.device)
        _check_vectors(name, tensor)


HEAD_DIMS = 64, 80, 96, 128, 192, 256  # widths of heads that attention kernels are made for


def check_attention(
    q: Geometry, k: Geometry, v: Geometry, out: Geometry, k_scales: Geometry | None, v_scales: Geometry | None
) -> None:
    """Queries `[..., num_heads, head_dim]` and a cache that they can attend to."""
    check_device(q.device)
    check_written(out=out)
    if q.dtype not in ATTENTION_DTYPES:
        raise TypeError(f"got q of {q.dtype}; it must be one of {', '.join(map(str, ATTENTION_DTYPES))}")
    if len(q.shape) < 3:
        raise ValueError(f"got q {list(q.shape)}; it must end in num_heads and head_dim")
    if q.shape[-1] not in (*HEAD_DIMS, LATENT_DIM):
        known = ", ".join(map(str, HEAD_DIMS))
        raise ValueError(f"got heads of {q.shape[-1]}; head_dim must be one of {known}, or {LATENT_DIM} of latents")
    if q.shape[-1] == LATENT_DIM:
        _check_latents(k, v)
    elif len(k.shape) != 4 or k.shape != v.shape:
        raise ValueError(
            f"got k {list(k.shape)} and v {list(v.shape)}; both must be [rows, tokens, num_kv_heads, head_dim]"
        )
    if q.shape[-1] != k.shape[3] or 0 in (k.shape[2], q.shape[-2]) or q.shape[-2] % k.shape[2]:
        raise ValueError(
            f"got q {list(q.shape)} for k {list(k.shape)}; "
            "head_dim must be the same, and num_heads a multiple of num_kv_heads, neither of them 0"
        )
    expected = [*q.shape[:-1], v_dim_of(q.shape[-1])]
    if list(out.shape) != expected:
        raise ValueError(f"got out {list(out.shape)} for q {list(q.shape)}; it must be {expected}")
    for name, tensor, scales in ("k", k, k_scales), ("v", v, v_scales), ("out", out, None):
        if scales is not None or (tensor.dtype in LARGEST and name != "out"):
            check_scales(name, tensor, q, scales)
        else:
            _check_kind(name, tensor, q.dtype, q.device)
        if tensor.device != q.device:
            raise ValueError(f"got {name} on {tensor.device}; q is on {q.device}")
    if k.dtype != v.dtype:
        raise TypeError(f"got k of {k.dtype} and v of {v.dtype}; they must be the same")
    for name, tensor in {"q": q, "k": k, "v": v, "out": out}.items():
        _check_vectors(name, tensor)


def _check_latents(k: Geometry, v: Geometry) -> None:
    """One KV head of latents, of which V is a view; whether it begins where they do, each call says."""
    if len(k.shape) != 4 or k.shape[2:] != (1, LATENT_DIM) or k.dtype in LARGEST:
        raise ValueError(
            f"got latents k {list(k.shape)} of {k.dtype}; they must be [rows, tokens, 1, {LATENT_DIM}], not of 8 bits"
        )
    if v.shape != (*k.shape[:3], LATENT_V_DIM) or v.strides != k.strides:
        raise ValueError(
            f"got v {list(v.shape)} of strides {v.strides} for latents k {list(k.shape)} of strides {k.strides}; "
            f"it must be their view k[..., :{LATENT_V_DIM}]"
        )


def check_sinks(sinks: Geometry, q: Geometry) -> None:
    """A logit for each query head."""
    _check_kind("sinks", sinks, torch.float32, q.device)
    if sinks.shape != q.shape[-2:-1] or not _follow(sinks):
        raise ValueError(f"got sinks {list(sinks.shape)}; it must be contiguous {list(q.shape[-2:-1])}")


Found = TypeVar("Found")
Tensors = tuple[torch.Tensor | None, ...]
Picker = Callable[[Tensors], tuple[torch.Tensor, ...]]

RECENT = 4  # plans that are found at one look: of layers that take turns there are few kinds


class Known(NamedTuple):
    """A plan, and how to see whether it is that of a call."""

    options: tuple[Any, ...]
    distinct: Picker  # the tensors that are given, each once: torch compares none that is there twice
    twins: list[tuple[int, int]]  # where one is again, and where it was first
    missing: Picker
    nones: tuple[None, ...]  # as many as are missing
    check: Callable[..., bool]  # whether distinct tensors look like those of the earlier call
    plan: Any


def pick(where: Sequence[int]) -> Picker:
    """A function that picks the items at some places, in a tuple."""
    if len(where) > 1:
        return itemgetter(*where)
    return lambda tensors: tuple([tensors[place] for place in where])  # type: ignore[misc]


def same(tensors: Tensors, twins: list[tuple[int, int]]) -> bool:
    """Whether tensors that were the same are again."""
    return all(tensors[again] is tensors[first] for again, first in twins)


def addresses_of(tensors: Tensors) -> list[int]:
    """The addresses of the tensors that are given."""
    return [each.data_ptr() for each in tensors if each is not None]


def check_memory(tensors: Tensors) -> None:
    """Raises `TypeError` for one that has numbers, and no address: to kernels it would be one that is not given."""
    for each in tensors:
        if each is not None and each.numel() and not each.data_ptr():
            raise TypeError(
                f"got {type(each).__name__} {list(each.shape)} without memory of its own; tensors must be plain ones: "
                "of a DTensor its to_local()"
            )


def know(tensors: Tensors, options: tuple[Any, ...], plan: Any) -> Known:
    """A plan, to be found for tensors like these."""
    names = [*map(id, (*tensors, None))]
    *firsts, nothing = map(names.index, names)  # where each tensor is first
    missing = [place for place, first in enumerate(firsts) if first == nothing]
    distinct = pick([place for place, first in enumerate(firsts) if first == place != nothing])
    twins = [(place, first) for place, first in enumerate(firsts) if first not in (place, nothing)]
    guards = TensorGuards(*distinct(tensors), dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return Known(options, distinct, twins, pick(missing), (None,) * len(missing), guards.check, plan)


class Plans(Generic[Found]):
    """The plans of a function's calls: `make` checks given options and `keys`, and makes their plan, or has it.

    To make the key of ten tensors takes longer than to launch a kernel. torch compares tensors with those of an earlier
    call, in all that a key says and more, in a fraction of the time. So the last few plans are tried that way first.
    """

    def __init__(self, make: Callable[..., Found]) -> None:
        self._make = make
        self._recent: tuple[Known, ...] = ()

    def find(self, tensors: Tensors, *options: Any) -> tuple[Found, list[int]]:
        """The plan for tensors, some of which may be missing, and options, which are numbers, strings and None; and the
        addresses of the tensors that are there. Raises what `make` does."""
        # Replaced as a whole: other threads see the old or the new.
        for known, distinct, twins, missing, nones, check, plan in self._recent:
            given = distinct(tensors)
            is_missing = map(is_, missing(tensors), nones)  # to ask torch whether a tensor equals None takes long
            if known == options and check(*given) and all(is_missing) and (not twins or same(tensors, twins)):
                return plan, addresses_of(tensors if twins else given)
        if not all(isinstance(option, (int, float, str, NoneType, Number)) for option in options):
            raise TypeError(f"got {options}; each must be a number or a string: others may change unseen")
        plan, addresses = self._make(*options, keys(tensors)), addresses_of(tensors)
        if not all(addresses):
            check_memory(tensors)
        self._recent = know(tensors, options, plan), *self._recent[: RECENT - 1]
        return plan, addresses
