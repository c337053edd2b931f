"""Blocks: whole runs of `block_size` tokens, each named by a hash of all tokens up to its end.

Block `i` of a sequence is tokens `[i * block_size, (i + 1) * block_size)`. Its digest is SHA-256 of the digest of the
block before it and its own token ids as little-endian int64; what comes before the first block is a digest of salt,
adapter, tenant and block size (`naming`). So a digest is the same in every process, and equal only for equal prefixes
under the same names. Others are told the last 8 of its 32 bytes, as a big-endian number.

Blocks have nothing to do with pages. A block belongs to the span in which its last token was stored.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .naming import root_digest

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Consecutive blocks of one sequence.

    Attributes:
        hashes: one per block, unsigned 64-bit numbers.
        parent: the hash of the block before the first one; None at the beginning of the sequence.
        ids: their token ids, int64, `[len(hashes) * size]`.
        start: the position of the first token in the sequence.
        size: tokens in a block.
        salt: the salt of the sequence, if any.
        adapter: the LoRA adapter that they were computed with, by name or number, if any.
        tenant: the sequence's tenant, if any.
    """

    hashes: tuple[int, ...]
    parent: int | None
    ids: NDArray[np.int64]
    start: int
    size: int
    salt: str | None
    adapter: str | int | None
    tenant: str | int | None


@dataclass(frozen=True, slots=True)
class Root:
    """What sequences begin with that may share blocks."""

    salt: str | None
    adapter: str | int | None
    tenant: str | int | None
    block_size: int
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", root_digest(self.salt, self.adapter, self.tenant, self.block_size))


@dataclass(eq=False, slots=True)
class Span:
    """Tokens that were stored together, to be named again when some of them are removed or moved.

    Attributes:
        root: what its sequences begin with.
        parent: the span that it continues, at any of that one's tokens; None at the root.
        start: the position of its first token.
        stop: the position behind its last token.
    """

    root: Root
    parent: Span | None = field(repr=False)
    start: int
    stop: int
    _digests: bytearray | None = field(default=None, init=False, repr=False)  # None until somebody was told of them

    def store(self, ids: NDArray[np.int64]) -> Blocks | None:
        """Hashes the blocks that the span owns, or returns None: it owns none, or nobody was told of its parent.

        Args:
            ids: from the beginning of the first of these blocks on.
        """
        before = self.parent._digest(self._first - 1) if self.parent else None
        if before is None:
            return None
        nbytes = 8 * self.root.block_size
        data = ids.astype("<i8").tobytes()
        digests = bytearray()
        for at in range(0, len(data) - nbytes + 1, nbytes):
            before = hashlib.sha256(before + data[at : at + nbytes]).digest()
            digests += before
        self._digests = digests
        return self.blocks(self.start, ids)

    def blocks(self, start: int, ids: NDArray[np.int64]) -> Blocks | None:
        """The blocks that end behind token `start` of the span, as far as `ids` go; None if nobody was told of any.

        Args:
            ids: from the beginning of the first of these blocks on.
        """
        size = self.root.block_size
        first = start // size
        hashes = self._hashes(first - self._first, first - self._first + len(ids) // size)
        if not hashes:
            return None
        parent = self._digest(first - 1) if first else None
        return Blocks(
            hashes=tuple(hashes),
            parent=_number(parent) if parent else None,
            ids=ids[: len(hashes) * size],
            start=first * size,
            size=size,
            salt=self.root.salt,
            adapter=self.root.adapter,
            tenant=self.root.tenant,
        )

    def remove(self, start: int) -> tuple[int, ...]:
        """Forgets the blocks that end behind token `start`, and returns their hashes, the last one first."""
        keep = max(start // self.root.block_size - self._first, 0)
        hashes = self._hashes(keep, None)
        if self._digests:
            del self._digests[keep * DIGEST_BYTES :]
        return tuple(reversed(hashes))

    @property
    def _first(self) -> int:
        """The first block that may be the span's own."""
        return self.start // self.root.block_size

    def _digest(self, block: int) -> bytes | None:
        """The digest of a block of the span, or of one before; None if nobody was told of it."""
        span = self
        while span._first > block and span.parent:
            span = span.parent
        if block < 0:
            return self.root.digest
        at = (block - span._first) * DIGEST_BYTES
        return bytes((span._digests or b"")[at : at + DIGEST_BYTES]) or None

    def _hashes(self, start: int, stop: int | None) -> list[int]:
        digests = self._digests or bytearray()
        wanted = range(len(digests) // DIGEST_BYTES)[start:stop]
        return [_number(digests[DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)]) for i in wanted]


def _number(digest: bytes | bytearray) -> int:
    return int.from_bytes(digest[-8:], "big")
