"""What threads do together: exchange of registers and products on tensor cores in a warp, barriers of several."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .arithmetic import HALVES
from .ptx import SIMULATED, inlined, instruction

if SIMULATED:
    from .simulator import current, warp_meets

LANES = np.arange(32)
ROW, PAIR = LANES // 4, LANES % 4
"""Of a lane in a tensor-core fragment: its row (or column), and which two elements of it."""


def _shuffle_xor(value: Any, mask: int) -> Any:
    return warp_meets("shuffle_xor", value, lambda values: [values[lane ^ int(mask)] for lane in range(32)])


def _shuffle_up(value: Any, distance: int) -> Any:
    return warp_meets(
        "shuffle_up",
        value,
        lambda values: [values[i - int(distance)] if i >= distance else values[i] for i in range(32)],
    )


def _shuffle(value: Any, lane: int) -> Any:
    return warp_meets("shuffle", (value, lane), lambda brought: [brought[int(source) % 32][0] for _, source in brought])


def _count_true(condition: int) -> int:
    return int(warp_meets("count_true", condition, lambda conditions: [sum(map(bool, conditions))] * 32))


def _any_lane(condition: int) -> int:
    return int(warp_meets("any_lane", condition, lambda conditions: [any(conditions)] * 32))


def _transpose(word: int) -> Any:
    def work_out(words: list[Any]) -> list[Any]:
        matrix = np.array(words, np.uint32).view(np.uint16).reshape(8, 8)
        return list(np.ascontiguousarray(matrix.T).view(np.uint32).reshape(32))

    return warp_meets("transpose", word, work_out)


def _load_matrices(transposed: bool) -> Any:
    def work_out(addresses: list[int]) -> list[Any]:
        result = np.zeros((32, 4), np.uint32)
        for index in range(4):
            rows = [(ctypes.c_uint16 * 8).from_address(address) for address in addresses[8 * index : 8 * index + 8]]
            matrix = np.array(rows, np.uint16)
            result[:, index] = np.ascontiguousarray(matrix.T if transposed else matrix).view(np.uint32).reshape(32)
        return [tuple(words) for words in result]

    return lambda address: warp_meets("load_matrices", int(address), work_out)


# Where a matrix's elements are among the 16-bit halves of fragments, of which a lane has 8 of A and 4 of B.
A_PLACES = np.fromfunction(
    lambda row, k: (row % 8 * 4 + k % 8 // 2) * 12 + (row // 8 + k // 8 * 2) * 2 + k % 2, (16, 16), dtype=np.intp
)
B_PLACES = np.fromfunction(
    lambda k, column: (column * 4 + k % 8 // 2) * 12 + (4 + k // 8) * 2 + k % 2, (16, 8), dtype=np.intp
)
PRODUCT_PLACES = np.stack([(ROW + i // 2 * 8) * 8 + 2 * PAIR + i % 2 for i in range(4)], 1)
"""Of a lane's four sums in a product [16 x 8]."""


def _multiply(values: Any) -> Any:
    def work_out(brought: list[Any]) -> Any:
        sums = np.array([operands[:4] for operands in brought], np.float32)
        halves = values(np.array([operands[4:] for operands in brought], np.uint32).view(np.uint16).reshape(-1))
        with np.errstate(invalid="ignore", over="ignore"):
            sums += (halves[A_PLACES] @ halves[B_PLACES]).reshape(-1)[PRODUCT_PLACES]
        return list(zip(*[iter(sums.reshape(-1))] * 4))

    return lambda *operands: warp_meets("multiply", operands, work_out)


def _shuffle_instruction(mode: str, kind: str, meaning: Any, clamp: int = 31) -> Any:
    """Of floats or, as 64-bit integers, of counts below 2**32."""
    if kind == "f":
        asm = f"shfl.sync.{mode}.b32 $0, $1, $2, {clamp}, -1;"
        return instruction(asm, "f", "fr", meaning, reads_only=True, convergent=True)
    asm = f"{{ .reg .u32 v; cvt.u32.u64 v, $1; shfl.sync.{mode}.b32 v, v, $2, {clamp}, -1; cvt.u64.u32 $0, v; }}"
    return instruction(asm, "l", "lr", meaning, reads_only=True, convergent=True)


shuffle_xor = _shuffle_instruction("bfly", "f", _shuffle_xor)
"""A float of the lane whose number differs in the bits of a mask."""

shuffle = _shuffle_instruction("idx", "f", _shuffle)
"""A float of a given lane."""

shuffle_xor_count = _shuffle_instruction("bfly", "l", _shuffle_xor)
"""A count of the lane whose number differs in the bits of a mask."""

shuffle_up_count = _shuffle_instruction("up", "l", _shuffle_up, clamp=0)
"""A count of the lane that is a distance before; the first lanes get their own."""

shuffle_count = _shuffle_instruction("idx", "l", _shuffle)
"""A count of a given lane."""

count_true = instruction(
    "{ .reg .pred p; .reg .u32 v; setp.ne.s64 p, $1, 0; vote.sync.ballot.b32 v, p, -1; popc.b32 v, v; "
    "cvt.u64.u32 $0, v; }",
    "l", "l", _count_true, reads_only=True, convergent=True,
)  # fmt: skip
"""In how many lanes a condition, as an integer, is not 0."""

any_lane = instruction(
    "{ .reg .pred p; setp.ne.s64 p, $1, 0; vote.sync.any.pred p, p, -1; selp.s64 $0, 1, 0, p; }",
    "l", "l", _any_lane, reads_only=True, convergent=True,
)  # fmt: skip
"""1 if a condition, as an integer, is not 0 in some lane."""

sync_warp = instruction(
    "bar.warp.sync -1;", "", "", lambda: warp_meets("sync_warp", None, lambda values: values), convergent=True
)
"""What the other lanes did before is done."""

transpose = instruction(
    "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "r", "r", _transpose, pure=True, convergent=True
)
"""Transposes an 8x8 matrix of 16-bit elements, a fragment of which each lane has."""

LOAD_MATRICES = (
    "{{ .reg .u32 a; cvt.u32.u64 a, $4; ldmatrix.sync.aligned.m8n8.x4{mode}.shared.b16 {{$0, $1, $2, $3}}, [a]; }}"
)

load_matrices = instruction(LOAD_MATRICES.format(mode=""), "rrrr", "l", _load_matrices(False), convergent=True)
"""Fragments of four 8x8 matrices in shared memory; each lane gives the address of a row of 16 bytes."""

load_matrices_transposed = instruction(
    LOAD_MATRICES.format(mode=".trans"), "rrrr", "l", _load_matrices(True), convergent=True
)
"""The same, of the transposed matrices."""

multiply = {
    dtype: instruction(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{half.name}.{half.name}.f32 "
        "{$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $13}, {$4, $5, $6, $7};",
        "ffff", "ffffrrrrrr", _multiply(half.values), pure=True, convergent=True,
    )
    for dtype, half in HALVES.items()
}  # fmt: skip
"""By dtype: four sums, and the fragments of A [16 x 16] and B [16 x 8], to the sums with A B added."""


@inlined
def prefix_sum(count: int, lane: int) -> int:
    """The sum of a count over this lane and those before it."""
    for step in range(5):
        before = shuffle_up_count(count, 1 << step)
        count += before if lane >= 1 << step else 0
    return count


@inlined
def sum_of_lanes(count: int) -> int:
    """The sum of a count over all lanes."""
    for step in range(5):
        count += shuffle_xor_count(count, 1 << step)
    return count


@inlined
def transpose_words(w0: int, w1: int, w2: int, w3: int, lane: int) -> tuple[int, int, int, int]:
    """Of four lanes with four words each: the first gets all first words, the second all second ones, and so on."""
    w0, w1 = _swap(w0, w1, 1, lane)
    w2, w3 = _swap(w2, w3, 1, lane)
    w0, w2 = _swap(w0, w2, 2, lane)
    w1, w3 = _swap(w1, w3, 2, lane)
    return w0, w1, w2, w3


@inlined
def _swap(first: int, second: int, mask: int, lane: int) -> tuple[int, int]:
    """Of lanes that differ in the bit of a mask: the second word of the lower one for the first of the other."""
    upper = lane & mask
    other = shuffle_xor_count(first if upper else second, mask)
    return other if upper else first, second if upper else other


def make_meet(threads: int) -> tuple[Any, Any]:
    """Functions of a barrier's number: wait for so many threads to come, or come without waiting."""

    def arrive(number: int) -> None:
        current().block.barrier(number).arrive(threads)

    def meet(number: int) -> None:
        block = current().block
        barrier, phase = block.barrier(number), block.barrier(number).phase
        barrier.arrive(threads)
        block.wait_until(lambda: barrier.phase != phase)

    to_32_bits = "{ .reg .u32 a; cvt.u32.u64 a, $0; "
    return (
        instruction(f"{to_32_bits} bar.sync a, {threads}; }}", "", "l", meet, convergent=True),
        instruction(f"{to_32_bits} bar.arrive a, {threads}; }}", "", "l", arrive, convergent=True),
    )
