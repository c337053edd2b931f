"""Tensor maps: how Hopper's copy engine sees K or V, whatever its strides."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from .arguments import Maps
from .checks import Geometry, Key
from .context import driver
from .hopper import PANEL, ROW_BYTES, simulated_maps, swizzled
from .ptx import SIMULATED


def can_be_mapped(tensor: Geometry) -> bool:
    """Whether there can be a tensor map of it: rows of 1 TiB are too far apart."""
    steps = [stride * tensor.dtype.itemsize for stride in tensor.strides[:-1]]
    return max(tensor.shape) <= 1 << 32 and max(steps) < 1 << 40


class SimulatedMap(NamedTuple):
    """What a tensor map holds, for the simulator."""

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box_tokens: int

    def copy(self, target: int, place: tuple[int, ...]) -> int:
        """Copies the box at a place; its bytes."""
        element, head, token, row = place
        width, heads, tokens, rows = self.sizes
        inside = 0 <= head < heads and 0 <= token <= tokens - self.box_tokens and 0 <= row < rows
        assert inside, "a copy from outside touches the tensor's first page"
        for index, vector in product(range(self.box_tokens), range(0, PANEL, 8)):
            position = element + vector, head, token + index, row
            to = swizzled(target + index * ROW_BYTES + vector * 2)
            if position[0] < width:
                source = self.address + position[0] * 2 + sum(np.multiply(position[1:], self.strides).tolist())
                ctypes.memmove(to, source, 16)
            else:
                ctypes.memset(to, 0, 16)
        return self.box_tokens * ROW_BYTES


@lru_cache(16)
def maps_of(k: Key | None, v: Key | None, box_tokens: int) -> Callable[[int, int], Maps]:
    """A function of the addresses of K and V that gives their maps."""
    assert k
    assert v

    @lru_cache(1024)  # a model has some for each layer
    def maps_at(k_address: int, v_address: int) -> Maps:
        tensors = (k_address, k), (v_address, v)
        return Maps(*[_encode(*each, box) for box in (box_tokens, 1) for each in tensors])

    return maps_at


def _encode(address: int, key: Key, box_tokens: int) -> Any:
    """A map of a 16-bit tensor `[rows, tokens, heads, head_dim]`, for boxes of `box_tokens` of one head and panel.

    Returns:
        its 128 bytes; for the simulator, a number.
    """
    shape, strides, dtype, _ = key
    assert can_be_mapped(Geometry._make(key)), "the driver refuses it"
    sizes = tuple(reversed(shape))
    steps = tuple(stride * dtype.itemsize for stride in reversed(strides[:-1]))
    if SIMULATED:
        simulated_maps.append(SimulatedMap(address, sizes, steps, box_tokens))
        return len(simulated_maps) - 1
    cu = driver()
    kinds = cu.CUtensorMapDataType
    status, encoded = cu.cuTensorMapEncodeTiled(
        kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if dtype == torch.bfloat16 else kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        4,
        address,
        [cu.cuuint64_t(size) for size in sizes],
        [cu.cuuint64_t(step) for step in steps],
        [cu.cuuint32_t(size) for size in (PANEL, 1, box_tokens, 1)],
        [cu.cuuint32_t(1)] * 4,
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled failed with {status.name} for {list(shape)} of strides {strides}")
    return ctypes.string_at(encoded.getPtr(), 128)
