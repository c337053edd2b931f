"""Reclaiming: where the pages come from that a growth needs, and how they are given back.

Pages that nobody uses leave their rows in the order of `vmmkv.rows.policy`, only after the fence of the row has passed:
idle ones first, and what has to be waited for last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..errors import DriverOutOfMemoryError, OutOfPagesError
from ..memory.pool import Account, FramePool
from ..space.arena import free_waiting
from . import policy
from .books import Books


class Reclaimer:
    """See above.

    Args:
        pool: where frames come from and go to.
        account: what the cache may have of it.
        books: what its rows hold.
    """

    def __init__(self, pool: FramePool, account: Account, books: Books) -> None:
        self._pool, self._account, self._books, self._table = pool, account, books, books.table
        # A live row's zero tail grows with each page that is taken from it.
        self.spare = 0 if books.rules.zero_tail else pool.limit // 512
        """Pages to reclaim beyond those that are missing: to look for them costs as much as to reclaim several."""

    def reclaim(self, count: int, *, wait: bool = False) -> int:
        """Unmaps up to `count` surplus pages, and gives them to the pool; returns how many.

        Takes those that no work on the device may touch, unless it is to wait for it.
        """
        return self._reclaim_from(self._victims(), count, wait)

    def _victims(self) -> Iterator[tuple[int, int]]:
        """Rows that may have pages to give, and the tokens whose pages they keep."""
        live = self._table.live_rows()
        lengths = self._table.lengths[live]
        for index, row in enumerate(live.tolist() if self._books.claims else ()):
            if row in self._books.claims:
                lengths[index] = self._books.claims[row][1]
        return policy.victims(
            self._table, lengths, self._books.page_tokens, self._books.rules.max_seq_len, self._books.rules.zero_tail
        )

    def _reclaim_from(self, rows: Iterable[tuple[int, int]], count: int, wait: bool = False) -> int:
        """`reclaim`, from rows in this order."""
        reclaimed = 0
        with self._pool.ranges.reclaiming:
            for row, keep in rows:
                if not self._books.surplus(row):
                    continue
                if wait:
                    self._table.fences[row].wait()
                if self._table.fences[row].passed():
                    reclaimed += self.unmap_surplus(row, count - reclaimed, keep)
                if reclaimed >= count:
                    break
        return reclaimed

    def unmap_surplus(self, row: int, count: int, keep: int = 0) -> int:
        """Unmaps up to `count` surplus pages of one row, whose fence has passed; none of its first `keep` tokens.

        Returns:
            how many.
        """
        live = self._table.is_live(row)
        unmapped = 0
        try:
            for (arena, _), (first, end), (_, kept) in zip(
                self._books.ranges, self._books.used(row), self._books.spans(0, keep)
            ):
                table = arena.table
                if live:
                    unmapped += arena.unmap_front(row, min(first, table.first[row] + count - unmapped))
                unmapped += arena.unmap_back(row, max(end, kept, table.end[row] - (count - unmapped)))
        finally:
            if live:
                self._books.retire_front(row)
                self._books.refresh(row)
            else:
                self._books.settle(row)
        return unmapped

    def _parked_pages(self, enough: int) -> int:
        """Pages of parked rows, counted up to `enough`: what is usually there to be reclaimed."""
        count = 0
        for row in self._table.parked:
            for arena, _ in self._books.ranges:
                count += arena.table.pages(row)
            if count >= enough:
                break
        return count

    def supply(self, count: int) -> list[int]:
        """`count` frames: free ones, then retired ones, then new ones, and under pressure any surplus."""
        pool = self._pool
        free = len(pool.frames.free)
        if self._table.retired and count > free:
            self._reclaim_from(policy.retired(self._table, self._books.rules.max_seq_len), count - free)
        if count > pool.idle(self._account):
            self._press(count)
        try:
            return pool.take(self._account, count)
        except DriverOutOfMemoryError as error:
            free_waiting()
            pool.collect()
            self._press(count, error)  # the device has less left than the limit allows
            return pool.take(self._account, count)

    def _press(self, count: int, cause: DriverOutOfMemoryError | None = None) -> None:
        """Has others, or other rows, give back what is missing of `count` pages, or raises before it changes anything.

        Idle pages go before those that have to be waited for, our own before others'.
        """
        pool = self._pool

        def missing() -> int:
            return count - (len(pool.frames.free) if cause else pool.idle(self._account))

        if self._parked_pages(missing()) < missing():
            self._check_allowed(count, cause)
        self.reclaim(missing() + self.spare)
        for wait in (False, True):
            if missing() > 0 and wait:
                self.reclaim(missing(), wait=True)
            if missing() > 0:
                pool.reclaim_from_others(self._account, missing(), wait=wait, guaranteed=cause is not None)

    def _check_allowed(self, count: int, cause: DriverOutOfMemoryError | None = None) -> None:
        """Raises `OutOfPagesError`, where not even all surplus would do for `count` pages more, which are claimed."""
        allowed = self._pool.allowed(self._account)
        if cause:
            allowed -= self._pool.limit - self._pool.frames.existing
        kept = self._books.kept_pages - count
        if allowed < kept + count:
            limit = str(cause) if cause else f"{allowed} are the most that this cache can have"
            raise OutOfPagesError(
                f"asked for {count} more pages of {self._books.page_size} bytes; {allowed - kept} can be had: {limit}, "
                f"and {kept} pages hold tokens of live sequences. Free or truncate sequences, or make the cache "
                "with a larger max_bytes",
                requested=count,
                available=allowed - kept,
            ) from cause
