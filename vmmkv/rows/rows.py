"""The rows of one cache: whose they are, and how they grow and shrink.

Invariants, beside those of the tables:
 1. All tokens in `[start, length)` of a live row lie in pages that are mapped and accessible, and `capacity` more than
    `length` says that all up to there do. Lengths are written when there is memory, in one step.
 2. Growing to `length <= capacity` needs no driver call and no look at the row's pages.
 3. A page leaves a row, or a row changes its owner, only after the fence of the row has passed (or in the order of the
    one stream that the fence is on).
 4. `grow` maps all pages for all its rows or changes nothing.
 5. With `zero_tail` a live row that holds tokens may be read from its first page to its very end, and holds nothing of
    another sequence; none of its pages goes to another row, but for those in front. A failure that could not be undone
    leaves `PageTable.has_hole` true; the next growth repairs it.
 6. Everything here follows from what page tables and the pool say, and from extents, owners and fences: `recover` works
    it out anew after an interruption.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from ..driver.fence import wait_for_device
from ..errors import BusyError, DriverError, StreamCaptureError, UseAfterFreeError
from ..memory.accounts import Account
from ..memory.monitor import Steps, at_once
from ..memory.pool import FramePool
from ..space.arena import Arena, free_waiting
from ..space.mapper import Mover
from ..space.undo import Undo
from .ahead import Ahead
from .beginning import Beginning
from .books import Books, Rules
from .cleaning import Cleaner
from .growing import Growing
from .keeping import Keeping
from .laying import Laying
from .prewarming import Prewarming
from .reclaiming import Reclaimer
from .reordering import Reordering
from .scales import SequenceScales
from .scrubbing import Scrubbing
from .sharing import Sharing
from .shelf import Shelf
from .suspending import Suspending
from .table import NOBODY, RowTable, Suspended

FREE_PAGE = -1
"""In `KVCache.page_map`: the page exists and belongs to nobody."""
SURPLUS_PAGE = -2
"""In `KVCache.page_map`: the page is mapped, and nobody will soon need it where it is; it is ready to be adopted or
reclaimed."""
VACANT_PAGE = -3
"""In `KVCache.page_map`: the page's memory was given back to the system."""
ZERO_PAGE = -4
"""In `KVCache.page_map`: the page that lies behind every live row with `zero_tail`."""
OTHERS_PAGE = -5
"""In `KVCache.page_map`: the page is another cache's, on the same pool."""
LOOKAHEAD_PAGE = -6
"""In `KVCache.page_map`: the page holds no token, and is mapped behind a live sequence that will soon need it, as
`lookahead` and `expected_tokens` say. Others can have it all the same: `stats()` counts it as surplus."""
SHARED_PAGE = -7
"""In `KVCache.page_map`: the page holds tokens of several sequences, which were forked, or begin alike."""
KEPT_PAGE = -8
"""In `KVCache.page_map`: the page holds tokens that sequences may begin with, and that no live one has, on a row or on
none. Others can have it all the same: `stats()` counts it as surplus."""

MANY = 64
"""Rows whose pages are counted even where nobody asks, so that who asks does not wait for more."""


class Rows:
    """See above.

    Args:
        pool: the frame pool that they lie on.
        account: what the cache may have of it; it is opened.
        num_rows: how many.
        ranges: per range of the layout the bytes of a row, and of a token record.
        rules: what the cache promises.
        scales: what rows have beside their pages, if anything.

    Raises:
        BudgetError: so much cannot be guaranteed.
        DriverError, StreamCaptureError: arenas could not be reserved, or a page not be zeroed.
    """

    kind = "KVCache"
    """What users call it on whose account frames are."""

    def __init__(
        self,
        pool: FramePool,
        account: Account,
        num_rows: int,
        ranges: Iterable[tuple[int, int]],
        rules: Rules,
        scales: SequenceScales | None,
    ) -> None:
        self.pool, self.account, self.rules, self.scales = pool, account, rules, scales
        self._driver, self.max_seq_len = pool.driver, rules.max_seq_len
        self.table = RowTable(num_rows)
        arenas = [(Arena(pool, account, num_rows, nbytes), record) for nbytes, record in ranges]
        self.page_uses = 0
        """How often a page has left a sequence since the beginning."""
        self.abandoned: deque[weakref.KeyedRef[tuple[int, int], Any]] = deque()
        """Rows, and the numbers of their sequences, that were left behind without `free`."""
        self.keeping = Keeping()
        """Who keeps rows and pages for sequences that begin alike."""
        self.books = books = Books(pool, account, self.table, arenas, rules, scales)
        """What each row holds."""
        self.scrubbing = Scrubbing(books)
        """What zeroes frames for them that were another tenant's."""
        self.movers: list[Mover] = [self.scrubbing]
        """What the mapper does where there is nothing to map: zeroes frames, and has what is kept lie better."""
        self.ahead = Ahead(books, self.keeping, self.scrubbing)
        """What a mapper may do for them."""
        self.reclaimer = Reclaimer(books, self.keeping, self.scrubbing)
        """Where pages come from."""
        self._cleaner = Cleaner(books)
        self.growing = Growing(books, self.reclaimer, self._cleaner)
        """What maps them."""
        self.beginning = Beginning(books, self.keeping, self.reclaimer, self.growing)
        """Which of them a new sequence is given."""
        self.sharing = Sharing(books, self.keeping, self.reclaimer, self.growing)
        """What has several lie on the same pages."""
        self.laying = Laying(books, self.reclaimer, self.growing, self.sharing)
        """What has them begin with pages that are kept."""
        self.reordering = Reordering(books, self.keeping, self.reclaimer, self.growing, self.sharing)
        """What has them hold what others held."""
        self.suspending = Suspending(books, self.keeping)
        """What has their tokens be on the host meanwhile."""
        self.prewarming = Prewarming(books)
        """What maps empty ones before anybody asks."""
        pool.accounts.open(account, self)
        if rules.zero_tail:
            try:
                self._make_zero_frame()
            except BaseException:
                pool.accounts.close(account)
                raise

    def _make_zero_frame(self) -> None:
        """Takes the frame of the zeros behind rows, and zeroes it."""
        arena, _ = self.ranges[0]
        self.pool.accounts.check_allowed(self.account, 1)
        self.pool.accounts.make_headroom(self.account, 1)
        frames = self.reclaimer.supply(1, 0).single
        arena.zero(*frames)  # until then it lies in a row
        self.books.zero_frames = arena.table.zero_frames = frames

    @property
    def ranges(self) -> list[tuple[Arena, int]]:
        """Per range of the layout its arena, and the bytes of a token record in it."""
        return self.books.ranges

    @property
    def arenas(self) -> list[Arena]:
        """All of them, also those of no sequence."""
        staging = [self.sharing.staging, self.scrubbing.staging]
        return [arena for arena, _ in self.ranges] + [arena for arena in staging if arena]

    def frames_taken(self) -> set[int]:
        """The pages that the cache has, wherever they are: on rows, behind them, or kept."""
        tables = [table for table in self.pool.tables if table.account is self.account]
        return {page for table in tables for page in table.mapped_pages()}

    def close(self) -> None:
        """Ends all sequences and unmaps everything, in whatever state the driver is; all work must have finished."""
        self.table.owners[:] = NOBODY
        self.keeping.keeper.close()
        for arena in self.arenas:
            arena.close()
        self.pool.accounts.close(self.account)

    # ------------------------------------------------------------------ what there is

    def pages(self, row: int) -> list[tuple[list[int], list[int]]]:
        """Per arena what lies on the row's pages, and on those that are used."""
        return [
            (table.pages_in(row).tolist(), table.pages_in(row, *span).tolist())
            for table, span in zip(self.books.tables, self.books.used(row))
        ]

    def page_map(self) -> npt.NDArray[np.int64]:
        """What each physical page holds, by page number: see `KVCache.page_map`."""
        frames = self.pool.frames
        pages = np.where(frames.handles[: frames.numbers] < 0, VACANT_PAGE, OTHERS_PAGE).astype(np.int64)
        pages[frames.in_pages([*frames.free, *frames.free_large])] = FREE_PAGE
        pages[self.books.zero_frames] = ZERO_PAGE
        pages[list(self.frames_taken() - set(self.books.zero_frames))] = SURPLUS_PAGE
        pages[self.keeping.keeper.held_pages()] = KEPT_PAGE
        for row in self.table.live:  # one after another: a page may lie in several rows
            for table, wanted in zip(self.books.tables, self.books.wanted(row)):
                pages[table.pages_in(row, *wanted)] = LOOKAHEAD_PAGE
        for row in self.table.live:
            for table, used in zip(self.books.tables, self.books.used(row)):
                pages[table.pages_in(row, *used)] = self.table.owner[row]
        pages[frames.users[: len(pages)] > 1] = SHARED_PAGE
        return pages

    def sequences(self) -> tuple[int, int]:
        """Live sequences, and their tokens."""
        return len(self.table.live), self.table.tokens

    def known_tenants(self) -> set[int]:
        """Numbers of tenants that have rows, or had them last, or of whom something is kept."""
        return set(self.table.tenants.tolist()) | self.keeping.keeper.known_tenants()

    def held(self) -> list[str]:
        """What live sequences hold, and with debugging who has started each, and taken its pages."""
        lines = []
        collected = {reference.key for reference in self.abandoned}
        for row in self.table.live:
            if (row, self.table.owner[row]) in collected:
                continue
            pages = [page for mapped, _ in self.pages(row) for page in mapped]
            away = self.table.suspended.get(row)
            start, length = (away.start, away.length) if away else self.table.extents[row].tolist()
            where = f"suspended, {length - start} tokens on the host" if away else f"{length - start} tokens"
            origin = self.beginning.origins.get(row, "an unknown place")
            lines.append(f"sequence {self.table.owner[row]}: {where}, {len(pages)} pages, started at {origin}")
            lines += [f"  {line}" for line in self.pool.taken_by(pages)]
        return lines

    @property
    def kept_pages(self) -> int:
        """Pages that others cannot have."""
        return self.books.kept_pages

    @property
    def firm_pages(self) -> int:
        """Those, and pages that live rows may grow into without asking."""
        return self.books.firm_pages

    @property
    def available_pages(self) -> int:
        """Pages that can be had, but for those behind live rows that work on the GPU may still read."""
        kept, table = self.kept_pages, self.table
        if table.fenced:
            fenced = [row for row in table.fenced if table.is_live(row) and not table.fences[row].passed()]
            table.fenced = dict.fromkeys(fenced)
        fenced_pages = sum(self.books.surplus(row) for row in table.fenced if row in table.spare)
        return self.pool.accounts.allowed(self.account) - kept - fenced_pages

    def reclaim(self, count: int, *, wait: bool = False, firm: bool = False) -> int:
        """Gives up to `count` surplus pages to the pool: see `Reclaimer.reclaim`, and if `firm`, `slacken`."""
        self.release_abandoned()
        return (self.reclaimer.slacken if firm else self.reclaimer.reclaim)(count, wait=wait)

    # ------------------------------------------------------------------ leaving rows

    def release(self, references: Iterable[tuple[int, int]]) -> None:
        """Takes rows from their sequences, behind a fence on the current stream and those in use.

        Args:
            references: rows and the numbers of their sequences; those that are not theirs any more are passed over.

        Raises:
            StreamCaptureError: a CUDA graph is being captured, on the current stream or on one of theirs; no row was
                taken.
        """
        rows = [row for row, number in dict.fromkeys(references) if self.table.owner[row] == number]
        if not rows:
            return
        fence = self.table.fence_after(self._driver, rows)
        for row in rows:
            self.table.fence(row, fence)
            own, leaving = self.table.own_streams[row], self.books.leaving(row, 0, 0)
            if self.keeping.keeper.leave(row):
                self.table.kept[row] = None
            self.page_uses += self.books.leave(row, leaving)
            self.books.vacate(row)
            self._cleaner.spoil(row, own, leaving)  # last: who is interrupted before still has the tokens

    def release_abandoned(self) -> bool:
        """Frees the rows of sequences that were garbage-collected, and ranges of caches that were, during a capture.
        Returns whether there were such sequences."""
        free_waiting()
        self.pool.collect()
        if self.sharing.may_be_staged:
            with suppress(DriverError):
                self.sharing.clear(wait=False)  # of what was copied, or a failure has left
        if len(self.table.stirred) >= MANY:
            self.books.catch_up()
        return self.release_collected()

    def release_collected(self) -> bool:
        """Frees the rows of sequences that were garbage-collected, for which nothing is mapped or unmapped. Returns
        whether there were such."""
        if not self.abandoned:
            return False
        references = list(self.abandoned)
        try:
            self.release(reference.key for reference in references)
        except StreamCaptureError:
            return False  # later, then
        for _ in references:
            self.abandoned.popleft()
        return True

    def recover(self) -> None:
        """Makes the books right after an interruption: what follows from other books is worked out anew."""
        if self.rules.poison or self.keeping.keeper.is_copying or self.books.unsettled:
            wait_for_device(self._driver)  # for what was being filled, or copied, which no fence may know
        self.books.claims = {}
        self.suspending.recover()
        table = self.table
        parked, retired = list(table.parked), [*table.retired, *table.fronts]
        table.parked, table.spare, table.retired, table.fronts = Shelf(), Shelf(), OrderedDict(), OrderedDict()
        table.live, table.empty, table.needy, table.fenced, table.kept = {}, {}, {}, {}, OrderedDict()
        self.books.forget_counts()
        self.keeping.keeper.reset()
        self.account.taken = len(self.frames_taken())
        self.books.duplicates = 0
        self.sharing.restore()
        self.sharing.clear()
        for row in dict.fromkeys([*parked, *retired, *range(table.num_rows - 1, -1, -1)]):  # as old as they were
            if table.is_live(row) and row not in self.books.unsettled:
                table.live[row] = table.fenced[row] = None
                self.books.use(row)
                if self.rules.cleans or self.pool.tenants:
                    self._forget_unclean(row)
                self.books.retire_front(row)
                self.books.refresh(row)
            else:
                self.books.vacate(row)
        self.books.unsettled = set()

    def _forget_unclean(self, row: int) -> None:
        """After an interruption: fences what may be being filled in a live row, and unmaps what another tenant had."""
        self.table.fence(row, self.table.fence_after(self._driver, [row]))
        for (arena, _), (_, end) in zip(self.ranges, self.books.used(row)):
            if arena.table.unclean(row, end, arena.table.end[row], self.table.tenant[row]) and self.pool.tenants:
                self.table.fences[row].wait()
                arena.unmap_back(row, end)

    # ------------------------------------------------------------------ growing and shrinking

    def grow(
        self,
        rows: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64] | None = None,
    ) -> Steps[None]:
        """Sets new lengths, and maps the pages that they need: for all rows or for none.

        Args:
            starts: also the first tokens, of rows that hold none yet; no page is mapped in front of them.

        Raises:
            DriverError, StreamCaptureError: see `Growing.make_room`; nothing has changed.
            UseAfterFreeError, BusyError: another thread has ended one of the sequences meanwhile, or changed it.
        """
        table = self.table
        before, owners = table.extents[rows], table.owners[rows]
        extents = before.copy()
        extents[:, 1] = lengths
        if starts is not None:
            extents[:, 0] = starts
        claims = dict(zip(rows.tolist(), zip(*extents.T.tolist())))
        if self.pool.frames.has_shared:
            self.sharing.make_own(rows[lengths > table.capacities[rows]].tolist(), claims)
        # Now: some may have given pages up. Who was suspended asks also if it has no token.
        capacities = table.capacities[rows] if starts is None else np.minimum(table.capacities[rows], 0)
        needing = rows[lengths > capacities].tolist()
        yield from self.growing.grow(claims, needing)
        _check_same((owners == table.owners[rows]).all(), (before == table.extents[rows]).all())
        table.extents[rows] = extents
        table.stirred.update(dict.fromkeys(rows[lengths > table.alerts[rows]].tolist()))
        for row in needing:
            if starts is not None:  # what the row had in front of them is nobody's
                self.books.retire_front(row)
            self.books.refresh(row)

    def grow_one(self, row: int, length: int) -> Steps[None]:
        """`grow` for one row, without arrays."""
        grows = length > self.table.capacity[row]
        if grows:
            start, before, owner = self.table.start[row], self.table.length[row], self.table.owner[row]
            self.sharing.make_own([row], {row: (start, length)})
            yield from self.growing.grow({row: (start, length)}, [row])
            is_same = (start, before) == (self.table.start[row], self.table.length[row])
            _check_same(self.table.owner[row] == owner, is_same)
        self.table.length[row] = length
        if grows:
            self.books.refresh(row)
        else:
            self.table.stir(row)

    def shrink(self, row: int, start: int, length: int) -> None:
        """Moves a live row's start forward or its length back. Pages without tokens become surplus.

        Raises:
            StreamCaptureError: whole pages would leave the sequence while a CUDA graph is captured.
        """
        books = self.books
        leaving = books.leaving(row, start, length)
        drops_pages = self.rules.cleans and books.spans(start, length) != books.touched(row)
        if leaving or drops_pages:  # those of a frame that stays are filled before it uses them again
            self.table.fence(row, self.table.fence_after(self._driver, [row]))
        if leaving:
            self.page_uses += books.leave(row, leaving)
        self.table.extents[row] = start, length
        self.table.stir(row)
        books.retire_front(row)
        self.keeping.keeper.shorten(row, length)
        if books.is_shared(row):
            books.refresh(row)  # it may not write where others read
        self._cleaner.spoil(row, self.table.own_streams[row], leaving)

    # ------------------------------------------------------------------ holding what others hold

    def unshare(self, rows: list[int], token: int) -> None:
        """Has live rows have what they hold from a token on for their own. Raises what `Sharing.check_parts`
        and `make_own_from` raise."""
        wanted = {}
        for row in rows:
            places = zip(self.books.records, self.books.used(row))
            wanted[row] = [max(token * record // self.books.page_size, first) for record, (first, _) in places]
        sharing = self.sharing.check_parts(wanted, {})
        for row in rows:
            if row in sharing:
                with Undo() as undo:
                    self.sharing.make_own_from(row, wanted[row], undo)
            if self.rules.zero_tail:  # what lay behind is gone
                at_once(self.growing.make_room({row: self.books.extent(row)}, [row]))
            self.keeping.keeper.shorten(row, token)  # what is known to be there may be written over

    def reorder(self, sources: dict[int, int], share: bool, copy: bool) -> None:
        """Has live rows hold what others hold: see `Reordering.reorder`."""
        self.reordering.reorder(sources, share, copy, self.shrink)

    # ------------------------------------------------------------------ tokens on the host

    def put_away(self, row: int, record: Suspended) -> None:
        """Has a live row hold no tokens, which are on the host: see `Suspending.put_away`."""
        self.suspending.put_away(row, record, self.shrink)

    def bring_back(self, row: int, record: Suspended) -> None:
        """Maps pages for a suspended row's tokens: see `Suspending.bring_back`."""
        self.suspending.bring_back(row, record, self.grow)

    def ring(self) -> None:
        """Has pages mapped ahead, where that is wanted."""
        if self.rules.lookahead and self.pool.mapper:
            self.pool.mapper.ring()


def _check_same(are_theirs: bool | np.bool_, are_as_long: bool | np.bool_) -> None:
    """Raises what forbids to write down lengths, where rows are other sequences' now, or hold something else than when
    their growth began."""
    if not are_theirs:
        raise UseAfterFreeError("a sequence was freed by another thread while it was extended; nothing has grown")
    if not are_as_long:
        raise BusyError(
            "a sequence was changed by another thread while it was extended; nothing has grown. Use each sequence in "
            "one thread at a time"
        )
