"""Rows of a `vmmkv.KVCache` that begin with what others have computed."""

from __future__ import annotations

from typing import Any

from vmmkv import OutOfPagesError
from vmmkv.reuse.node import common as common_ids

from .backend import Ids
from .vmm import VmmKV


class ReusingVmmKV(VmmKV):
    """A `ReusingKV`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.known: dict[int, Ids] = {}
        """By row, what its sequence has made known: who begins with it shares its pages."""

    def begin(self, ids: Ids, tokens: int, spare: int | None) -> tuple[int, int] | None:
        if spare is not None and not (self.fits(tokens, spare) or self.fits(tokens - self._shared_tokens(ids), spare)):
            return None
        try:
            sequence = self.cache.sequence(token_ids=ids, whole=False, expected_tokens=tokens)
        except OutOfPagesError:
            if spare is not None:
                return None
            # It has room in all pages but one: what it would begin with is in part copied, and in the way meanwhile.
            self.cache.trim()
            sequence = self.cache.sequence(token_ids=ids, whole=False, expected_tokens=tokens)
        self.sequences[sequence.row] = sequence
        self.free_rows -= 1
        return sequence.row, sequence.cached_tokens

    def _shared_tokens(self, ids: Ids) -> int:
        """Of these tokens those in whole pages that a sequence uses already: they need no more memory."""
        common = max((common_ids(ids, known) for known in self.known.values()), default=0)
        pages = common * self.cache.layout.token_bytes // self.cache.page_size
        return pages * self.cache.page_size // self.cache.layout.token_bytes

    def commit(self, row: int, ids: Ids) -> None:
        self.sequences[row].commit(ids)
        self.known[row] = ids

    def free(self, rows: list[int]) -> None:
        super().free(rows)
        for row in rows:
            self.known.pop(row, None)
