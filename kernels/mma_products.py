"""Products of a warp's 16 queries and a tile of K or V in shared memory, on the tensor cores of any GPU since Ampere.

Scores, and sums of V, are those of products [16 x 8], four floats a lane in each, one behind the other (see `softmax`).
Rows in shared memory are 16 bytes longer than their data: an odd number of 16-byte columns lets eight rows be read at
once.
"""

from __future__ import annotations

from typing import Any

import torch

from .arithmetic import HALVES
from .ptx import float32, inlined
from .warp import load_matrices, load_matrices_transposed
from .warp import multiply as multiplications


def pitch_of(head_dim: int) -> int:
    """Bytes from one row in shared memory to the next."""
    return head_dim * 2 + 16


def make_add(dtype: torch.dtype) -> Any:
    """A function for kernels that adds a product [16 x 16] to sums, from one on."""
    multiply = multiplications[dtype]

    @inlined
    def add(sums: Any, at: int, a: Any, b: Any) -> None:
        for half in range(2):
            s = at + 4 * half
            d = multiply(
                sums[s], sums[s + 1], sums[s + 2], sums[s + 3], a[0], a[1], a[2], a[3], b[2 * half], b[2 * half + 1]
            )  # fmt: skip
            for i in range(4):
                sums[s + i] = d[i]

    return add


def make_score(dtype: torch.dtype, head_dim: int, tile: int) -> Any:
    """A function for kernels: `scores = Q K^T` of queries and a tile of K, by their addresses."""
    add, pitch = make_add(dtype), pitch_of(head_dim)

    @inlined
    def score(scores: Any, queries: int, k: int, lane: int) -> None:
        for i in range(tile // 2):
            scores[i] = float32(0)
        for step in range(head_dim // 16):
            a = load_matrices(queries + (lane & 15) * pitch + step * 32 + (lane >> 4) * 16)
            for j in range(tile // 16):
                token = j * 16 + (lane & 7) + (lane >> 4) * 8
                add(scores, 8 * j, a, load_matrices(k + token * pitch + step * 32 + (lane >> 3 & 1) * 16))

    return score


def make_add_values(dtype: torch.dtype, dims: int) -> Any:
    """A function for kernels: `sums += P V` of 16 keys of a tile, and so many dims of V."""
    add, pack = make_add(dtype), HALVES[dtype].pack

    @inlined
    def add_values(sums: Any, weights: Any, w: int, v: int) -> None:
        """Their weights begin at `w`; `v` is the address of this lane's row of the first matrices."""
        p0, p1 = pack(weights[w], weights[w + 1]), pack(weights[w + 2], weights[w + 3])
        p2, p3 = pack(weights[w + 4], weights[w + 5]), pack(weights[w + 6], weights[w + 7])
        for i in range(dims // 16):
            add(sums, 8 * i, (p0, p1, p2, p3), load_matrices_transposed(v + i * 32))

    return add_values
