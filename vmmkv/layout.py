"""How the K and V of one token lie in memory: pure arithmetic, no memory.

A row is token-major: `[max_seq_len][layer][K, V][num_kv_heads][head_dim]`. All layers of a token lie side
by side in its *token record*, so that a 2 MiB page holds a few tokens of every layer rather than many
tokens of one. A layer is an offset into the record; all layers of a range share one token stride.

Scales of 8-bit K and V, where a layout has them for each token, are the record's last bytes:
`[layer][num_kv_heads][K, V]`. So K and V lie where they would without, and the two that a kernel needs together come
together. Scales of whole sequences are no part of it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from .errors import ArgumentError, DtypeError, LayoutError

ALIGNMENT = 16
"""Bytes that K and V of each layer are aligned to: what vector loads, TMA and SDPA ask for."""

MAX_LAYERS = 1 << 20
"""Far more than any model has: each takes a few objects."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)

SCALES = "token_head", "sequence_head"
"""What there is a scale of: a head of a token, or of a whole sequence."""

SCALED_DTYPES = torch.float8_e4m3fn, torch.int8
"""What scales are kept for."""

SCALE_BYTES = torch.float32.itemsize
"""Of a scale, which is fp32: fp16 would save little beside a head's numbers, cannot hold the scale of every bf16, and
is not what attention kernels take."""


@dataclass(frozen=True)
class LayerLayout:
    """One layer's place in the token record of its range. Offsets and widths are in elements.

    Attributes:
        range: the number of that range, for `KVCache.range`.
        num_kv_heads: KV heads.
        k_head_dim: width of a K head.
        v_head_dim: width of a V head; 0: it keeps no V.
        k_offset: where K begins in the record, `[num_kv_heads, k_head_dim]`.
        v_offset: where V begins, likewise.
        scales_offset: where the scales of its heads begin, in scales; None: the layout has none in token records.
    """

    range: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    k_offset: int
    v_offset: int
    scales_offset: int | None = None


@dataclass(frozen=True)
class KVLayout:
    """The shape of a model's KV cache, for one token.

    Args:
        num_layers: layers that keep K and V, up to 2**20.
        num_kv_heads: KV heads, one number or one per layer (variable GQA).
        head_dim: width of a K head, one number or one per layer.
        dtype: fp32, fp16, bf16, fp8 (e4m3fn, e5m2) or int8.
        v_head_dim: width of a V head if it differs from K (latent attention), one number or one per layer; 0 if a layer
            keeps no V.
        layers_per_range: layers that share a token record. None is all of them: pages then hold the fewest tokens, so
            the least is wasted. Fewer layers make a smaller stride, for kernels that compute strides in 32 bits (see
            `int32_token_limit`).
        scales: "token_head" keeps fp32 scales, one for K and one for V of each token and head, for e4m3fn and int8 (see
            `KVCache.scaled_kv`). "sequence_head" keeps them for each sequence, layer and head, outside of token
            records: you set them (see `KVCache.sequence_scales`). None keeps none: the meaning of 8-bit K and V is then
            up to you.

    Raises:
        LayoutError: a size is no whole number, not positive, or too large, a list is not `num_layers` long, or there
            are no such scales.
        DtypeError: the dtype is not one of those above, or has no scales.
    """

    num_layers: int
    num_kv_heads: int | Sequence[int]
    head_dim: int | Sequence[int]
    dtype: torch.dtype = torch.bfloat16
    v_head_dim: int | Sequence[int] | None = None
    layers_per_range: int | None = None
    scales: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            known = ", ".join(map(str, DTYPES))
            kind = "" if isinstance(self.dtype, torch.dtype) else f" of type {type(self.dtype).__name__}"
            raise DtypeError(f"got dtype={self.dtype!r}{kind}; it must be one of {known}")
        if self.scales not in (None, *SCALES):
            raise LayoutError(
                f"asked for scales={self.scales!r}; vmmkv keeps scales by {' or '.join(map(repr, SCALES))}, or None"
            )
        if self.scales and self.dtype not in SCALED_DTYPES:
            raise DtypeError(f"asked for scales of {self.dtype}; it must be one of float8_e4m3fn, int8, or scales=None")
        for name in ("num_layers", "layers_per_range"):
            value = getattr(self, name)
            if name == "num_layers" or value is not None:
                object.__setattr__(self, name, whole_number(name, value, least=1))  # numpy's may overflow
        if self.num_layers > MAX_LAYERS:
            raise LayoutError(f"asked for num_layers={self.num_layers}; a cache has at most {MAX_LAYERS}")
        for name, smallest in (("num_kv_heads", 1), ("head_dim", 1), ("v_head_dim", 0)):
            value = getattr(self, name)
            if isinstance(value, Sequence) and not isinstance(value, str):
                value = tuple(whole_number(name, each) for each in value)
                if len(value) != self.num_layers:
                    raise LayoutError(f"{name} has {len(value)} entries for {self.num_layers} layers")
            elif value is not None or name != "v_head_dim":
                value = whole_number(name, value)
            object.__setattr__(self, name, value)  # a frozen layout is hashable
            if value is not None and min(self._per_layer(value)) < smallest:
                raise LayoutError(f"asked for {name}={value}; it must be at least {smallest}")

    def _per_layer(self, value: int | Sequence[int]) -> Sequence[int]:
        return value if isinstance(value, Sequence) else (value,) * self.num_layers

    @property
    def layers(self) -> tuple[LayerLayout, ...]:
        """Where each layer lies."""
        return self._placed[0]

    @property
    def record_bytes(self) -> tuple[int, ...]:
        """Bytes of a token record in each range: the stride from one token to the next."""
        return self._placed[1]

    @cached_property
    def _placed(self) -> tuple[tuple[LayerLayout, ...], tuple[int, ...]]:
        """The layers, and the bytes of each range's record: K and V of its layers, and then their scales."""
        item, step = self.dtype.itemsize, ALIGNMENT // self.dtype.itemsize
        layers, records = list[LayerLayout](), list[int]()
        v_head_dim = self.head_dim if self.v_head_dim is None else self.v_head_dim
        shapes = [*zip(*map(self._per_layer, (self.num_kv_heads, self.head_dim, v_head_dim)))]
        count = self.layers_per_range or self.num_layers
        for first in range(0, self.num_layers, count):
            end, placed = 0, []
            for heads, k_dim, v_dim in shapes[first : first + count]:
                k_offset, v_offset = end, end + round_up(heads * k_dim, step)
                placed.append(LayerLayout(len(records), heads, k_dim, v_dim, k_offset, v_offset))
                end = v_offset + round_up(heads * v_dim, step)
            nbytes = end * item
            if self.scales == "token_head":
                for index, layer in enumerate(placed):
                    placed[index] = replace(layer, scales_offset=nbytes // SCALE_BYTES)
                    nbytes += 2 * layer.num_kv_heads * SCALE_BYTES
            layers += placed
            records.append(round_up(nbytes, ALIGNMENT))
        return tuple(layers), tuple(records)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes that one token takes in all ranges."""
        return sum(self.record_bytes)

    @cached_property
    def int32_token_limit(self) -> int:
        """The tokens of a row that a kernel can address if it computes `token * stride` in 32 bits.

        PyTorch's memory-efficient SDPA does: after `2**31 / stride` tokens (the stride in elements) it wraps and
        silently reads other tokens.
        """
        return 2**31 // (max(self.record_bytes) // self.dtype.itemsize)

    def pages(self, tokens: int, page_size: int) -> int:
        """Pages, of `page_size` bytes, that a sequence of `tokens` tokens takes in all ranges."""
        return sum(-(-tokens * record // page_size) for record in self.record_bytes)


def dtype_from_name(name: str | None) -> torch.dtype:
    """The dtype called `name`, bfloat16 for None. Raises `DtypeError` for one that vmmkv does not hold."""
    names = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    dtype = names.get(str(name or "bfloat16"))
    if dtype is None:
        raise DtypeError(f"asked for K and V as {name}; vmmkv holds {', '.join(names)}")
    return dtype


KV_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""What K and V may be kept in, with scales, instead of a model's own dtype, by the name that users give it."""


def kv_dtype_from_name(name: str | None) -> torch.dtype | None:
    """The 8-bit format called `name`; None, K and V in their own dtype, for None. Raises `DtypeError`."""
    if name is None:
        return None
    if not isinstance(name, str) or name not in KV_DTYPES:
        raise DtypeError(
            f"asked for kv_dtype={name!r}; it must be one of {', '.join(map(repr, KV_DTYPES))}, or None: K and V in "
            "the model's dtype"
        )
    return KV_DTYPES[name]


def as_index(name: str, value: object) -> int:
    """What was given under a name, where it is a whole number; a truth value is none. Raises `ArgumentError`."""
    with suppress(TypeError):
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    raise ArgumentError(f"got {name}={value!r}; it must be a whole number")


def whole_number(name: str, value: object, least: int | None = None) -> int:
    """What was given under a name, where it is a whole number, as a size, of at least `least`. Raises `LayoutError`."""
    try:
        number = as_index(name, value)
    except ArgumentError as error:
        raise LayoutError(str(error)) from None
    if number.bit_length() > 63:
        raise LayoutError(f"asked for {name}={shown(number)}; no such size has more than 63 bits")
    if least is not None and number < least:
        raise LayoutError(f"asked for {name}={number}; it is at least {least}")
    return number


def shown(number: int) -> str:
    """A number for a message; of one that Python does not write out, how long it is."""
    return str(number) if number.bit_length() < 2000 else f"a number of {number.bit_length()} bits"


def round_up(value: Any, multiple: int) -> Any:
    """The next multiple, of a number or of each of an array."""
    return -(-value // multiple) * multiple
