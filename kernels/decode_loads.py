"""How a warp's lanes load K and V for decode, straight into the registers that are multiplied.

The order of a head's dims is free (see `decode_mma`), so a few lanes load a token's bytes as they lie: 16 bytes each as
long as there are so many for all of them, then 8, then 4. No lane of heads of 16-bit numbers loads in vain.
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

from .addressing import Tokens, make_addressing
from .arguments import Variant
from .arithmetic import clamp
from .decode_shares import Piece
from .memory import load_4_once, load_8_once, load_16_once, load_f32
from .ptx import inlined


class Run(NamedTuple):
    """What some lanes load of a token: each so many times 16 bytes, then 8 and 4 or not."""

    lanes: int
    nbytes: int
    """In all. Where the last 4 bytes of some lanes are behind that, they load others in place of them."""
    whole: int
    eight: bool
    four: bool

    @property
    def words(self) -> int:
        """Of a lane."""
        return 4 * self.whole + 2 * self.eight + self.four


def run_of(lanes: int, nbytes: int) -> Run:
    """The run of so many bytes."""
    whole, rest = divmod(nbytes, 16 * lanes)
    return Run(lanes, nbytes, whole, rest >= 8 * lanes, rest % (8 * lanes) > 0)


def runs_of(variant: Variant) -> tuple[Run, Run]:
    """Of K, which 4 lanes load, and of V, which 8 load."""
    nbytes = variant.head_dim * (1 if variant.kv_dtype else 2)
    return run_of(4, nbytes), run_of(8, nbytes)


def vectors_of(variant: Variant) -> int:
    """What becomes of 16 bytes of K or V: vectors of 16-bit numbers."""
    return 2 if variant.kv_dtype else 1


class Words(NamedTuple):
    """What a lane has in registers."""

    k: int
    v: int
    """Of 16 tokens."""
    q: int
    sums: int
    """Of an octet."""


def words_of(variant: Variant) -> Words:
    """Of K a lane has two tokens, and of V four."""
    (k, v), vectors = runs_of(variant), vectors_of(variant)
    return Words(2 * k.words, 4 * v.words, k.words * vectors, 4 * v.words * vectors)


def make_place_of(run: Run) -> Any:
    """A function for kernels: where a lane's word lies in a run, in bytes."""
    lanes, _, whole, eight, _ = run
    behind_16 = lanes * whole * 16
    behind_8 = behind_16 + lanes * 8 * eight

    @inlined
    def place_of(word: int, part: int) -> int:
        if word < 4 * whole:
            return (word // 4 * lanes + part) * 16 + word % 4 * 4
        if eight and word < 4 * whole + 2:
            return behind_16 + part * 8 + (word - 4 * whole) * 4
        return behind_8 + part * 4

    return place_of


def make_load_run(run: Run, load_16: Any) -> Any:
    """A function for kernels that loads a lane's words."""
    _, nbytes, whole, eight, four = run
    place_of = make_place_of(run)
    first_of_8, last = 4 * whole, run.words - 1

    @inlined
    def load_run(words: Any, at: int, source: int, part: int) -> None:
        """To words from `at` on."""
        for c in range(whole):
            vector = load_16(source + place_of(4 * c, part))
            for i in range(4):
                words[at + 4 * c + i] = vector[i]
        if eight:
            pair = load_8_once(source + place_of(first_of_8, part))
            for i in range(2):
                words[at + first_of_8 + i] = pair[i]
        if four:
            place = place_of(last, part)
            words[at + last] = load_4_once(source + (place if place < nbytes else 0))

    return load_run


def make_loads(variant: Variant) -> tuple[Any, Any, Any]:
    """Functions for kernels: a lane's part of K, of V, and of scales, of 16 tokens; those outside of the live ones
    repeat one."""
    _, address_of = make_addressing(variant.block_size)
    k_run, v_run = runs_of(variant)
    k_words, v_words = k_run.words, v_run.words
    # As many bytes as divide a row come with it, and 64 at least: there is no less.
    load_16 = load_16_once[max(gcd(k_run.nbytes, 256), 64)]
    load_k_run, load_v_run = make_load_run(k_run, load_16), make_load_run(v_run, load_16)

    @inlined
    def load_k(words: Any, k: Tokens, token: int, home: int, piece: Piece, lane: int) -> None:
        """The rows `lane // 4` and the 8th after that."""
        for r in range(2):
            position = clamp(token + r * 8 + (lane >> 2), piece.first, piece.last)
            load_k_run(words, r * k_words, address_of(position, home, k), lane & 3)

    @inlined
    def load_v(words: Any, v: Tokens, token: int, home: int, piece: Piece, lane: int) -> None:
        """The tokens that are a lane's columns in the product."""
        for r in range(4):
            position = clamp(token + (lane & 3) * 2 + (r & 1) + (r >> 1) * 8, piece.first, piece.last)
            load_v_run(words, r * v_words, address_of(position, home, v), lane >> 2)

    @inlined
    def load_scales(scales: Tokens, token: int, home: int, piece: Piece, lane: int) -> tuple[float, float]:
        """Of the tokens whose scores a lane has: `lane // 4` and the 8th after that."""
        first = clamp(token + (lane >> 2), piece.first, piece.last)
        second = clamp(token + (lane >> 2) + 8, piece.first, piece.last)
        return load_f32(address_of(first, home, scales)), load_f32(address_of(second, home, scales))

    return load_k, load_v, load_scales
