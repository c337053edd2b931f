"""Beginning: which row a new sequence is given, and what it finds mapped there.

A row is *picked*: off the lists, with nothing on it of another tenant's, nor of work that the sequence's stream would
not come after, and with scales of 1, where rows have any. Then it is *given* to the sequence, which has no tokens yet.
Those it *takes*, on pages that lie there or are mapped; or it *adopts* them, with a row that was kept; or they are laid
there, or shared (`vmmkv.rows.laying`, `vmmkv.rows.sharing`).

Picked is the first of these that there is:
 1. The parked row of its tenant, and of no other stream's work, whose pages fit best. Large frames that reach beyond
    what is expected are unmapped; where work may still touch them another row is taken, as long as memory is idle.
 2. An empty row.
 3. The oldest parked row, which is waited for; another tenant's is unmapped.
 4. The oldest retired row, which is waited for, and unmapped.
 5. The kept row that is least needed, which is given up.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from ..driver.fence import Fence, finished_on_error
from ..errors import VmmkvError
from ..memory import debugging
from ..memory.monitor import Steps
from ..space.arena import Arena
from ..space.undo import Undo
from .books import Books
from .growing import Growing
from .keeping import Keeping
from .reclaiming import Reclaimer


class Beginning:
    """See above.

    Args:
        books: what rows hold.
        keeping: who keeps rows.
        reclaimer: unmaps what must not lie there.
        growing: maps what is missing.
    """

    def __init__(self, books: Books, keeping: Keeping, reclaimer: Reclaimer, growing: Growing) -> None:
        self._pool, self._account, self._books, self._table = books.pool, books.account, books, books.table
        self._keeping, self._reclaimer, self._growing = keeping, reclaimer, growing
        self.adoptions = 0
        """Sequences that started on a row with mapped pages."""
        self.origins: dict[int, str] = {}
        """With debugging, by row: who has started its sequence."""

    # ------------------------------------------------------------------ picking

    def pick(self, tokens: int, stream: Any, tenant: int | None, row: int | None = None) -> int:
        """Takes a row off the lists, for a sequence of so many tokens on a stream; what another tenant had there is
        unmapped.

        Args:
            tenant: whose it is; None: it is to have no pages.
            row: which; None: the one that suits it best.

        Raises:
            OutOfRowsError: all rows are live, or that one.
            DriverError: what is there could not be unmapped, or waited for; the row is back on the lists.
            StreamCaptureError: rows have scales, and a CUDA graph is being captured; the row is back on the lists.
        """
        table = self._table
        if row is None:
            row = self._choose(tokens, stream, tenant)
        if row in table.kept:
            self._keeping.keeper.give_up(row)
        table.pick_row(row)
        try:
            if (table.tenant[row] != tenant or row in table.retired) and self._books.has_pages(row):
                table.fences[row].wait()
                self._reclaimer.unmap_surplus({row: 0})
                table.empty.pop(row, None)
            elif not table.fences[row].passed_for(stream):
                table.fences[row].wait()
            self._reset_scales(row, stream)
        except VmmkvError:
            table.forget(row)
            self._books.settle(row)
            raise
        return row

    def pick_at_once(self, tokens: int, stream: Any, tenant: int, now: int = 0) -> int | None:
        """Takes a row off the lists that a sequence can have as it is, for which nothing is mapped or unmapped and
        nobody waited for; None where the row that `pick` would take is another.

        Args:
            now: of its tokens those that there is to be room for.

        Raises:
            DriverError, StreamCaptureError: rows have scales, which could not be made 1; the row is on the lists.
        """
        table = self._table
        row, beyond = self._fitting(tokens, stream, tenant)
        if row is None:
            row = next(reversed(table.empty), None)
            if row is None or not table.fences[row].passed_for(stream):
                return None
        if beyond or not self.is_ready(row, now):
            return None
        self._reset_scales(row, stream)
        table.pick_row(row)
        return row

    def _reset_scales(self, row: int, stream: Any) -> None:
        """Has a row begin with scales of 1, if it has any; `stream` is the current one, behind all work on the row."""
        if self._books.scales:
            with finished_on_error(self._pool.driver):
                self._books.scales.reset(row)
                self._table.fences[row] |= Fence.after(self._pool.driver, [stream])  # who has it next may be on another

    def is_ready(self, row: int, tokens: int) -> bool:
        """Whether a sequence can have so many tokens on a row that nobody has as it is: nobody is asked for pages, none
        are filled, and nothing is just being mapped there. (Not in an empty row either: that was meant for who has just
        left it.)"""
        if self._pool.accounts.has_guarantees or (tokens and self._books.rules.cleans):
            return False
        for arena, _ in self._books.ranges:
            if arena.table.ready[row] < arena.table.end[row] or arena.table.is_changing(row):
                return False
        return tokens <= self._table.capacity[row]

    def _choose(self, tokens: int, stream: Any, tenant: int | None) -> int:
        """The row that suits a sequence best."""
        table = self._table
        row, _ = self._fitting(tokens, stream, tenant)
        if row is None:
            row = next(chain(reversed(table.empty), table.parked, table.retired), None)
        if row is None:
            table.check_left(1)
            row = self._keeping.keeper.least_needed()
        return row

    def _fitting(self, tokens: int, stream: Any, tenant: int | None) -> tuple[int | None, list[tuple[Arena, int]]]:
        """The parked row that fits best, and what reaches beyond so many tokens there, if that can go."""
        for row in self._table.fitting(tokens, stream, tenant):
            beyond = self._beyond(row, tokens)
            if not beyond or self._table.fences[row].passed() or not self._has_idle(tokens):
                return row, beyond
        return None, []

    def _beyond(self, row: int, tokens: int) -> list[tuple[Arena, int]]:
        """Arenas in which large frames of a row reach beyond so many tokens, and the page where these begin."""
        if not self._books.rules.large:
            return []
        ends = zip(self._books.ranges, self._books.spans(0, tokens))
        begins = [(arena, arena.table.large_beyond(row, end)) for (arena, _), (_, end) in ends]
        return [(arena, begin) for arena, begin in begins if begin < arena.table.end[row]]

    def _has_idle(self, tokens: int) -> bool:
        """Whether there is memory for so many tokens that nobody needs to give up."""
        pages, accounts = sum(end for _, end in self._books.spans(0, tokens)), self._pool.accounts
        return pages <= min(accounts.idle(self._account), accounts.headroom(self._account))

    # ------------------------------------------------------------------ what it begins with

    def give(self, row: int, owner: int, expected: int, stream: Any, tenant: int) -> None:
        """Gives a picked row to a new sequence on a stream, as it is."""
        self._table.own(row, owner, stream, expected, tenant)
        if self._pool.is_debugged:
            self.origins[row] = debugging.caller()
        self._books.refresh(row)

    def give_trimmed(self, row: int, owner: int, tokens: int, expected: int, stream: Any, tenant: int) -> bool:
        """`give`, to a sequence that is to have so many tokens: what reaches too far beyond them is unmapped. Returns
        whether there are pages.

        Raises:
            OutOfPagesError, DriverError: see `afford`, or that could not be unmapped; the row is back on the lists.
        """
        with Undo() as undo:
            undo.push(self._books.vacate, row)
            self._afford_single(row, tokens)
            self.afford(row, tokens)
            adopted = self._books.has_pages(row)
            self.give(row, owner, expected, stream, tenant)
            beyond = self._beyond(row, max(tokens, expected)) if adopted else []
            if beyond and self._table.fences[row].passed():
                for arena, page in beyond:
                    arena.unmap_back(row, page)
                self._books.refresh(row)
        return adopted

    def take(self, row: int, owner: int, tokens: int, expected: int, stream: Any, tenant: int) -> Steps[None]:
        """Gives a picked row to a new sequence on a stream, with room for `tokens` tokens.

        Its pages for tokens that are `expected` are reclaimed after those of idle parked rows.

        Raises:
            OutOfPagesError, DriverError, StreamCaptureError: see `Growing.make_room`; the row is back on the lists.
        """
        adopted = self.give_trimmed(row, owner, tokens, expected, stream, tenant)
        is_dense = tokens > 0 and self._books.rules.zero_tail
        with Undo() as undo:
            undo.push(self._books.vacate, row)
            if is_dense:
                self._growing.keep(row, 2 * max(tokens, expected))
            if is_dense or tokens > self._table.capacity[row]:
                yield from self._growing.grow({row: (0, tokens)}, [row])
        self._table.length[row] = tokens
        self._books.refresh(row)
        self.adoptions += adopted

    def adopt(self, row: int, owner: int, tokens: int, expected: int, stream: Any, tenant: int) -> None:
        """Gives a kept row to a new sequence on a stream, which has its first tokens then."""
        self._table.kept.pop(row)
        self._table.length[row] = tokens
        self.give(row, owner, expected, stream, tenant)
        self._books.use(row)
        self.adoptions += 1

    def afford(self, row: int, tokens: int) -> None:
        """Sees to it that a sequence may have what lies on a row that is nobody's, and is to hold so many tokens. Where
        others are guaranteed too much for that, what lies behind these goes first.

        Raises:
            OutOfPagesError: they cannot be had. Nothing has changed.
            DriverError: what lies behind them, or behind others, could not be unmapped.
        """
        accounts = self._pool.accounts
        if not accounts.has_guarantees or not self._books.has_pages(row):
            return
        self._books.claims = {row: (0, tokens)}
        try:
            pages = sum(end for _, end in self._books.used(row))
            if accounts.overdraft(self._pool.limit_pages) > 0:
                self._reclaimer.check_allowed(pages)  # before anything is lost
                self._table.fences[row].wait()
                self._reclaimer.unmap_surplus({row: tokens})
                self._table.forget(row)
            self._reclaimer.afford(pages)
        finally:
            self._books.claims = {}

    def _afford_single(self, row: int, tokens: int) -> None:
        """Where others are guaranteed too much for the whole of large frames that reach beyond so many tokens, on a row
        that holds none, these go, and leave room for single pages.

        Raises:
            OutOfPagesError: not even these can be had. Nothing has changed.
            DriverError: they could not be unmapped.
        """
        accounts, books = self._pool.accounts, self._books
        if not accounts.has_guarantees or not (beyond := self._beyond(row, tokens)):
            return
        books.claims = {row: (0, tokens)}
        try:
            if accounts.overdraft(self._pool.limit_pages) <= 0:
                return
        finally:
            books.claims = {}
        self._reclaimer.check_coming(sum(end for _, end in books.spans(0, tokens)))
        self._table.fences[row].wait()
        for arena, page in beyond:
            arena.unmap_back(row, page)
        books.refresh(row)
