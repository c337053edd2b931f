"""What Hopper has beyond a warp: products by a warpgroup (four warps), copies by tensor maps, barriers in memory.

Operands lie in shared memory as the copy engine puts them there: panels of 64 columns, one behind the other, in rows of
128 bytes; in each row the 16-byte vectors are permuted by the row's number ("128-byte swizzle"). The layouts are those
of the PTX manual's "asynchronous warpgroup level matrix instructions".
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from .arithmetic import HALVES
from .memory import simulated_store_16
from .ptx import SIMULATED, inlined, instruction, instruction_on_array

if SIMULATED:
    from .simulator import current, warpgroup_meets

PANEL = 64
"""Elements of a row: 128 bytes are the widest that can be swizzled."""
ROW_BYTES = 128
ATOM_BYTES = 8 * ROW_BYTES
"""Of eight rows, the unit of swizzling; panels begin at multiples of it."""


LAYOUT = 1 << 30 | ATOM_BYTES >> 4
"""The upper half of an operand's descriptor: 128-byte swizzle, and the bytes between its atoms."""


def make_operand_at(panel_bytes: int) -> Any:
    """A function for kernels: the lower half of the descriptor of what begins at an address in shared memory.

    Products take that. It counts vectors of 16 bytes, so that what lies some vectors further on is found by adding
    their number; that is all the work between two products, which the tensor cores would wait for.

    Args:
        panel_bytes: from one panel of B to the next, where rows of it are summed over.
    """
    panels = 0 if SIMULATED else panel_bytes >> 4 << 16

    @inlined
    def operand_at(address: int) -> int:
        return (address >> 4) + panels

    return operand_at


def swizzled(address: int) -> int:
    """Where the byte of a row-by-row address lies."""
    return address ^ ((address >> 7 & 7) << 4)


def _read_rows(address: int, rows: int) -> Any:
    """The first 16 elements of each row."""
    columns = [[swizzled(address + row * ROW_BYTES + half) for half in (0, 16)] for row in range(rows)]
    return np.array([[(ctypes.c_uint16 * 8).from_address(at) for at in pair] for pair in columns]).reshape(rows, 16)


def _add_product(brought: list[Any], a: Any, b: Any, accumulate: bool) -> list[None]:
    """Adds A [64 x 16] B [16 x n] to every thread's part of the sums."""
    with np.errstate(invalid="ignore", over="ignore"):
        product = a @ b
    for thread, (sums, *_) in enumerate(brought):
        row, column = thread // 32 * 16 + thread % 32 // 4, 2 * (thread % 4)
        part = product[[row, row + 8], :].reshape(2, -1, 8)[:, :, column : column + 2]
        part = part.transpose(1, 0, 2).reshape(-1)
        sums[:] = sums + part if accumulate else part
    return [None] * len(brought)


def make_multiply_shared(dtype: torch.dtype, n: int, accumulate: bool) -> Any:
    """`sums (+)= A B^T` of A [64 x 16] and B [n x 16], by `operand_at` each one's first row.

    Called by a warpgroup; the sums are there after `make_wait_products`.
    """
    values = HALVES[dtype].values

    def meaning(sums: Any, a: int, b: int) -> None:
        def work_out(brought: list[Any]) -> list[None]:
            first, second = (values(_read_rows(brought[0][i] << 4, rows)) for i, rows in ((1, 64), (2, n)))
            return _add_product(brought, first, second.T, accumulate)

        warpgroup_meets("multiply_shared", (sums, int(a), int(b)), work_out)

    asm = (
        "{{ .reg .pred p; .reg .b32 l; .reg .b64 a, b; setp.ne.b32 p, {accumulate}, 0; mov.b32 l, {layout}; "
        "mov.b64 a, {{{0}, l}}; mov.b64 b, {{{1}, l}}; "
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{name}.{name} {{{array}}}, a, b, p, 1, 1, 0, 0; }}"
    )
    facts = {"n": n, "name": HALVES[dtype].name, "accumulate": int(accumulate), "layout": LAYOUT}
    return instruction_on_array(asm, facts, n // 2, "rr", meaning)


def make_multiply_registers(dtype: torch.dtype, n: int, rows: int) -> Any:
    """`sums += A B` of A [64 x 16], in four registers a lane, and B [16 x n], by `operand_at` its first row.

    B's panels are `rows` rows each, of which it is 16.
    """
    values = HALVES[dtype].values

    def meaning(sums: Any, a0: int, a1: int, a2: int, a3: int, b: int) -> None:
        def work_out(brought: list[Any]) -> list[None]:
            words = np.array([operands[1:5] for operands in brought], np.uint32)
            halves = values(words.view(np.uint16)).reshape(4, 8, 4, 4, 2)  # warp, row, pair, word, half
            a = np.zeros((4, 2, 8, 2, 4, 2), np.float32)  # warp, which eight rows, row, which eight columns, pair, half
            for word in range(4):
                a[:, word % 2, :, word // 2] = halves[:, :, :, word]
            address = brought[0][5] << 4
            b = np.zeros((16, n), np.uint16)
            for row in range(16):
                for column in range(0, n, 8):
                    at = address + (column // PANEL * rows + row) * ROW_BYTES + column % PANEL * 2
                    b[row, column : column + 8] = (ctypes.c_uint16 * 8).from_address(swizzled(at))
            return _add_product(brought, a.reshape(64, 16), values(b), True)

        warpgroup_meets("multiply_registers", (sums, a0, a1, a2, a3, int(b)), work_out)

    asm = (
        "{{ .reg .pred p; .reg .b32 l; .reg .b64 b; setp.ne.b32 p, 1, 0; mov.b32 l, {layout}; "
        "mov.b64 b, {{{4}, l}}; "
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{name}.{name} {{{array}}}, "
        "{{{0}, {1}, {2}, {3}}}, b, p, 1, 1, 1; }}"
    )
    facts = {"n": n, "name": HALVES[dtype].name, "layout": LAYOUT}
    return instruction_on_array(asm, facts, n // 2, "rrrrr", meaning)


def make_wait_products(size: int, pending: int) -> Any:
    """Waits for all products but those of the last `pending` commits; the array of sums may then be read."""
    return instruction_on_array(f"wgmma.wait_group.sync.aligned {pending};", {}, size, "", lambda sums: None)


begin_products = instruction("wgmma.fence.sync.aligned;", "", "", lambda: None, convergent=True)
"""Before the first of some products: registers that they read were written."""

commit_products = instruction("wgmma.commit_group.sync.aligned;", "", "", lambda: None, convergent=True)
"""Makes all products since the last commit those of one more."""

publish_shared = instruction("fence.proxy.async.shared::cta;", "", "", lambda: None)
"""Lets products read what this thread stored in shared memory."""


store_shared_16 = instruction(
    "{ .reg .u32 a; cvt.u32.u64 a, $0; st.shared.v4.u32 [a], {$1, $2, $3, $4}; }", "", "lrrrr", simulated_store_16
)
"""Puts 16 bytes to shared memory."""


def make_take_registers(count: int) -> Any:
    """A warpgroup gives registers back, or waits for more, so that each thread has `count` of them."""
    action = "dec" if count < 128 else "inc"
    return instruction(f"setmaxnreg.{action}.sync.aligned.u32 {count};", "", "", lambda: None, convergent=True)


def _init_barrier(address: int, arrivals: int) -> None:
    current().block.barrier(int(address)).expected = arrivals


def _arrive(address: int) -> None:
    barrier = current().block.barrier(int(address))
    barrier.arrive(barrier.expected)


def _expect_bytes(address: int, count: int) -> None:
    barrier = current().block.barrier(int(address))
    barrier.bytes += count
    barrier.arrive(barrier.expected)


def _wait_barrier(address: int, parity: int) -> None:
    block = current().block
    barrier = block.barrier(int(address))
    block.wait_until(lambda: barrier.phase % 2 != parity)


TO_32_BITS = "{ .reg .u32 a, b; cvt.u32.u64 a, $0; cvt.u32.u64 b, $1; "

init_barrier = instruction(TO_32_BITS + "mbarrier.init.shared::cta.b64 [a], b; }", "", "ll", _init_barrier)
"""Makes 8 bytes of shared memory a barrier that so many arrivals complete, again and again."""

publish_barriers = instruction("fence.mbarrier_init.release.cluster;", "", "", lambda: None)
"""Lets the copy engine see new barriers."""

arrive = instruction("{ .reg .u32 a; cvt.u32.u64 a, $0; mbarrier.arrive.shared::cta.b64 _, [a]; }", "", "l", _arrive)
"""Arrives at a barrier."""

expect_bytes = instruction(
    TO_32_BITS + "mbarrier.arrive.expect_tx.shared::cta.b64 _, [a], b; }", "", "ll", _expect_bytes
)
"""Arrives at a barrier, which then also waits for so many bytes to be copied."""

wait_barrier = instruction(
    TO_32_BITS + ".reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [a], b; @!p bra again; }",
    "", "ll", _wait_barrier,
)  # fmt: skip
"""Waits until a barrier's phase of a parity is complete; the first is 0."""


simulated_maps: list[Any] = []
"""In the simulator a tensor map is an index into this."""


def _copy_box(target: int, tensor: int, element: int, head: int, token: int, row: int, barrier: int) -> None:
    copied = simulated_maps[tensor].copy(int(target), (int(element), int(head), int(token), int(row)))
    current().block.barrier(int(barrier)).copied(copied)


copy_box = instruction(
    "{ .reg .u32 to, at; .reg .s32 x, y, z, w; cvt.u32.u64 to, $0; cvt.u32.u64 at, $6; "
    "cvt.s32.s64 x, $2; cvt.s32.s64 y, $3; cvt.s32.s64 z, $4; cvt.s32.s64 w, $5; "
    "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[to], [$1, {x, y, z, w}], [at]; }",
    "", "lllllll", _copy_box,
)  # fmt: skip
"""Begins to copy a box to shared memory: address, tensor map, element, head, token, row or block, and the barrier
that waits for it. Elements outside the tensor become zeros; a copy that is outside as a whole needs the tensor's first
page mapped."""
