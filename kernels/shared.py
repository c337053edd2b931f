"""Shared memory by address: stores and loads, and copies into it that run on while threads compute."""

from __future__ import annotations

import ctypes
from typing import Any

from .memory import (
    simulated_load_8,
    simulated_load_f32,
    simulated_load_f32x4,
    simulated_store_8,
    simulated_store_16,
    simulated_store_f32,
    simulated_store_f32x4,
)
from .ptx import instruction, instruction_on_address


def _copy_16(target: int, source: int) -> None:
    assert (target | source) % 16 == 0, "misaligned"
    ctypes.memmove(int(target), int(source), 16)


def _store_i32(address: int, value: int) -> None:
    ctypes.c_int32.from_address(int(address)).value = int(value)


def _load_i32(address: int) -> int:
    return ctypes.c_int32.from_address(int(address)).value


shared_address = instruction_on_address("cvta.to.shared.u64 $0, $1;", lambda array: array.ctypes.data)
"""The address of a shared array, as instructions on shared memory want it."""

copy_16 = instruction(
    "{ .reg .u32 a; cvt.u32.u64 a, $0; cp.async.cg.shared.global.L2::256B [a], [$1], 16; }", "", "ll", _copy_16
)
"""Begins to copy 16 bytes from global to shared memory; both addresses are multiples of 16."""

wait_copies = instruction("cp.async.wait_all;", "", "", lambda: None)
"""Waits until this thread's copies are there. Other threads see them after a barrier."""

commit_copies = instruction("cp.async.commit_group;", "", "", lambda: None)
"""Makes all of this thread's copies since the last commit those of one more, which may be none."""


def make_wait_older_copies(pending: int) -> Any:
    """A function for kernels that waits for this thread's copies, but for those of the last `pending` commits."""
    return instruction(f"cp.async.wait_group {pending};", "", "", lambda: None)


store_shared_16 = instruction(
    "{ .reg .u32 a; cvt.u32.u64 a, $0; st.shared.v4.u32 [a], {$1, $2, $3, $4}; }", "", "lrrrr", simulated_store_16
)
"""Puts 16 bytes to a 16-byte aligned address."""

store_shared_f32 = instruction(
    "{ .reg .u32 a; cvt.u32.u64 a, $0; st.shared.f32 [a], $1; }", "", "lf", simulated_store_f32
)
"""Puts a float to an address."""

load_shared_f32 = instruction(
    "{ .reg .u32 a; cvt.u32.u64 a, $1; ld.shared.f32 $0, [a]; }", "f", "l", simulated_load_f32
)
"""A float at an address."""

store_shared_f32x4 = instruction(
    "{ .reg .u32 a; cvt.u32.u64 a, $0; st.shared.v4.f32 [a], {$1, $2, $3, $4}; }", "", "lffff", simulated_store_f32x4
)
"""Puts four floats to a 16-byte aligned address."""

load_shared_f32x4 = instruction(
    "{ .reg .u32 a; cvt.u32.u64 a, $4; ld.shared.v4.f32 {$0, $1, $2, $3}, [a]; }", "ffff", "l", simulated_load_f32x4
)
"""Four floats at a 16-byte aligned address."""

store_shared_8 = instruction(
    "{ .reg .u32 a; cvt.u32.u64 a, $0; st.shared.v2.u32 [a], {$1, $2}; }", "", "lrr", simulated_store_8
)
"""Puts 8 bytes to an 8-byte aligned address."""

load_shared_8 = instruction(
    "{ .reg .u32 a; cvt.u32.u64 a, $2; ld.volatile.shared.v2.u32 {$0, $1}, [a]; }",
    "rr",
    "l",
    simulated_load_8,
    reads_only=True,
)
"""8 bytes at an 8-byte aligned address, loaded each time: registers are for what is needed more often."""

store_shared_i32 = instruction(
    "{ .reg .u32 a, v; cvt.u32.u64 a, $0; cvt.u32.u64 v, $1; st.shared.u32 [a], v; }", "", "ll", _store_i32
)
"""Puts a 32-bit integer to an address."""

load_shared_i32 = instruction(
    "{ .reg .u32 a; .reg .s32 v; cvt.u32.u64 a, $1; ld.shared.s32 v, [a]; cvt.s64.s32 $0, v; }", "l", "l", _load_i32
)
"""A 32-bit integer at an address."""
