"""What threads do together: exchange within a warp, products on tensor cores, barriers, and what Hopper adds.

Hopper multiplies by warpgroups (four warps) and copies by tensor maps. Its operands lie in shared memory as the copy
engine puts them: panels of 64 columns one behind the other, in rows of 128 bytes; in each row the 16-byte vectors are
permuted by the row's number ("128-byte swizzle"). Layouts are those of the PTX manual, "asynchronous warpgroup level
matrix instructions".
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from .compiler import SIMULATED, inlined, instruction, instruction_on_array
from .memory import HALVES

if SIMULATED:
    from .simulator import current

LANES = np.arange(32)
# Of a lane in a tensor-core fragment: its row or column, and which two elements of it.
ROW, PAIR = LANES // 4, LANES % 4


def _together(name: str, work_out: Any) -> Any:
    """The meaning of a warp's instruction: `work_out` makes 32 results of all lanes' operands."""
    return lambda *operands: current().warp.attend(name, operands, work_out)


def _transpose(brought: list[Any]) -> list[Any]:
    matrix = np.array([word for (word,) in brought], np.uint32).view(np.uint16).reshape(8, 8)
    return list(np.ascontiguousarray(matrix.T).view(np.uint32).reshape(32))


def _load_matrices(transposed: bool) -> Any:
    def work_out(brought: list[Any]) -> list[Any]:
        rows = [(ctypes.c_uint16 * 8).from_address(int(address)) for (address,) in brought]
        matrices = np.array(rows, np.uint16).reshape(4, 8, 8)
        matrices = np.ascontiguousarray(matrices.transpose(0, 2, 1) if transposed else matrices)
        return [tuple(words) for words in matrices.view(np.uint32).reshape(4, 32).T]

    return _together("load_matrices", work_out)


# Where a matrix's elements are among the 16-bit halves of fragments, of which a lane has 8 of A and 4 of B.
A_PLACES = np.fromfunction(
    lambda row, k: (row % 8 * 4 + k % 8 // 2) * 12 + (row // 8 + k // 8 * 2) * 2 + k % 2, (16, 16), dtype=np.intp
)
B_PLACES = np.fromfunction(
    lambda k, column: (column * 4 + k % 8 // 2) * 12 + (4 + k // 8) * 2 + k % 2, (16, 8), dtype=np.intp
)
# Where a lane's four sums are in a product [16 x 8].
PRODUCT_PLACES = np.stack([(ROW + i // 2 * 8) * 8 + 2 * PAIR + i % 2 for i in range(4)], 1)


def _multiply(values: Any) -> Any:
    def work_out(brought: list[Any]) -> Any:
        sums = np.array([operands[:4] for operands in brought], np.float32)
        halves = values(np.array([operands[4:] for operands in brought], np.uint32).view(np.uint16).reshape(-1))
        with np.errstate(invalid="ignore", over="ignore"):
            sums += (halves[A_PLACES] @ halves[B_PLACES]).reshape(-1)[PRODUCT_PLACES]
        return list(zip(*[iter(sums.reshape(-1))] * 4))

    return _together("multiply", work_out)


def _shuffle(mode: str, kind: str, source_of: Any, clamp: int = 31) -> Any:
    """A value of another lane: a float or, as a 64-bit integer, a count below 2**32."""
    meaning = _together(
        f"shuffle {mode}", lambda brought: [brought[source_of(i, int(brought[i][1]))][0] for i in range(32)]
    )
    asm = f"shfl.sync.{mode}.b32 $0, $1, $2, {clamp}, -1;"
    if kind == "l":
        asm = f"{{ .reg .u32 v; cvt.u32.u64 v, $1; shfl.sync.{mode}.b32 v, v, $2, {clamp}, -1; cvt.u64.u32 $0, v; }}"
    return instruction(asm, kind, f"{kind}r", meaning, reads_only=True, convergent=True)


def _vote(asm: str, name: str, of_conditions: Any) -> Any:
    """What all lanes are told of a condition, an integer, in each."""
    meaning = _together(name, lambda brought: [int(of_conditions(condition for (condition,) in brought))] * 32)
    return instruction(asm, "l", "l", meaning, reads_only=True, convergent=True)


# Values of the lane whose number differs in the bits of a mask, or of a given lane.
shuffle_xor, shuffle_xor_count = (_shuffle("bfly", kind, lambda lane, mask: lane ^ mask) for kind in "fl")
shuffle, shuffle_count = (_shuffle("idx", kind, lambda lane, source: source % 32) for kind in "fl")
# Counts of the lane that is a distance before; the first lanes get their own.
shuffle_up_count = _shuffle("up", "l", lambda lane, distance: lane - distance if lane >= distance else lane, clamp=0)

count_true = _vote(
    "{ .reg .pred p; .reg .u32 v; setp.ne.s64 p, $1, 0; vote.sync.ballot.b32 v, p, -1; popc.b32 v, v; "
    "cvt.u64.u32 $0, v; }",
    "count_true", lambda conditions: sum(map(bool, conditions)),
)  # fmt: skip
any_lane = _vote(
    "{ .reg .pred p; setp.ne.s64 p, $1, 0; vote.sync.any.pred p, p, -1; selp.s64 $0, 1, 0, p; }", "any_lane", any
)

# Waits for the other lanes: their memory accesses are visible then.
sync_warp = instruction("bar.warp.sync -1;", "", "", _together("sync_warp", lambda brought: brought), convergent=True)

# An 8x8 matrix of 16-bit elements, a fragment of which each lane has.
transpose = instruction(
    "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "r", "r", _together("transpose", _transpose), pure=True,
    convergent=True,
)  # fmt: skip

# Fragments of four 8x8 matrices in shared memory; each lane gives the address of a row of 16 bytes.
load_matrices, load_matrices_transposed = (
    instruction(
        "{ .reg .u32 a; cvt.u32.u64 a, $4; "
        f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16 {{$0, $1, $2, $3}}, [a]; }}",
        "rrrr", "l", _load_matrices(transposed), convergent=True,
    )
    for transposed in (False, True)
)  # fmt: skip

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
        current().block.barriers[number].arrive(threads)

    def meet(number: int) -> None:
        block = current().block
        barrier, phase = block.barriers[number], block.barriers[number].phase
        barrier.arrive(threads)
        block.wait_until(lambda: barrier.phase != phase)

    to_32_bits = "{ .reg .u32 a; cvt.u32.u64 a, $0; "
    return (
        instruction(f"{to_32_bits} bar.sync a, {threads}; }}", "", "l", meet, convergent=True),
        instruction(f"{to_32_bits} bar.arrive a, {threads}; }}", "", "l", arrive, convergent=True),
    )


PANEL = 64  # elements of a row: 128 bytes are the widest that can be swizzled
ROW_BYTES = 128
ATOM_BYTES = 8 * ROW_BYTES  # of eight rows, the unit of swizzling; panels begin at multiples of it

LAYOUT = 1 << 30 | ATOM_BYTES >> 4  # upper half of an operand's descriptor: swizzle, and bytes between atoms


def make_operand_at(panel_bytes: int) -> Any:
    """A function for kernels: the lower half of the descriptor of what begins at an address in shared memory.

    It counts vectors of 16 bytes. So one addition finds an operand some vectors further on; tensor cores would wait for
    more work between two products. `panel_bytes` lie between panels of B, where rows of it are summed over.
    """
    panels = 0 if SIMULATED else panel_bytes >> 4 << 16
    return inlined(lambda address: (address >> 4) + panels)


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
    """`sums (+)= A B^T` of A [64 x 16] and B [n x 16], by `operand_at` each one's first row; called by a warpgroup. The
    sums may be read after `make_wait_products`."""
    values = HALVES[dtype].values

    def meaning(sums: Any, a: int, b: int) -> None:
        def work_out(brought: list[Any]) -> list[None]:
            first, second = (values(_read_rows(brought[0][i] << 4, rows)) for i, rows in ((1, 64), (2, n)))
            return _add_product(brought, first, second.T, accumulate)

        current().warpgroup.attend("multiply_shared", (sums, int(a), int(b)), work_out)

    asm = (
        "{{ .reg .pred p; .reg .b32 l; .reg .b64 a, b; setp.ne.b32 p, {accumulate}, 0; mov.b32 l, {layout}; "
        "mov.b64 a, {{{0}, l}}; mov.b64 b, {{{1}, l}}; "
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{name}.{name} {{{array}}}, a, b, p, 1, 1, 0, 0; }}"
    )
    facts = {"n": n, "name": HALVES[dtype].name, "accumulate": int(accumulate), "layout": LAYOUT}
    return instruction_on_array(asm, facts, n // 2, "rr", meaning)


def make_multiply_registers(dtype: torch.dtype, n: int, rows: int) -> Any:
    """`sums += A B` of A [64 x 16], in four registers a lane, and B [16 x n], by `operand_at` its first row: 16 rows of
    panels that have `rows`."""
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

        current().warpgroup.attend("multiply_registers", (sums, a0, a1, a2, a3, int(b)), work_out)

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


def _order(asm: str, convergent: bool = True) -> Any:
    """An instruction that orders others; the simulator keeps all in order."""
    return instruction(asm, "", "", lambda: None, convergent=convergent)


begin_products = _order("wgmma.fence.sync.aligned;")  # before the first of some products: their registers were written
commit_products = _order("wgmma.commit_group.sync.aligned;")  # products since the last commit are one group
publish_shared = _order("fence.proxy.async.shared::cta;", False)  # products may read what this thread stored
publish_barriers = _order("fence.mbarrier_init.release.cluster;", False)  # the copy engine may see new barriers


def make_take_registers(count: int) -> Any:
    """A warpgroup gives registers back, or waits for more, so that each thread has `count` of them."""
    action = "dec" if count < 128 else "inc"
    return _order(f"setmaxnreg.{action}.sync.aligned.u32 {count};")


def _init_barrier(address: int, arrivals: int) -> None:
    current().block.barriers[int(address)].expected = arrivals


def _arrive(address: int) -> None:
    barrier = current().block.barriers[int(address)]
    barrier.arrive(barrier.expected)


def _expect_bytes(address: int, count: int) -> None:
    barrier = current().block.barriers[int(address)]
    barrier.bytes += count
    barrier.arrive(barrier.expected)


def _wait_barrier(address: int, parity: int) -> None:
    block = current().block
    barrier = block.barriers[int(address)]
    block.wait_until(lambda: barrier.phase % 2 != parity)


TO_32_BITS = "{ .reg .u32 a, b; cvt.u32.u64 a, $0; cvt.u32.u64 b, $1; "

# Makes 8 bytes of shared memory a barrier that so many arrivals complete, again and again.
init_barrier = instruction(TO_32_BITS + "mbarrier.init.shared::cta.b64 [a], b; }", "", "ll", _init_barrier)
arrive = instruction("{ .reg .u32 a; cvt.u32.u64 a, $0; mbarrier.arrive.shared::cta.b64 _, [a]; }", "", "l", _arrive)
# Arrives at a barrier, which then also waits for so many bytes to be copied.
expect_bytes = instruction(
    TO_32_BITS + "mbarrier.arrive.expect_tx.shared::cta.b64 _, [a], b; }", "", "ll", _expect_bytes
)
# Waits until a barrier's phase of a parity is complete; the first is 0.
wait_barrier = instruction(
    TO_32_BITS + ".reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [a], b; @!p bra again; }",
    "", "ll", _wait_barrier,
)  # fmt: skip

simulated_maps: list[Any] = []  # in the simulator a tensor map is an index into this


def _copy_box(target: int, tensor: int, element: int, head: int, token: int, row: int, barrier: int) -> None:
    copied = simulated_maps[tensor].copy(int(target), (int(element), int(head), int(token), int(row)))
    current().block.barriers[int(barrier)].copied(copied)


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
