"""Attention as it is on paper, for any dtype: decode and prefill in one kernel without tensor cores.

A block of threads works on one query. Its warps take 32 keys in turn, a key a lane:

    scores    each lane multiplies the query by its key,
    softmax   the warp agrees on a new maximum, older sums are scaled to it,
    sums      each lane owns some dims of V and adds up all 32 tokens' share of them.

At the end the warps' sums are scaled to one maximum and added. Fast kernels do the same on tensor cores.
"""

from __future__ import annotations

from functools import cache
from math import exp, tanh
from typing import Any

import torch
from numba import cuda

from .addressing import first_token, make_addressing, row_of
from .arithmetic import FLOOR, FORMATS, LOG2E, NEGATIVE_INFINITY, fma, maximum, reciprocal
from .attention import ARGUMENTS
from .compiler import Kernel
from .memory import load_4, load_16_cached, load_f32, load_i32, store_4
from .ptx import float32
from .ragged import sequence_of
from .warp import shuffle, shuffle_xor

WARPS = 8
LN2 = 0.6931471805599453
THREADS = 32 * WARPS


@cache
def plain_kernel(*constants: Any) -> Kernel:
    """The kernel for what `make_plain` takes."""
    return Kernel(make_plain, constants, ARGUMENTS, THREADS)


def make_plain(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    q_len: int,
    block_size: int,
    causal: bool,
    windowed: bool,
    softcapped: bool,
) -> Any:
    """The kernel as a Python function; the arguments are constants to the compiler.

    Args:
        group: query heads that share a KV head.
        q_len: queries of each sequence; 0: they are where `cu_seqlens` says.
        block_size: tokens of a block in the block table; 0 without one.
    """
    low_half, high_half, pack, per_word = (
        FORMATS[dtype].low,
        FORMATS[dtype].high,
        FORMATS[dtype].pack,
        FORMATS[dtype].per_word,
    )
    words = head_dim // per_word  # of 4 bytes
    owned = -(-words // 32)  # words of V that a lane owns: its own number, that plus 32, ...
    num_sums = owned * per_word
    shared_sums = WARPS * head_dim

    home_of, offset_in = make_addressing(block_size)

    @cuda.jit(device=True, inline="always")
    def power(x):  # type: ignore[no-untyped-def]
        """2 to the power of x, more exactly than the hardware has it: this kernel is for fp32 as well."""
        return float32(exp(x * float32(LN2)))

    @cuda.jit(device=True, inline="always")
    def dot(shared_q, key):  # type: ignore[no-untyped-def]
        # Four sums instead of one: shorter chains of rounding, and of waiting.
        total = cuda.local.array(4, float32)
        for w in range(4):
            total[w] = float32(0)
        for vector in range(words // 4):
            loaded = load_16_cached(key + vector * 16)
            for w in range(4):
                dim = (vector * 4 + w) * per_word
                total[w] = fma(shared_q[dim], low_half(loaded[w]), total[w])
                if per_word == 2:
                    total[w] = fma(shared_q[dim + 1], high_half(loaded[w]), total[w])
        return (total[0] + total[1]) + (total[2] + total[3])

    def kernel(  # type: ignore[no-untyped-def]
        q, k, v, out, cu_seqlens, seq_lens, rows, starts, block_table, sinks, partials, counters,
        batch, kv_heads, table_stride, window,
        q_batch, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head, out_batch, out_token, out_head,
        inner, outer,
    ):  # fmt: skip
        thread = cuda.threadIdx.x
        lane = thread & 31
        warp = thread >> 5
        token = cuda.blockIdx.x
        head = cuda.blockIdx.y
        shared_q = cuda.shared.array(head_dim, float32)
        shared_o = cuda.shared.array(shared_sums, float32)
        shared_m = cuda.shared.array(WARPS, float32)
        shared_l = cuda.shared.array(WARPS, float32)
        sums = cuda.local.array(num_sums, float32)

        if q_len:
            sequence = token // q_len
            query = token % q_len
            queries = q_len
            q_from = q + sequence * q_batch + query * q_token
            to = out + sequence * out_batch + query * out_token
        else:
            sequence = sequence_of(token, cu_seqlens, batch)
            query = token - load_i32(cu_seqlens + sequence * 4)
            queries = load_i32(cu_seqlens + sequence * 4 + 4) - load_i32(cu_seqlens + sequence * 4)
            if query >= queries:
                return
            q_from = q + token * q_token
            to = out + token * out_token
        q_from += head * q_head
        to += head * out_head
        length = load_i32(seq_lens + sequence * 4)
        high = length - queries + query + 1 if causal else length
        low = first_token(sequence, starts)
        if windowed:
            low = max(low, high - window)
        row = row_of(sequence, rows)
        table = block_table + row * table_stride
        k_from = k + head // group * k_head
        v_from = v + head // group * v_head

        word = thread
        while word < words:
            loaded = load_4(q_from + word * 4)
            shared_q[word * per_word] = low_half(loaded)
            if per_word == 2:
                shared_q[word * 2 + 1] = high_half(loaded)
            word += THREADS
        cuda.syncthreads()

        for i in range(num_sums):
            sums[i] = float32(0)
        top = float32(FLOOR)
        norm = float32(0)
        first = low + warp * 32
        while first < high:
            mine = first + lane
            key = min(mine, high - 1)
            score = dot(shared_q, k_from + offset_in(home_of(key, row, table), key, k_row, k_token))
            if softcapped:
                score = float32(tanh(score * inner))
            score = score if mine < high else float32(NEGATIVE_INFINITY)
            higher = maximum(top, score)
            for step in range(5):
                higher = maximum(higher, shuffle_xor(higher, 1 << step))
            scale = power((top - higher) * outer)
            p = power((score - higher) * outer)
            top = higher
            norm = norm * scale + p
            for i in range(num_sums):
                sums[i] *= scale
            for other in range(min(32, high - first)):
                weight = shuffle(p, other)
                token = first + other
                value = v_from + offset_in(home_of(token, row, table), token, v_row, v_token)
                for i in range(owned):
                    word = i * 32 + lane
                    if word < words:
                        loaded = load_4(value + word * 4)
                        sums[i * per_word] += weight * low_half(loaded)
                        if per_word == 2:
                            sums[i * 2 + 1] += weight * high_half(loaded)
            first += THREADS

        for step in range(5):
            norm += shuffle_xor(norm, 1 << step)
        if lane == 0:
            shared_m[warp] = top
            shared_l[warp] = norm
        for i in range(num_sums):
            dim = (i // per_word * 32 + lane) * per_word + i % per_word
            if dim < head_dim:
                shared_o[warp * head_dim + dim] = sums[i]
        cuda.syncthreads()

        top = float32(FLOOR)
        for w in range(WARPS):
            top = maximum(top, shared_m[w])
        norm = float32(0)
        if sinks != 0:
            sink = load_f32(sinks + head * 4) * float32(LOG2E) - top * outer
            norm = power(min(sink, float32(127)))  # a sequence without tokens has a top of nearly minus infinity
        for w in range(WARPS):
            norm += shared_l[w] * power((shared_m[w] - top) * outer)
        word = thread
        while word < words:
            o0 = float32(0)
            o1 = float32(0)
            for w in range(WARPS):
                scale = power((shared_m[w] - top) * outer)
                o0 += scale * shared_o[w * head_dim + word * per_word]
                if per_word == 2:
                    o1 += scale * shared_o[w * head_dim + word * 2 + 1]
            scale = reciprocal(norm) if norm > float32(0) else float32(0)
            store_4(to + word * 4, pack(o0 * scale, o1 * scale))
            word += THREADS

    return kernel
