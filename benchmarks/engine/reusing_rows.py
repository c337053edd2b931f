"""Rows of a `vmmkv.KVCache` that begin with what others have computed."""

from __future__ import annotations

from vmmkv import OutOfPagesError

from .backend import Ids
from .vmm import VmmKV


class ReusingVmmKV(VmmKV):
    """A `ReusingKV`."""

    def begin(self, ids: Ids, tokens: int, spare: int | None) -> tuple[int, int] | None:
        if spare is not None and not self._has_room(ids, tokens, spare):
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

    def _has_room(self, ids: Ids, tokens: int, spare: int) -> bool:
        """`fits`, also for who shares pages with those who run."""
        if not self.free_rows:
            return False
        cache, wanted = self.cache, (tokens + self.overread + spare) * self.cache.layout.token_bytes
        missing = wanted - cache.available_pages * cache.page_size
        return missing <= 0 or missing <= cache.shared_pages(ids) * cache.page_size

    def commit(self, row: int, ids: Ids) -> None:
        self.sequences[row].commit(ids)
