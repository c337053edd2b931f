"""Growing: what maps the pages that rows claim, for all of them or for none.

The plan says which pages are missing, the supply comes from wherever frames can be had, one change maps them, they are
cleaned where that is promised, and whatever fails takes all of it back. In this order, and back from below:

    claim     what rows are to hold counts as theirs                      looked at again
    plan      which pages lack, row by row and arena by arena
    supply    frames, that are free, new, or somebody's surplus           given back
    run       one change, while others go on, who see no claims           unmapped
    clean     pages, where that is promised                               waited for
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from ..driver.fence import Fence, finished_on_error
from ..errors import DriverError, OutOfPagesError, UseAfterFreeError, VmmkvError
from ..memory.frames import Supply
from ..memory.monitor import Steps
from ..space.arena import Arena
from ..space.change import Change
from ..space.undo import Undo
from . import policy
from .books import Books
from .cleaning import Cleaner, Growth
from .reclaiming import Reclaimer


class Growing:
    """See above.

    Args:
        books: what its rows hold.
        reclaimer: gives pages.
        cleaner: fills them.
    """

    def __init__(self, books: Books, reclaimer: Reclaimer, cleaner: Cleaner) -> None:
        self._pool, self._account, self._books = books.pool, books.account, books
        self._reclaimer, self._cleaner = reclaimer, cleaner
        self._table, self._driver = books.table, books.pool.driver
        self.pages = 0
        """Pages that were mapped."""

    def make_room(self, claims: dict[int, tuple[int, int]], needing: list[int]) -> Steps[None]:
        """Maps the pages that tokens `[start, length)` of rows lie in. What rows hold is as before.

        Args:
            claims: of all that grow: the pages of one are no surplus for another.
            needing: those of them that may need pages.

        Raises:
            OutOfPagesError: the budget, or the device, cannot supply the pages.
            DriverError: a driver call failed.
            StreamCaptureError: pages have to be zeroed, or waited for, while a CUDA graph is captured.
            UseAfterFreeError: another thread has ended a sequence of these meanwhile.
                In all cases nothing has changed.
        """
        self._books.claims = claims
        plan = self._plan(needing)
        away = [row for row in needing if row in self._table.suspended]
        if plan or away or self._books.rules.cleans:
            with Undo() as undo, self._pool.nvtx.growth:
                undo.push(self.look_again, needing)
                self._reclaimer.afford(self._asked(plan, away))
                yield from self._map(needing, plan, undo)
        self._books.claims = {}
        for row in needing:
            self._table.stir(row)

    def grow(self, claims: dict[int, tuple[int, int]], needing: list[int]) -> Steps[None]:
        """`make_room`. Of rows that are to be read to their very end, and hold nothing yet, what one range has behind
        their claims may be what another lacks."""
        try:
            yield from self.make_room(claims, needing)
        except OutOfPagesError:
            empty = [row for row in needing if not self._table.length[row]]
            if not empty or not self._books.rules.zero_tail:
                raise
            for row in empty:
                self.keep(row, claims[row][1])
            yield from self.make_room(claims, needing)

    def fence_fills(self, rows: Collection[int]) -> None:
        """Keeps what was mapped for rows, and nobody uses yet, until it has been filled."""
        if self._books.rules.cleans or self._pool.tenants:
            with finished_on_error(self._driver):
                fence = self._table.fence_after(self._driver, rows)
                for row in rows:
                    self._table.fence(row, fence)

    def keep(self, row: int, tokens: int) -> None:
        """Gives back what a row without tokens has adopted beyond so many: soon nobody else may have it."""
        places = zip(self._books.tables, self._books.spans(0, tokens))
        if any(table.end[row] > end for table, (_, end) in places):
            self._table.fences[row].wait()
            self._reclaimer.unmap_surplus({row: tokens})

    def _map(self, rows: list[int], plan: list[Growth], undo: Undo) -> Steps[None]:
        """Maps, and zeroes where that is asked for, what rows claim."""
        zero_tail, tenants = self._books.rules.zero_tail, self._pool.tenants
        fills: list[Fence] = []  # that a failure has left under way
        if zero_tail and plan:
            self._wait_for_readers(rows)
        supply = self._supply(plan)
        undo.push(self._give_back, supply)
        change = self._change(plan, supply)
        undo.push(self._unmap, plan, fills)
        if not change.is_empty:
            yield from self._run(change, rows)
        begun = self._cleaner.begun(rows)
        if begun or tenants:
            undo.push(self._fence, rows, fills)
            self._cleaner.clean(begun, plan)
        if zero_tail:
            for row in rows:
                self._fill_zeros(row)

    def _plan(self, rows: list[int]) -> list[Growth]:
        """What rows are to get for their claims."""
        plan: list[Growth] = []
        books, is_large = self._books, self._books.rules.large
        for row in rows:
            start, length = books.claims[row]
            for (arena, _), (first, end) in zip(books.ranges, books.spans(start, length)):
                table = arena.table
                reaches = table.reaches(row, first)
                mapped, ready = (table.end[row], table.ready[row]) if reaches else (first, first)
                if end > ready or not reaches:
                    missing = max(end - mapped, 0)
                    large = policy.large_frames(missing, start) if is_large else 0
                    plan.append(Growth(arena, row, first, end, missing, large, ready))
        return plan

    def _asked(self, plan: list[Growth], away: list[int]) -> int:
        """The pages that rows may not have unasked: those that are missing, and all of those that are suspended, which
        others may have been given for their own."""
        asked = sum([growth.missing for growth in plan if growth.row not in away])
        return asked + sum(end - first for row in away for first, end in self._books.used(row))

    def _supply(self, plan: list[Growth]) -> Supply:
        """Frames for a plan. Raises what `Reclaimer.supply` raises."""
        missing = large = 0
        for growth in plan:
            missing, large = missing + growth.missing, large + growth.large
        if not missing:
            return Supply([], [])
        supply = self._reclaimer.supply(missing, large)
        self.pages += missing
        self._pool.pages_in_need += missing
        return supply

    def _change(self, plan: list[Growth], supply: Supply) -> Change:
        """One change of a plan."""
        for growth in plan:
            if self._books.rules.zero_tail:  # first: what is in doubt behind a row's end is zeros
                growth.arena.make_way(growth.row, growth.end)
            if not growth.arena.table.reaches(growth.row, growth.first):
                self._begin(growth.arena, growth.row, growth.first)
        change = Change(self._pool)
        for growth in plan:
            change.map(growth.arena.table, growth.row, growth.end, supply, growth.large)
        return change

    def _run(self, change: Change, rows: list[int]) -> Steps[None]:
        """Makes a change, while others go on: nobody but who grows is to know of what is claimed.

        Raises:
            DriverError: a call failed. What was mapped before it is in the books.
            UseAfterFreeError: a sequence has ended meanwhile.
        """
        owners = [self._table.owner[row] for row in rows]
        claims = self._books.hide_claims()
        yield change.run
        self._books.show_claims(claims)
        change.commit()
        change.check()
        if owners != [self._table.owner[row] for row in rows]:
            raise UseAfterFreeError("a sequence was freed by another thread while it was extended; nothing has grown")

    def _begin(self, arena: Arena, row: int, first: int) -> None:
        """Makes a row without tokens begin at page `first`, where its pages do not reach."""
        self._table.fences[row].wait()
        arena.unmap_back(row, 0)
        arena.table.begin_at(row, first)

    def _give_back(self, supply: Supply) -> None:
        """Undoes `_supply`, of what was not mapped."""
        self._pool.give(self._account, supply.large + supply.single)

    def _unmap(self, plan: list[Growth], fills: list[Fence]) -> None:
        """Undoes `_run`, behind fills. Pages that cannot be unmapped, or not yet, stay as surplus."""
        for fence in fills:
            if self._books.rules.zero_tail or self._pool.tenants:
                fence.wait()  # who reads all that is mapped must not see these pages, so they cannot stay until later
            if not fence.passed():
                return
        for growth in plan:
            with suppress(DriverError):
                growth.arena.unmap_back(growth.row, growth.ready)

    def _fence(self, rows: list[int], fills: list[Fence]) -> None:
        """Undoes `Cleaner.clean`, of which some may be under way; not during a capture, which has refused it."""
        fills.append(self._table.fence_after(self._driver, rows))
        for row in rows:
            self._table.fence(row, fills[-1])

    def look_again(self, rows: list[int]) -> None:
        """Brings the books of rows up to what is mapped, and has zeros behind them begin there."""
        self._books.claims = {}
        for row in rows:
            if not self._table.is_live(row):
                self._table.forget(row)
                self._books.settle(row)
                continue
            if not self._table.length[row]:
                for table in self._books.tables:
                    if not table.pages(row):
                        table.begin_at(row, 0)
            elif self._books.rules.zero_tail:
                with suppress(VmmkvError):
                    self._fill_zeros(row)
            self._books.retire_front(row)
            self._books.refresh(row)

    def _wait_for_readers(self, rows: list[int]) -> None:
        """Waits for work that may read rows to their very end, behind which something will be unmapped."""
        fence = self._table.fence_after(self._driver, rows)
        for row in rows:
            fence = self._table.fences[row] | fence
        fence.wait()

    def _fill_zeros(self, row: int) -> None:
        """Makes a row readable to its end in every arena."""
        for arena, _ in self._books.ranges:
            if arena.table.ready[row] < arena.table.end[row]:
                self._wait_for_readers([row])
            arena.fill_zeros(row, *self._books.zero_frames)
