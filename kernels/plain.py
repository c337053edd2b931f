"""Attention as it is on paper, for any dtype: decode and prefill in one kernel without tensor cores.

A block of threads works on one query. Its warps take 32 keys in turn, a key a lane:

    scores    each lane multiplies the query by its key,
    softmax   the warp agrees on a new maximum, older sums are scaled to it,
    sums      each lane owns some dims of V and adds up all 32 tokens' share of them.

A scale of K is one of the score, and a scale of V one of the weight.

At the end the warps' sums are scaled to one maximum and added. Fast kernels do the same on tensor cores.
"""

from __future__ import annotations

from functools import cache
from math import exp, tanh
from typing import Any, NamedTuple

import torch
from numba import cuda

from .arguments import (
    ARGUMENTS, Given, Head, Options, Row, Variant, address_of, first_token, head_of, home_of, make_entry, num_queries,
    row_of, sequence_of, v_dim_of,
)  # fmt: skip
from .compiler import Kernel, float32, inlined
from .memory import (
    FLOOR, FORMATS, LOG2E, NEGATIVE_INFINITY, divide, fma, load_4, load_16_cached, load_f32, load_i32, maximum,
    reciprocal, store_4,
)  # fmt: skip
from .quantized import EIGHT_BITS
from .warp import shuffle, shuffle_xor

WARPS = 8
THREADS = 32 * WARPS
LN2 = 0.6931471805599453


class Query(NamedTuple):
    """One query, but for its head: its sequence, the keys it sees, where it and its output are in the batch."""

    sequence: int
    low: int  # the first key
    high: int  # where the keys end
    address: int
    out: int


def plain_kernel(variant: Variant) -> Kernel:
    """The kernel for any geometry, and any number of queries."""
    return _kernel(variant._replace(q_len=0, general=True))


@cache
def _kernel(variant: Variant) -> Kernel:
    return Kernel(make_plain, (variant,), ARGUMENTS, THREADS)


@inlined
def find_query(place: int, given: Given) -> Query:
    """The query at a place of the batch."""
    at, sizes, options = given.at, given.sizes, given.options
    count, number = options.q_len, place
    if at.cu_seqlens != 0:
        sequence = sequence_of(place, at.cu_seqlens, sizes.batch)
        count = num_queries(sequence, given)
        index = place - load_i32(at.cu_seqlens + sequence * 4)
    else:
        sequence = divide(place, count)
        index = place - sequence * count
        number = index
    address = at.q + sequence * sizes.q.row + number * sizes.q.token
    out = at.out + sequence * sizes.out.row + number * sizes.out.token
    length = load_i32(at.seq_lens + sequence * 4)
    high = length - count + index + 1 if options.causal != 0 else length
    low = first_token(sequence, given)
    if options.window != 0:
        low = max(low, high - options.window)
    return Query(sequence, low, high, address, out)


@inlined
def power(x: float) -> float:
    """2 to the power of x, more exactly than the hardware has it: this kernel is for fp32 as well."""
    return float32(exp(x * float32(LN2)))


def make_unpack(dtype: torch.dtype) -> Any:
    """A function for kernels: the numbers in a word, as floats."""
    if dtype in EIGHT_BITS:
        first, second, third, fourth = EIGHT_BITS[dtype].numbers
        return inlined(lambda word: (first(word), second(word), third(word), fourth(word)))
    low, high = FORMATS[dtype].low, FORMATS[dtype].high
    return inlined((lambda word: (low(word), high(word))) if dtype.itemsize == 2 else lambda word: (low(word),))


def make_dot(dtype: torch.dtype, head_dim: int) -> Any:
    """A function for kernels: the product of the query and a key."""
    unpack, per_word = make_unpack(dtype), 4 // dtype.itemsize

    @inlined
    def dot(shared_q: Any, key: int) -> float:
        # Four sums instead of one: shorter chains of rounding, and of waiting.
        total = cuda.local.array(4, float32)
        for w in range(4):
            total[w] = float32(0)
        for vector in range(head_dim // per_word // 4):
            loaded = load_16_cached(key + vector * 16)
            for w in range(4):
                dim = (vector * 4 + w) * per_word
                numbers = unpack(loaded[w])
                for i in range(per_word):
                    total[w] = fma(shared_q[dim + i], numbers[i], total[w])
        return (total[0] + total[1]) + (total[2] + total[3])

    return dot


def make_attend(variant: Variant) -> Any:
    """A function for kernels: attention of the query to every `WARPS`-th 32 keys; called by a warp."""
    dtype, scaled = variant.kv_dtype or variant.dtype, variant.kv_dtype is not None
    unpack, per_word = make_unpack(dtype), 4 // dtype.itemsize
    words = v_dim_of(variant.head_dim) // per_word
    owned = -(-words // 32)
    dot = make_dot(dtype, variant.head_dim)

    @inlined
    def add_value(sums: Any, value: int, weight: float, lane: int) -> None:
        """Adds V of a token to the words that a lane owns: its own number, that plus 32, ..."""
        for i in range(owned):
            word = i * 32 + lane
            if word < words:
                numbers = unpack(load_4(value + word * 4))
                for j in range(per_word):
                    sums[i * per_word + j] += weight * numbers[j]

    @inlined
    def attend(
        sums: Any, shared_q: Any, head: Head, row: Row, query: Query, options: Options, warp: int, lane: int
    ) -> tuple[float, float]:
        """The greatest score, and this lane's sum of weights."""
        for i in range(owned * per_word):
            sums[i] = float32(0)
        top = float32(FLOOR)
        norm = float32(0)
        first = query.low + warp * 32
        while first < query.high:
            mine = first + lane
            key = min(mine, query.high - 1)
            home = home_of(key, row)
            score = dot(shared_q, address_of(key, home, head.k))
            if scaled:
                score *= load_f32(address_of(key, home, head.k_scales))
            if options.inner != float32(0):
                score = float32(tanh(score * options.inner))
            score = score if mine < query.high else float32(NEGATIVE_INFINITY)
            higher = maximum(top, score)
            for step in range(5):
                higher = maximum(higher, shuffle_xor(higher, 1 << step))
            scale = power((top - higher) * options.outer)
            p = power((score - higher) * options.outer)
            top = higher
            norm = norm * scale + p
            if scaled:
                p *= load_f32(address_of(key, home, head.v_scales))
            for i in range(owned * per_word):
                sums[i] *= scale
            for other in range(min(32, query.high - first)):
                token = first + other
                add_value(sums, address_of(token, home_of(token, row), head.v), shuffle(p, other), lane)
            first += THREADS
        return top, norm

    return attend


def make_combine(dtype: torch.dtype, v_dim: int) -> Any:
    """A function for kernels that makes the output of what warps left in shared memory; called by all threads."""
    number = FORMATS[dtype]
    pack, per_word = number.pack, number.per_word

    @inlined
    def combine(shared_o: Any, shared_m: Any, shared_l: Any, to: int, head: int, given: Given, thread: int) -> None:
        sinks, outer = given.at.sinks, given.options.outer
        top = float32(FLOOR)
        for w in range(WARPS):
            top = maximum(top, shared_m[w])
        norm = float32(0)
        if sinks != 0:
            sink = load_f32(sinks + head * 4) * float32(LOG2E) - top * outer
            # A sequence without tokens has a top of nearly minus infinity. A NaN is not greater, and stays.
            norm = power(float32(127) if sink > float32(127) else sink)
        for w in range(WARPS):
            norm += shared_l[w] * power((shared_m[w] - top) * outer)
        word = thread
        while word < v_dim // per_word:
            o0 = float32(0)
            o1 = float32(0)
            for w in range(WARPS):
                scale = power((shared_m[w] - top) * outer)
                o0 += scale * shared_o[w * v_dim + word * per_word]
                if per_word == 2:
                    o1 += scale * shared_o[w * v_dim + word * 2 + 1]
            scale = float32(0) if norm == float32(0) else reciprocal(norm)
            store_4(to + word * 4, pack(o0 * scale, o1 * scale))
            word += THREADS

    return combine


def make_plain(variant: Variant) -> Any:
    """The kernel as a Python function."""
    head_dim, heads_per_kv = variant.head_dim, variant.heads_per_kv
    unpack, q_per_word = make_unpack(variant.dtype), FORMATS[variant.dtype].per_word
    per_word = 4 // (variant.kv_dtype or variant.dtype).itemsize
    v_dim = v_dim_of(head_dim)
    q_words, words = head_dim // q_per_word, v_dim // per_word  # of 4 bytes
    num_sums = -(-words // 32) * per_word
    shared_sums = WARPS * v_dim

    attend = make_attend(variant)
    combine = make_combine(variant.dtype, v_dim)

    @inlined
    def plain(given: Given) -> None:
        at, sizes, options = given.at, given.sizes, given.options
        thread = cuda.threadIdx.x
        lane = thread & 31
        warp = thread >> 5
        place = cuda.blockIdx.x
        head = cuda.blockIdx.y
        shared_q = cuda.shared.array(head_dim, float32)
        shared_o = cuda.shared.array(shared_sums, float32)
        shared_m = cuda.shared.array(WARPS, float32)
        shared_l = cuda.shared.array(WARPS, float32)
        sums = cuda.local.array(num_sums, float32)

        if at.cu_seqlens != 0 and place >= load_i32(at.cu_seqlens + sizes.batch * 4):
            return
        query = find_query(place, given)
        row = row_of(query.sequence, given)
        kv_head = head_of(head // heads_per_kv, given)
        word = thread
        while word < q_words:
            numbers = unpack(load_4(query.address + head * sizes.q.head + word * 4))
            for i in range(q_per_word):
                shared_q[word * q_per_word + i] = numbers[i]
            word += THREADS
        cuda.syncthreads()

        top, norm = attend(sums, shared_q, kv_head, row, query, options, warp, lane)
        for step in range(5):
            norm += shuffle_xor(norm, 1 << step)
        if lane == 0:
            shared_m[warp] = top
            shared_l[warp] = norm
        for i in range(num_sums):
            dim = (i // per_word * 32 + lane) * per_word + i % per_word
            if dim < v_dim:
                shared_o[warp * v_dim + dim] = sums[i]
        cuda.syncthreads()
        combine(shared_o, shared_m, shared_l, query.out + head * sizes.out.head, head, given, thread)

    return make_entry(variant, plain)
