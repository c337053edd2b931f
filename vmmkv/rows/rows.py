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
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import BusyError, DriverError, OutOfPagesError, StreamCaptureError, UseAfterFreeError, VmmkvError
from ..memory import debugging
from ..memory.accounts import Account
from ..memory.fence import wait_for_device
from ..memory.monitor import Steps, at_once, is_own
from ..memory.pool import FramePool
from ..space.arena import Arena, free_waiting
from ..space.mapper import Mover
from ..space.undo import Undo
from .ahead import Ahead
from .books import Books, Rules
from .cleaning import Cleaner
from .growing import Growing
from .laying import Laying
from .reclaiming import Reclaimer
from .reordering import Reordering
from .scrubbing import Scrubbing
from .sharing import Sharing
from .shelf import Shelf
from .table import NOBODY, Place, RowTable, Suspended

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


class Keeper(Protocol):
    """Who knows what rows hold, and keeps it for sequences that begin alike."""

    @property
    def is_copying(self) -> bool:
        """Whether copies may be under way that no fence knows."""

    def known_tenants(self) -> set[int]:
        """Numbers of tenants of whom something is kept, beside what lies on the pool."""

    def held_pages(self) -> list[int]:
        """The pages that are kept, wherever they lie; of large frames all."""

    def leave(self, row: int) -> bool:
        """Says that a row's sequence has ended; returns whether the row is to be kept."""

    def shorten(self, row: int, tokens: int) -> None:
        """Says that a live row holds its first tokens only."""

    def inherit(self, sources: dict[int, int]) -> None:
        """Says that live rows hold what others have held so far, and have the same pages as far as they may share."""

    def forget(self, row: int) -> None:
        """Says that a live row holds nothing any more."""

    def give_up(self, row: int) -> None:
        """Has a kept row be one that nobody can adopt."""

    def least_needed(self) -> int:
        """The kept row that gives way first when there is no other."""

    def reset(self) -> None:
        """Forgets all, after an interruption."""

    def close(self) -> None:
        """Gives all up, with the cache."""

    def check(self) -> None:
        """Raises `InvariantError` where its books are wrong."""


class Rows:
    """See above.

    Args:
        pool: the frame pool that they lie on.
        num_rows: how many.
        rules: what the cache promises.
    """

    kind = "KVCache"
    """What users call it on whose account frames are."""
    account: Account
    """What the cache may have of the pool."""
    books: Books
    """What each row holds."""
    ahead: Ahead
    """What a mapper may do for them."""
    scrubbing: Scrubbing
    """What zeroes frames for them that were another tenant's."""
    reclaimer: Reclaimer
    """Where pages come from."""
    growing: Growing
    """What maps them."""
    sharing: Sharing
    """What has several lie on the same pages."""
    laying: Laying
    """What has them begin with pages that are kept."""
    reordering: Reordering
    """What has them hold what others held."""

    def __init__(self, pool: FramePool, num_rows: int, rules: Rules) -> None:
        self.pool, self.table, self.rules = pool, RowTable(num_rows), rules
        self.max_seq_len = rules.max_seq_len
        self.adoptions = 0
        """Sequences that started on a row with mapped pages."""
        self.page_uses = 0
        """How often a page has left a sequence since the beginning."""
        self.abandoned: deque[weakref.KeyedRef[tuple[int, int], Any]] = deque()
        """Rows, and the numbers of their sequences, that were left behind without `free`."""
        self.origins: dict[int, str] = {}
        """With debugging, by row: who has started its sequence."""
        self.keeper: Keeper | None = None
        """Who keeps rows and pages for sequences that begin alike, where somebody does."""
        self.movers: list[Mover] = []
        """What the mapper does where there is nothing to map: zeroes frames, and has what is kept lie better."""
        self._driver = pool.driver

    def open(self, account: Account, ranges: Iterable[tuple[int, int]]) -> None:
        """Reserves the arenas, and opens the account.

        Args:
            ranges: per range of the layout the bytes of a row, and of a token record.

        Raises:
            BudgetError: so much cannot be guaranteed.
            DriverError, OutOfPagesError, StreamCaptureError: that could not be done.
        """
        self.account = account
        arenas = [(Arena(self.pool, account, self.table.num_rows, nbytes), record) for nbytes, record in ranges]
        self.books = Books(self.table, arenas, self.pool.page_size, self.rules)
        self.scrubbing = Scrubbing(self.pool, account, self.books)
        self.movers.append(self.scrubbing)
        self.ahead = Ahead(self.pool, account, self.books, self.scrubbing)
        self.reclaimer = Reclaimer(self.pool, account, self.books, self.scrubbing)
        self._cleaner = Cleaner(self.pool, self.books)
        self.growing = Growing(self.pool, account, self.books, self.reclaimer, self._cleaner)
        self.sharing = Sharing(self.pool, account, self.books, self.reclaimer, self.growing)
        self.laying = Laying(self.pool, account, self.books, self.reclaimer, self.growing, self.sharing)
        self.reordering = Reordering(self.pool, account, self.books, self.reclaimer, self.growing, self.sharing)
        self.pool.accounts.open(account, self)
        if self.rules.zero_tail:
            try:
                self._make_zero_frame()
            except BaseException:
                self.pool.accounts.close(account)
                raise

    def _make_zero_frame(self) -> None:
        """Takes the frame of all tails, and zeroes it."""
        arena, _ = self.ranges[0]
        self.pool.accounts.check_allowed(self.account, 1)
        self.pool.accounts.make_headroom(self.account, 1)
        frames = self.reclaimer.supply(1, 0).single
        arena.zero(*frames)  # until then it lies in a row
        self.books.zero_frames = arena.table.tail_frames = frames

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

    @property
    def zero_frames(self) -> list[int]:
        """The one frame of all tails, where there are any."""
        return self.books.zero_frames

    def close(self) -> None:
        """Ends all sequences and unmaps everything, in whatever state the driver is; all work must have finished."""
        self.table.owners[:] = NOBODY
        if self.keeper:
            self.keeper.close()
        for arena in self.arenas:
            arena.close()
        self.pool.accounts.close(self.account)

    # ------------------------------------------------------------------ what there is

    def pages(self, row: int) -> list[tuple[list[int], list[int]]]:
        """Per arena what lies on the row's pages, and on those that are used."""
        return [
            (arena.table.pages_in(row).tolist(), arena.table.pages_in(row, *span).tolist())
            for (arena, _), span in zip(self.ranges, self.books.used(row))
        ]

    def page_map(self) -> npt.NDArray[np.int64]:
        """What each physical page holds, by page number: see `KVCache.page_map`."""
        frames = self.pool.frames
        pages = np.where(frames.handles[: frames.numbers] < 0, VACANT_PAGE, OTHERS_PAGE).astype(np.int64)
        pages[frames.in_pages([*frames.free, *frames.free_large])] = FREE_PAGE
        pages[self.zero_frames] = ZERO_PAGE
        pages[list(self.frames_taken() - set(self.zero_frames))] = SURPLUS_PAGE
        if self.keeper:
            pages[self.keeper.held_pages()] = KEPT_PAGE
        for row in self.table.live:  # one after another: a page may lie in several rows
            for (arena, _), wanted in zip(self.ranges, self.books.wanted(row)):
                pages[arena.table.pages_in(row, *wanted)] = LOOKAHEAD_PAGE
        for row in self.table.live:
            for (arena, _), used in zip(self.ranges, self.books.used(row)):
                pages[arena.table.pages_in(row, *used)] = self.table.owner[row]
        pages[frames.users[: len(pages)] > 1] = SHARED_PAGE
        return pages

    def sequences(self) -> tuple[int, int]:
        """Live sequences, and their tokens."""
        return len(self.table.live), self.table.tokens

    def known_tenants(self) -> set[int]:
        """Numbers of tenants that have rows, or had them last, or of whom something is kept."""
        return set(self.table.tenants.tolist()) | (self.keeper.known_tenants() if self.keeper else set())

    def held(self) -> list[str]:
        """What live sequences hold, a line for each, and with debugging who has started it."""
        lines = []
        collected = {reference.key for reference in self.abandoned}
        for row in self.table.live:
            if (row, self.table.owner[row]) in collected:
                continue
            pages = sum(len(mapped) for mapped, _ in self.pages(row))
            tokens = self.table.length[row] - self.table.start[row]
            origin = self.origins.get(row, "an unknown place")
            lines.append(f"sequence {self.table.owner[row]}: {tokens} tokens, {pages} pages, started at {origin}")
        return lines

    @property
    def used_pages(self) -> int:
        """Pages that hold tokens of live sequences, or are about to."""
        return self.books.used_pages

    @property
    def surplus_pages(self) -> int:
        """Mapped pages that hold no tokens of live sequences."""
        return self.account.taken - len(self.zero_frames) - self.used_pages

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

    # ------------------------------------------------------------------ taking and leaving rows

    def pick(self, tokens: int, stream: Any, tenant: int, row: int | None = None) -> int:
        """Takes a row off the lists, for a sequence of so many tokens on a stream; what another tenant had there is
        unmapped.

        Args:
            row: which; None: the one that suits it best.

        Raises:
            OutOfRowsError: all rows are live, or that one.
            DriverError: what is there could not be unmapped, or waited for; the row is back on the lists.
        """
        table = self.table
        if row is not None:
            if self.keeper and row in table.kept:
                self.keeper.give_up(row)
            table.pick_row(row)
        else:
            row = table.pick(tokens, stream, tenant, partial(self._fits, tokens))
        if row is None:
            row = next(iter(table.retired), None)
            if row is None:
                assert self.keeper is not None  # or a row would be left
                row = self.keeper.least_needed()
                self.keeper.give_up(row)
                table.parked.remove(row)  # where nobody else has any of its pages
        try:
            if (table.tenant[row] != tenant or row in table.retired) and self.books.has_pages(row):
                table.fences[row].wait()
                self.reclaimer.unmap_surplus({row: 0})
                table.empty.pop(row, None)
            elif not table.fences[row].passed_for(stream):
                table.fences[row].wait()
        except VmmkvError:
            table.forget(row)
            self.books.settle(row)
            raise
        return row

    def pick_at_once(self, tokens: int, stream: Any, tenant: int) -> int | None:
        """Takes a row off the lists that a sequence without tokens can have as it is, for which nothing is unmapped and
        nobody waited for; None where the row that `pick` would take is another."""
        if self.pool.accounts.has_guarantees:
            return None
        self.release_collected()
        table = self.table
        row = next(filter(partial(self._fits, tokens), table.fitting(tokens, stream, tenant)), None)
        if row is None:
            row = next(reversed(table.empty), None)
            if row is None or not table.fences[row].passed_for(stream):
                return None
        elif self._beyond(row, tokens):
            return None
        if any(arena.table.is_changing(row) for arena, _ in self.ranges):
            return None  # also in a row that is empty: what is being mapped there was meant for who has just left it
        table.pick_row(row)
        return row

    def _fits(self, tokens: int, row: int) -> bool:
        """Whether no large frame of a parked row would reach beyond so many tokens, or those that do can go."""
        return not self._beyond(row, tokens) or self.table.fences[row].passed() or not self._has_idle(tokens)

    def _beyond(self, row: int, tokens: int) -> list[tuple[Arena, int]]:
        """Arenas in which large frames of a row reach beyond so many tokens, and the page where these begin."""
        if not self.rules.large:
            return []
        ends = zip(self.ranges, self.books.spans(0, tokens))
        begins = [(arena, arena.table.large_beyond(row, end)) for (arena, _), (_, end) in ends]
        return [(arena, begin) for arena, begin in begins if begin < arena.table.end[row]]

    def _has_idle(self, tokens: int) -> bool:
        """Whether there is memory for so many tokens that nobody needs to give up."""
        pages = sum(end for _, end in self.books.spans(0, tokens))
        return pages <= min(self.pool.accounts.idle(self.account), self.pool.accounts.headroom(self.account))

    def pick_empty(self, stream: Any) -> int:
        """Takes a row without pages off the lists, for a sequence on a stream.

        Raises:
            OutOfRowsError: all rows are live.
            DriverError: what is on the row that is picked could not be unmapped; the row is back on the lists.
        """
        return self.pick(0, stream, NOBODY)

    def begin(self, row: int, owner: int, expected: int, stream: Any, tenant: int) -> None:
        """Gives a row to a new sequence on a stream, which is to have tokens that there are already."""
        self.table.own(row, owner, stream, expected, tenant)
        if self.pool.is_debugged:
            self.origins[row] = debugging.caller()
        self.books.refresh(row)

    def begin_at_once(self, row: int, owner: int, expected: int, stream: Any, tenant: int) -> None:
        """`begin`, of a row that `pick_at_once` has picked."""
        self.adoptions += self.books.has_pages(row)
        self.begin(row, owner, expected, stream, tenant)

    def adopt(self, row: int, owner: int, tokens: int, expected: int, stream: Any, tenant: int) -> None:
        """Gives a kept row to a new sequence on a stream, which has its first tokens then."""
        self.table.kept.pop(row)
        self.table.length[row] = tokens
        self.begin(row, owner, expected, stream, tenant)
        self.books.use(row)
        self.adoptions += 1

    def take(self, row: int, owner: int, tokens: int, expected: int, stream: Any, tenant: int) -> Steps[None]:
        """Gives a picked row to a new sequence on a stream, with room for `tokens` tokens.

        Its pages for tokens that are `expected` are reclaimed after those of idle parked rows.

        Raises:
            OutOfPagesError, DriverError, StreamCaptureError: see `Growing.make_room`; the row is back on the lists.
        """
        with Undo() as undo:
            undo.push(self.books.vacate, row)
            adopted = self.start(row, owner, tokens, expected, stream, tenant)
            if tokens and self.rules.zero_tail:
                self._keep(row, 2 * max(tokens, expected))
            if tokens > self.table.capacity[row] or (tokens and self.rules.zero_tail):
                yield from self._make_room({row: (0, tokens)}, [row])
        self.table.length[row] = tokens
        self.books.refresh(row)
        self.adoptions += adopted

    def start(self, row: int, owner: int, tokens: int, expected: int, stream: Any, tenant: int) -> bool:
        """Gives a picked row to a new sequence on a stream, which is to have so many tokens; returns whether there are
        pages. Raises what `afford` raises."""
        self.afford(row, tokens)
        adopted = self.books.has_pages(row)
        self.begin(row, owner, expected, stream, tenant)
        beyond = self._beyond(row, max(tokens, expected)) if adopted else []
        if beyond and self.table.fences[row].passed():
            for arena, page in beyond:
                arena.unmap_back(row, page)
            self.books.refresh(row)
        return adopted

    def afford(self, row: int, tokens: int) -> None:
        """Sees to it that a sequence may have what lies on a row that is nobody's, and is to hold so many tokens. Where
        others are guaranteed too much for that, what lies behind these goes first.

        Raises:
            OutOfPagesError: they cannot be had. Nothing has changed.
            DriverError: what lies behind them, or behind others, could not be unmapped.
        """
        if not self.pool.accounts.has_guarantees or not self.books.has_pages(row):
            return
        self.books.claims = {row: (0, tokens)}
        try:
            pages = sum(end for _, end in self.books.used(row))
            if self.pool.accounts.overdraft(self.pool.limit) > 0:
                self.reclaimer.check_allowed(pages)  # before anything is lost
                self.table.fences[row].wait()
                self.reclaimer.unmap_surplus({row: tokens})
                self.table.forget(row)
            self.reclaimer.afford(pages)
        finally:
            self.books.claims = {}

    def _make_room(self, claims: dict[int, tuple[int, int]], needing: list[int]) -> Steps[None]:
        """Maps what rows claim. Raises what `Growing.make_room` raises."""
        make_room = self._make_room_to_the_end if self.rules.zero_tail else self.growing.make_room
        return make_room(claims, needing)

    def _make_room_to_the_end(self, claims: dict[int, tuple[int, int]], needing: list[int]) -> Steps[None]:
        """`Growing.make_room`. Of rows that are to be read to their very end, and hold nothing yet, what one range has
        behind their claims may be what another lacks."""
        try:
            yield from self.growing.make_room(claims, needing)
        except OutOfPagesError:
            empty = [row for row in needing if not self.table.length[row]]
            if not empty:
                raise
            for row in empty:
                self._keep(row, claims[row][1])
            yield from self.growing.make_room(claims, needing)

    def _keep(self, row: int, tokens: int) -> None:
        """Gives back what a row without tokens has adopted beyond so many: soon nobody else may have it."""
        if any(arena.table.end[row] > end for (arena, _), (_, end) in zip(self.ranges, self.books.spans(0, tokens))):
            self.table.fences[row].wait()
            self.reclaimer.unmap_surplus({row: tokens})

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
            if self.keeper and self.keeper.leave(row):
                self.table.kept[row] = None
            self.page_uses += self.books.leave(row, leaving)
            self.books.vacate(row)
            self._cleaner.spoil(row, own, leaving)  # last: who is interrupted before still has the tokens

    def release_abandoned(self) -> None:
        """Frees the rows of sequences that were garbage-collected, and ranges of caches that were, during a capture."""
        free_waiting()
        self.pool.collect()
        if self.sharing.may_be_staged:
            with suppress(DriverError):
                self.sharing.clear(wait=False)  # of what was copied, or a failure has left
        if len(self.table.stirred) >= MANY:
            self.books.catch_up()
        self.release_collected()

    def release_collected(self) -> None:
        """Frees the rows of sequences that were garbage-collected, for which nothing is mapped or unmapped."""
        if not self.abandoned:
            return
        references = list(self.abandoned)
        try:
            self.release(reference.key for reference in references)
        except StreamCaptureError:
            return  # later, then
        for _ in references:
            self.abandoned.popleft()

    def recover(self) -> None:
        """Makes the books right after an interruption: what follows from other books is worked out anew."""
        if self.rules.poison or (self.keeper and self.keeper.is_copying):
            wait_for_device(self._driver)  # for what was being filled, or copied, which no fence may know
        self.books.claims = {}
        self._recover_suspended()
        table = self.table
        parked, retired = list(table.parked), [*table.retired, *table.fronts]
        table.parked, table.spare, table.retired, table.fronts = Shelf(), Shelf(), OrderedDict(), OrderedDict()
        table.live, table.empty, table.needy, table.fenced, table.kept = {}, {}, {}, {}, OrderedDict()
        self.books.forget_counts()
        if self.keeper:
            self.keeper.reset()
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
            OutOfPagesError, DriverError, StreamCaptureError: see `Growing.make_room`; nothing has changed.
            UseAfterFreeError, BusyError: another thread has ended one of the sequences meanwhile, or changed it.
        """
        table = self.table
        if self.pool.frames.has_shared:
            self.sharing.make_own(rows[lengths > table.capacities[rows]].tolist())
        capacities = table.capacities[rows] if starts is None else 0  # now: some may have given pages up
        needing = rows[lengths > capacities].tolist()
        before, owners = table.extents[rows], table.owners[rows]
        extents = before.copy()
        extents[:, 1] = lengths
        if starts is not None:
            extents[:, 0] = starts
        claims = dict(zip(rows.tolist(), zip(*extents.T.tolist())))
        yield from self._make_room(claims, needing)
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
            self.sharing.make_own([row])
            start, before, owner = self.table.start[row], self.table.length[row], self.table.owner[row]
            yield from self._make_room({row: (start, length)}, [row])
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
        leaving = self.books.leaving(row, start, length)
        if leaving:
            self.table.fence(row, self.table.fence_after(self._driver, [row]))
            self.page_uses += self.books.leave(row, leaving)
        self.table.extents[row] = start, length
        self.table.stir(row)
        self.books.retire_front(row)
        if self.keeper:
            self.keeper.shorten(row, length)
        if self.books.is_shared(row):
            self.books.refresh(row)  # it may not write where others read
        self._cleaner.spoil(row, self.table.own_streams[row], leaving)

    # ------------------------------------------------------------------ holding what others hold

    def unshare(self, row: int, token: int) -> None:
        """Has a live row have what it holds from a token on for its own. Raises what `Sharing.make_own` raises."""
        places = zip(self.books.records, self.books.used(row))
        pages = [max(token * record // self.books.page_size, first) for record, (first, _) in places]
        self.sharing.make_own_from(row, pages)
        if self.rules.zero_tail:  # what lay behind is gone
            at_once(self.growing.make_room({row: self.books.extent(row)}, [row]))
        if self.keeper:
            self.keeper.shorten(row, token)  # what is known to be there may be written over

    def reorder(self, sources: dict[int, int], share: bool) -> None:
        """Has live rows hold what others hold: see `Reordering.reorder`."""
        self.reordering.reorder(sources, share, self)

    def inherit(self, sources: dict[int, int]) -> None:
        """Says that rows hold what others have held so far."""
        if self.keeper:
            self.keeper.inherit(sources)

    # ------------------------------------------------------------------ tokens on the host

    def put_away(self, row: int, record: Suspended) -> None:
        """Has a live row hold no tokens, once they have been copied to where the record says, behind a fence."""
        self.table.suspended[row] = record
        try:
            self.shrink(row, 0, 0)
        except VmmkvError as error:
            if is_own(error):
                del self.table.suspended[row]
            raise
        record.place, self.table.expected[row] = Place.AWAY, 0
        if self.keeper:
            self.keeper.forget(row)
        self.books.refresh(row)

    def bring_back(self, row: int, record: Suspended) -> None:
        """Maps the pages that a suspended row's tokens are to be copied to; `settle_back` follows.

        Raises:
            OutOfPagesError, DriverError, StreamCaptureError: see `Growing.make_room`; it is suspended still.
        """
        record.place, self.table.expected[row] = Place.COMING, record.expected
        try:
            at_once(self.grow(np.array([row]), np.array([record.length]), np.array([record.start])))
        except VmmkvError:
            record.place, self.table.expected[row] = Place.AWAY, 0
            raise

    def settle_back(self, row: int) -> None:
        """Writes down that a row's tokens are there again."""
        del self.table.suspended[row]
        self.books.refresh(row)

    def leave_away(self, row: int, record: Suspended) -> None:
        """Writes down that a row's tokens are on the host only, whatever is on its way back."""
        with suppress(VmmkvError):
            wait_for_device(self._driver)
        record.place, self.table.expected[row] = Place.AWAY, 0
        self.table.extents[row] = 0
        self.books.refresh(row)

    def _recover_suspended(self) -> None:
        """After an interruption: what was leaving is here, or gone; what was coming is not here yet."""
        for row, record in list(self.table.suspended.items()):
            if record.place is Place.LEAVING and self.table.length[row]:
                self.table.expected[row] = record.expected
                del self.table.suspended[row]
            else:
                self.leave_away(row, record)

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
