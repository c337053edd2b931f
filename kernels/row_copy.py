"""copy_tokens: copies ranges of tokens between rows, as for copy-on-write tails and beam reordering.

Heads are copied as they are, 16 bytes a thread and turn. A block of threads has as many tokens of a range as still
leave work for every multiprocessor. `append` moves tokens by the same functions.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from numba import cuda
from torch import Tensor

from .arguments import Steps
from .checks import (
    ALIGNMENT, Geometry, Key, Plans, check_cache, check_device, check_indices, check_integer, check_written,
    refuse_alignment,
)  # fmt: skip
from .compiler import Kernel, inlined, uint32
from .launches import MOST_BLOCKS, Launch, index_of, multiprocessors
from .memory import load_16, load_i32, store_16

THREADS = 128  # threads that move a token
IN_FLIGHT = 8  # vectors of a thread that are loaded before the first of them is stored


def at_once(vectors: int) -> int:
    """How many tokens of so many vectors `THREADS` threads move at once: one, or several narrow ones, of which a block
    has no more on their way than threads that look up where they go."""
    return max(min(THREADS // vectors, THREADS // IN_FLIGHT), 1)


def most_tokens(vectors: int) -> int:
    """Tokens of a block of threads: those that are on their way together."""
    return IN_FLIGHT * at_once(vectors)


def tokens_of_block(tokens: int, vectors: int, multiprocessors: int) -> int:
    """How many of all tokens a block of threads is to move: one, where more would leave multiprocessors without any."""
    most = most_tokens(vectors)
    return most if tokens >= most * multiprocessors else 1


@inlined
def move_heads(source: int, target: int, source_head: int, target_head: int, vectors: int, head_vectors: int) -> None:
    """Copies one token's heads from address `source` to address `target`, with bytes from one head to the next, and
    16-byte vectors of the token and of a head."""
    vector = cuda.threadIdx.x
    while vector < vectors:
        head = vector // head_vectors
        inside = (vector - head * head_vectors) * 16
        a, b, c, d = load_16(source + head * source_head + inside)
        store_16(target + head * target_head + inside, a, b, c, d)
        vector += THREADS


def make_move_tokens(vectors: int, head_vectors: int, place_of: Any) -> Any:
    """A function for kernels by which `THREADS` threads copy some tokens' heads; narrow tokens several at once.

    A token and a head have so many 16-byte vectors; 0: there is nothing to copy, as V of latents. `place_of` is an
    inlined function of the caller's `places` and a token's index: where that token goes.
    """
    step = at_once(vectors) if vectors else 1
    head_vectors = head_vectors or 1
    num_words, last = 4 * IN_FLIGHT, (IN_FLIGHT - 1) * step

    @inlined
    def move_tokens(
        source: int, source_token: int, source_head: int, places: Any, target_head: int, count: int, thread: int
    ) -> None:
        """From the address of the first token on, with bytes from one token, and head, to the next."""
        words = cuda.local.array(num_words, uint32)
        first = thread // vectors if step > 1 else 0
        vector = thread - first * vectors
        if first >= step:  # threads that are left over
            vector = vectors
        while vectors and vector < vectors:
            head = vector // head_vectors
            inside = (vector - head * head_vectors) * 16
            from_head = source + head * source_head + inside
            to_head = head * target_head + inside
            token = first
            while token + last < count:
                for i in range(IN_FLIGHT):
                    loaded = load_16(from_head + (token + i * step) * source_token)
                    for j in range(4):
                        words[4 * i + j] = loaded[j]
                for i in range(IN_FLIGHT):
                    to = place_of(places, token + i * step) + to_head
                    store_16(to, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3])
                token += IN_FLIGHT * step
            while token < count:
                a, b, c, d = load_16(from_head + token * source_token)
                store_16(place_of(places, token) + to_head, a, b, c, d)
                token += step
            vector += THREADS

    return move_tokens


class CopyAddresses(NamedTuple):
    """Where tensors lie, as `copy_tokens` has them."""

    source: int
    target: int
    source_rows: int
    source_starts: int
    target_rows: int
    target_starts: int
    lengths: int


class CopyShape(NamedTuple):
    """Tokens of a range at most, and of a block of threads; bytes from one row, token and head to the next."""

    most: int
    tokens: int
    source: Steps
    target: Steps


def copy_tokens(
    source: Tensor, target: Tensor, source_rows: Tensor, source_starts: Tensor, target_rows: Tensor,
    target_starts: Tensor, lengths: Tensor, max_length: int,
) -> None:  # fmt: skip
    """Copies ranges of tokens between rows, on the current stream.

    Range `i` is `lengths[i]` tokens of row `source_rows[i]` from `source_starts[i]` on. Ranges that are written must
    overlap neither each other nor any that is read.

    Args:
        source: `[rows, tokens, num_kv_heads, head_dim]`, any dtype, any strides of rows, tokens and heads.
        target: likewise, with the same heads and widths; may be `source`.
        source_rows: int32 `[ranges]`, on the device, like the next four: the row that each range is copied from. There
            may be 65,535 ranges.
        source_starts: the first token of each range there.
        target_rows: the row that each range goes to.
        target_starts: where its first token goes.
        lengths: how many tokens it has.
        max_length: an upper bound of `lengths`; tokens beyond it are not copied.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or alignments do not fit; nothing is copied.
    """
    tensors = source, target, source_rows, source_starts, target_rows, target_starts, lengths
    if torch.compiler.is_compiling():
        torch.ops.vmmkv.copy_tokens(*tensors, max_length)
        return
    launch, addresses = _launches.find(tensors, max_length)
    if (addresses[0] | addresses[1]) % ALIGNMENT:
        refuse_alignment(*addresses[:2])
    launch.run(*addresses)


@lru_cache(1024)
def _prepare(max_length: int, geometry: tuple[Key | None, ...]) -> Launch:
    """Checks a call and prepares its launch."""
    max_length = check_integer("max_length", max_length)
    if max_length < 0:
        raise ValueError(f"got max_length {max_length}; it must not be negative")
    if None in geometry:
        raise TypeError(f"got {CopyAddresses._fields[geometry.index(None)]} None; it must be a tensor")
    source, target, *indices = (Geometry._make(key) for key in geometry if key)
    check_device(source.device)
    check_cache("source", source)
    check_written(target=target)
    check_cache("target", target, like=source)
    check_indices(source.device, indices[-1].shape[:1], **dict(zip(CopyAddresses._fields[2:], indices)))
    if 0 in source.shape[2:]:
        raise ValueError(f"got source {list(source.shape)}; num_kv_heads and head_dim must be 1 at least")
    ranges = indices[-1].shape[0]
    if ranges > MOST_BLOCKS[1]:
        raise ValueError(f"got {ranges:,} ranges; in one call there must be no more than {MOST_BLOCKS[1]:,}")
    size = source.dtype.itemsize
    head_vectors = source.shape[3] * size // 16
    vectors = source.shape[2] * head_vectors
    tokens = tokens_of_block(max_length * ranges, vectors, multiprocessors(source.device))
    strides = [stride * size for stride in (*source.strides[:3], *target.strides[:3])]
    kernel, blocks = copy_kernel(vectors, head_vectors), (-(-max_length // tokens), ranges)
    return Launch(
        kernel, blocks, index_of(source.device), (*[None] * len(CopyAddresses._fields), max_length, tokens, *strides)
    )


_launches = Plans(_prepare)

torch.library.custom_op("vmmkv::copy_tokens", copy_tokens, mutates_args=("target",))


@cache
def copy_kernel(vectors: int, head_vectors: int) -> Kernel:
    """The kernel for a geometry, in vectors of 16 bytes."""
    return Kernel(make_copy, (vectors, head_vectors), (CopyAddresses, CopyShape), THREADS, blocks_per_sm=8)


class Places(NamedTuple):
    """Where tokens go that lie side by side."""

    first: int
    token_stride: int


def make_copy(vectors: int, head_vectors: int) -> Any:
    """The kernel as a Python function; the arguments are constants to the compiler."""
    move_tokens = make_move_tokens(
        vectors, head_vectors, inlined(lambda places, index: places.first + index * places.token_stride)
    )

    def kernel(at: CopyAddresses, shape: CopyShape) -> None:
        token, copied = cuda.blockIdx.x * shape.tokens, cuda.blockIdx.y * 4
        # All looked up at once, before it is known whether there is a token.
        length = min(load_i32(at.lengths + copied), shape.most)
        first = at.source + load_i32(at.source_rows + copied) * shape.source.row
        second = at.target + load_i32(at.target_rows + copied) * shape.target.row
        first += (load_i32(at.source_starts + copied) + token) * shape.source.token
        second += (load_i32(at.target_starts + copied) + token) * shape.target.token
        count, places = min(length - token, shape.tokens), Places(second, shape.target.token)
        move_tokens(first, shape.source.token, shape.source.head, places, shape.target.head, count, cuda.threadIdx.x)

    return kernel
