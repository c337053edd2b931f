"""Reclaiming: where the pages come from that a growth needs, and how they are given back.

Pages that nobody uses leave their rows in the order of `vmmkv.rows.policy`, only after the fence of the row has passed:
idle ones first, and what has to be waited for last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

from ..errors import DriverOutOfMemoryError, OutOfPagesError, VmmkvError
from ..memory.frames import Supply
from ..memory.monitor import is_own
from ..memory.neighbours import asking, give_back
from ..space.arena import free_waiting
from ..space.change import Change
from . import policy
from .books import Books
from .keeping import Keeping
from .scrubbing import Scrubbing


class Reclaimer:
    """See above.

    Args:
        books: what its rows hold.
        keeping: who gives up what is only kept for sequences to come.
        scrubbing: has frames that are being zeroed.
    """

    def __init__(self, books: Books, keeping: Keeping, scrubbing: Scrubbing) -> None:
        self._pool, self._account, self._books, self._table = books.pool, books.account, books, books.table
        self._keeping, self._scrubbing = keeping, scrubbing
        # The zeros behind a live row grow with each page that is taken from it.
        self.spare = 0 if books.rules.zero_tail else min(self._pool.limit_pages // 512, 64)
        """Pages to reclaim beyond those that are missing: to look for them costs as much as to reclaim several."""

    def reclaim(self, count: int, *, wait: bool = False) -> int:
        """Unmaps frames of `count` surplus pages, as far as there are any, and gives them to the pool; returns how many
        pages.

        Takes those that no work on the device may touch, unless it is to wait for it.
        """
        reclaimed = self._scrubbing.give_way(wait)
        if reclaimed < count:
            self._books.catch_up()
            rules = self._books.rules
            rows = policy.victims(self._table, rules.max_seq_len, rules.zero_tail, self._books.claims)
            reclaimed += self._reclaim_from(rows, count - reclaimed, wait)
        if reclaimed < count:
            reclaimed += self._keeping.keeper.evict(count - reclaimed, wait)
        return reclaimed

    def slacken(self, count: int, *, wait: bool = False) -> int:
        """`reclaim`, of what lies behind live rows alone."""
        self._books.catch_up()
        claimed = [row for row, (_, length) in self._books.claims.items() if length]  # others are not read behind that
        rows = policy.slack(self._table, self._books.rules.zero_tail, claimed)
        return self._reclaim_from(rows, count, wait)

    def _reclaim_from(self, rows: Iterable[tuple[int, int]], count: int, wait: bool = False) -> int:
        """`reclaim`, from rows in this order."""
        reclaimed = 0
        change, changed = self._new_change()
        with self._pool.nvtx.reclaiming:
            try:
                for row, keep in rows:
                    if row in changed:  # once more, with less to keep
                        before, (change, changed) = (change, changed), self._new_change()
                        self._run(*before)
                    fence = self._table.fences[row]
                    if wait and self._books.surplus(row):
                        fence.wait()
                    if fence.passed():
                        if self._books.shares_surplus(row):
                            reclaimed += self._unmap_shared(row, keep)
                        elif planned := self._plan(change, row, count - reclaimed, keep):
                            reclaimed += planned
                            changed.append(row)
                            self._books.is_short |= self._table.is_live(row)
                    if reclaimed >= count:
                        break
            except VmmkvError as error:
                if is_own(error):
                    self._run(change, changed)
                raise
            self._run(change, changed)
        return reclaimed

    def _unmap_shared(self, row: int, keep: int) -> int:
        """Unmaps the surplus pages of a row; returns how many of them lay in no other."""
        before = self._pool.frames.taken
        self.unmap_surplus({row: keep})
        return before - self._pool.frames.taken

    def unmap_surplus(self, rows: Mapping[int, int]) -> None:
        """Unmaps the surplus pages of rows whose fences have passed; none of so many first tokens of each."""
        change, changed = self._new_change()
        for row, keep in rows.items():
            self._plan(change, row, self._pool.limit_pages, keep)
            changed.append(row)
        self._run(change, changed)

    def _new_change(self) -> tuple[Change, list[int]]:
        """A change, and the rows that it is of."""
        return Change(self._pool), []

    def _plan(self, change: Change, row: int, count: int, keep: int) -> int:
        """Plans to unmap frames of `count` surplus pages of a row, as far as there are any; returns how many pages."""
        live, planned = self._table.is_live(row), 0
        for (arena, _), (first, end), (_, kept) in zip(
            self._books.ranges, self._books.used(row), self._books.spans(0, keep)
        ):
            if live:
                planned += arena.plan_front(change, row, first, count - planned)
            if first == end:  # no page is used: not even the frame stays that the row has come to the middle of
                end = arena.table.frame_begin(row, end)
            planned += arena.plan_back(change, row, max(end, kept), count - planned)
        return planned

    def _run(self, change: Change, rows: list[int]) -> None:
        """Runs a change, and brings the books of its rows up to it.

        Raises:
            DriverError: a call failed; the books know what was done before.
        """
        if change.is_empty:
            return
        change.run()
        change.commit()
        for row in rows:
            if self._table.is_live(row):
                self._books.retire_front(row)
                self._books.refresh(row)
            else:
                self._books.settle(row)
        change.check()

    def afford(self, count: int) -> None:
        """Sees to it that rows may have what they claim, `count` pages more, beside what others are guaranteed: what
        lies behind live rows, ours before others', gives way to it.

        Raises:
            OutOfPagesError: not even without that. Nothing has changed.
        """
        pool = self._pool
        if pool.accounts.has_guarantees and pool.accounts.overdraft(pool.limit_pages) > 0:
            self.check_allowed(count)
            for wait in (False, True):
                while (over := pool.accounts.overdraft(pool.limit_pages)) > 0 and self.slacken(over, wait=wait):
                    pass
                pool.accounts.slacken(self._account, pool.limit_pages, wait=wait)

    def supply(self, count: int, large: int) -> Supply:
        """Frames of `count` pages, up to so many large ones among them: free ones, then retired ones, then new ones,
        and under pressure any surplus."""
        pool = self._pool
        if (self._table.retired or self._table.fronts) and count > (free := pool.frames.free_pages):
            self._reclaim_from(policy.retired(self._table, self._books.rules.max_seq_len), count - free)
        if count > pool.accounts.idle(self._account):
            self._press(count)
        try:
            return pool.take(self._account, count, large)
        except DriverOutOfMemoryError as error:
            free_waiting()
            pool.collect()
            return self._supply_of_less(count, large, error)

    def _supply_of_less(self, count: int, large: int, refusal: DriverOutOfMemoryError) -> Supply:
        """`supply`, where the device has less left than the limit allows: of what nobody uses in this pool, and of what
        other pools give back to the system as far as that does not do."""
        pool = self._pool
        with asking(pool) as neighbours:
            while True:
                try:
                    return self._take_of_less(count, large, refusal)
                except OutOfPagesError as error:
                    missing = error.requested - error.available
                    if (neighbour := next(neighbours, None)) is None:
                        raise
                if give_back(neighbour, missing * pool.page_size):
                    with suppress(DriverOutOfMemoryError):  # as many as there is memory for
                        pool.frames.make(min(missing, pool.accounts.room))

    def _take_of_less(self, count: int, large: int, refusal: DriverOutOfMemoryError) -> Supply:
        """Frames of `count` pages of the memory that this pool has.

        Raises:
            OutOfPagesError: it has not as much.
        """
        self._press(count, refusal)
        try:
            return self._pool.take(self._account, count, large)
        except DriverOutOfMemoryError as error:
            available = self._pool.frames.free_pages
            raise OutOfPagesError(
                f"asked for {count} pages of {self._books.page_size} bytes; {available} are free, and {error}",
                requested=count,
                available=min(available, count - 1),
            ) from error

    def _press(self, count: int, cause: DriverOutOfMemoryError | None = None) -> None:
        """Has others, or other rows, give back what is missing of `count` pages, or raises before it changes anything.

        Idle pages go before those that have to be waited for, our own before others', but for what others were lent.
        """
        pool = self._pool

        def missing() -> int:
            return count - (pool.frames.free_pages if cause else pool.accounts.idle(self._account))

        lacking = missing()
        if self._books.parked_pages < lacking:
            self.check_allowed(count, cause)
        lent = min(lacking, self._account.guaranteed - self._account.taken)
        if lent > 0 and not cause:
            pool.accounts.reclaim_from_others(self._account, lent, wait=False)
            lacking = missing()
        for wait in (False, True):
            if lacking > 0:
                self.reclaim(lacking + (0 if wait else self.spare), wait=wait)
                lacking = missing()
            if lacking > 0:
                pool.accounts.reclaim_from_others(self._account, lacking, wait=wait, guaranteed=cause is not None)
                lacking = missing()

    def check_coming(self, count: int) -> None:
        """`check_allowed`, for pages that nobody claims yet: before anything is lost for them."""
        self._books.under_way += count
        try:
            self.check_allowed(count)
        finally:
            self._books.under_way -= count

    def check_allowed(self, count: int, cause: DriverOutOfMemoryError | None = None) -> None:
        """Raises `OutOfPagesError`, where not even all surplus would do for `count` pages more, which are claimed."""
        allowed = self._pool.accounts.allowed(self._account)
        if cause:
            allowed -= self._pool.limit_pages - self._pool.accounts.physical
        kept = self._books.kept_pages + self._books.under_way - count
        if allowed < kept + count:
            limit = str(cause) if cause else f"{allowed} are the most that this cache can have"
            raise OutOfPagesError(
                f"asked for {count} more pages of {self._books.page_size} bytes; {allowed - kept} can be had: {limit}, "
                f"and {kept} pages hold tokens of live sequences. Free or truncate sequences, or make the cache "
                "with a larger max_bytes",
                requested=count,
                available=allowed - kept,
            ) from cause
