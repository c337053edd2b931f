"""Moving the heads of one token, 16 bytes per thread and turn."""

from __future__ import annotations

from typing import Any

from numba import cuda

from .memory import load_16, store_16
from .ptx import inlined

THREADS = 128
"""Threads of a block that moves a token."""


@inlined
def move_heads(source: int, target: int, source_head: int, target_head: int, vectors: int, head_vectors: int) -> None:
    """Copies one token's heads from address `source` to address `target`.

    Args:
        source_head, target_head: bytes from one head to the next.
        vectors, head_vectors: 16-byte vectors of the token and of a head; constants.
    """
    vector = cuda.threadIdx.x
    while vector < vectors:
        head = vector // head_vectors
        inside = (vector - head * head_vectors) * 16
        a, b, c, d = load_16(source + head * source_head + inside)
        store_16(target + head * target_head + inside, a, b, c, d)
        vector += THREADS


def make_copy_heads(vectors: int, head_vectors: int) -> Any:
    """A function for kernels that copies one token's heads as they are: `quantizing.make_quantize_heads` without
    scales and angles."""

    @inlined
    def copy_heads(
        source: int, target: int, scales: int, source_head: int, target_head: int, scale_head: int, cos: int, sin: int
    ) -> None:
        move_heads(source, target, source_head, target_head, vectors, head_vectors)

    return copy_heads
