"""Copies of tokens' heads as they are, 16 bytes a thread and turn."""

from __future__ import annotations

from typing import Any

from numba import cuda

from .memory import load_16, store_16
from .ptx import inlined, uint32

THREADS = 128
"""Threads that move a token."""

IN_FLIGHT = 8
"""Vectors of a thread that are loaded before the first of them is stored."""


def at_once(vectors: int) -> int:
    """How many tokens of so many vectors `THREADS` threads move at once: one, or several narrow ones, of which a block
    has no more on their way than threads that look up where they go."""
    return max(min(THREADS // vectors, THREADS // IN_FLIGHT), 1)


def most_tokens(vectors: int) -> int:
    """Of a block of threads: those that are on their way together."""
    return IN_FLIGHT * at_once(vectors)


def tokens_of_block(tokens: int, vectors: int, multiprocessors: int) -> int:
    """How many of all tokens a block of threads is to move: one, where more would leave multiprocessors without any."""
    most = most_tokens(vectors)
    return most if tokens >= most * multiprocessors else 1


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


@inlined
def move_nothing(
    source: int, source_token: int, source_head: int, places: Any, target_head: int, count: int, thread: int
) -> None:
    """What `make_move_tokens` gives where tokens have no heads."""


def make_move_tokens(vectors: int, head_vectors: int, place_of: Any) -> Any:
    """A function for kernels by which `THREADS` threads copy some tokens' heads; narrow tokens several at once.

    Args:
        vectors, head_vectors: 16-byte vectors of a token and of a head; 0: there is nothing to copy, as V of latents.
        place_of: an inlined device function: where the token of an index is to go, from what the caller has to say.
    """
    if not vectors:
        return move_nothing
    step = at_once(vectors)
    num_words, last = 4 * IN_FLIGHT, (IN_FLIGHT - 1) * step

    @inlined
    def move_tokens(
        source: int, source_token: int, source_head: int, places: Any, target_head: int, count: int, thread: int
    ) -> None:
        """From the address of the first token on.

        Args:
            source_token, source_head, target_head: bytes from one token, and head, to the next.
            places: for `place_of`.
            thread: its number among them.
        """
        words = cuda.local.array(num_words, uint32)
        first = thread // vectors if step > 1 else 0
        vector = thread - first * vectors
        if first >= step:  # threads that are left over
            vector = vectors
        while vector < vectors:
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
