"""Blocks: whole runs of `block_size` tokens, each named by a hash of all tokens up to its end.

Block `i` of a sequence is tokens `[i * block_size, (i + 1) * block_size)`. Its digest is SHA-256 of the digest of the
block before it and its own token ids as little-endian int64; what comes before the first block is a digest of salt,
adapter, tenant and block size (`naming`). So a digest is the same in every process, and equal only for equal prefixes
under the same names. Events carry the last 8 of its 32 bytes, as a big-endian number.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .kinds import Blocks
from .naming import Names, root_digest


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """The end of some tokens of a sequence, from which later tokens are hashed: the sequence's names, the digest of the
    last whole block, or of the root, the token ids behind that block, and the hashes of blocks that end within these
    tokens."""

    names: Names
    digest: bytes
    rest: NDArray[np.int64]
    hashes: tuple[int, ...] = ()

    @classmethod
    def root(cls, names: Names, block_size: int) -> Link:
        """The beginning of all sequences of a salt, an adapter and a tenant."""
        return cls(names, root_digest(*names, block_size), np.empty(0, np.int64))

    def follow(self, ids: NDArray[np.int64], size: int) -> Link:
        """Hashes the blocks that end within the ids that come next."""
        ids = np.concatenate([self.rest, ids])
        data, digest, hashes = ids.astype("<i8", copy=False).tobytes(), self.digest, []
        for at in range(0, len(data) - 8 * size + 1, 8 * size):
            digest = hashlib.sha256(digest + data[at : at + 8 * size]).digest()
            hashes.append(int.from_bytes(digest[-8:], "big"))
        return Link(self.names, digest, ids[len(hashes) * size :].copy(), tuple(hashes))

    def blocks(self, before: Link, ids: NDArray[np.int64], start: int, known: int, size: int) -> Blocks:
        """The blocks that end within its tokens `ids`, which follow `before` and begin at position `start`, without the
        first `known` blocks, which are not all."""
        first = start - len(before.rest) + known * size
        parent = self.hashes[known - 1] if known else int.from_bytes(before.digest[-8:], "big")
        ids = np.concatenate([before.rest, ids])[known * size : len(self.hashes) * size]
        return Blocks(self.hashes[known:], parent if first else None, ids, first, size, *self.names)
