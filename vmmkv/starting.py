"""How sequences of a cache start: on a row of their own, with what is known of their tokens, or as forks; and how those
end that nobody holds any more.

All but `abandon` is called in the middle of an operation.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from .errors import OutOfPagesError, VmmkvError
from .events import EventLog
from .memory.monitor import Steps, at_once
from .reuse.finding import Hit
from .reuse.host_prefixes import HostPrefixes
from .reuse.node import Ids
from .reuse.prefixes import Prefixes
from .reuse.telling import Key
from .rows.rows import Rows
from .sequence import Sequence

if TYPE_CHECKING:
    from .cache import KVCache


class Found(NamedTuple):
    """What a sequence can begin with, and the turn in which that was found: it holds in the next one."""

    hit: Hit
    turn: int


class Starting:
    """See above. The cache is given each time: it ends when nobody holds it, and so nothing that it holds may.

    Args:
        rows: what sequences are given.
        host: what is known of evicted pages, if anything is kept.
        log: what is told which prefixes can be found, if anything is.
    """

    def __init__(self, rows: Rows, host: HostPrefixes | None, log: EventLog | None) -> None:
        self._rows, self._host, self._log = rows, host, log
        self._numbers = itertools.count()
        self._references: list[weakref.KeyedRef[tuple[int, int], Sequence] | None] = [None] * rows.table.num_rows
        """By row: what moves to `Rows.abandoned` when the row's sequence is collected. That may be at any moment, in
        any thread, so it takes no Python code, which could be interrupted."""

    @property
    def prefixes(self) -> Prefixes:
        """What is known of sequences' beginnings; begins with the first sequence whose token ids are given."""
        keeper = self._rows.keeping.keeper
        return keeper if isinstance(keeper, Prefixes) else Prefixes(self._rows, self._log, self._host)

    def abandon(self, sequences: Iterable[Sequence]) -> None:
        """Has the next operation end sequences, as if nobody held them."""
        for sequence in sequences:
            reference = self._references[sequence.index]
            if reference and reference() is sequence:
                self._rows.abandoned.append(reference)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Has nothing done any more when sequences are collected: they have ended."""
        for sequence in sequences:
            reference = self._references[sequence.index]
            if reference and reference() is sequence:
                self._references[sequence.index] = None

    def _new(self, cache: KVCache, row: int) -> Sequence:
        """Makes a sequence for a picked row, which it has not yet."""
        sequence = Sequence(cache, self._rows, next(self._numbers), row)
        key = row, sequence.number
        self._references[row] = weakref.KeyedRef(sequence, self._rows.abandoned.append, key)
        return sequence

    def take_at_once(self, cache: KVCache, expected: int, tenant: int) -> Sequence | None:
        """Starts a sequence without tokens, on a row that it can have as it is; None where there is no such row."""
        stream = self._rows.pool.driver.current_stream()
        self._rows.release_collected()
        row = self._rows.beginning.pick_at_once(expected, stream, tenant)
        if row is None:
            return None
        sequence = self._new(cache, row)
        self._rows.beginning.adoptions += self._rows.books.has_pages(row)
        self._rows.beginning.give(row, sequence.number, expected, stream, tenant)
        self._rows.ring()
        return sequence

    def take(self, cache: KVCache, tokens: int, expected: int, tenant: int, row: int | None = None) -> Steps[Sequence]:
        """Starts a sequence on a row that is free, and whose pages nobody else has; `row` names one. Raises what
        `Beginning.pick` and `Beginning.take` raise."""
        stream = self._rows.pool.driver.current_stream()
        sequence = self._new(cache, self._rows.beginning.pick(max(tokens, expected), stream, tenant, row))
        # From here on somebody will free it.
        yield from self._rows.beginning.take(sequence.index, sequence.number, tokens, expected, stream, tenant)
        self._rows.ring()
        return sequence

    def begin_at_once(self, cache: KVCache, key: Key, ids: Ids, whole: bool, expected: int) -> Sequence | Found | None:
        """`begin`, where nothing is mapped or unmapped for it: on a kept row, or on one that the sequence can have as
        it is, with copies from others; what was found for it, where there is no such row. Raises what `Prefixes.begin`
        raises."""
        prefixes = self._rows.keeping.keeper
        if self._host or not isinstance(prefixes, Prefixes):
            return None
        self._rows.release_collected()
        hit, beginning = self._find(prefixes, key, ids, whole, expected), self._rows.beginning
        tokens = len(ids) if whole else hit.tokens
        row = hit.row
        if row is not None:
            row = row if beginning.is_ready(row, tokens) else None
        elif (not tokens or self._rows.table.parked) and prefixes.is_at_hand(hit):  # an empty row has room for none
            stream = self._rows.pool.driver.current_stream()
            row = beginning.pick_at_once(max(tokens, expected), stream, key.number, tokens)
        if row is None:
            return Found(hit, self._rows.pool.monitor.turn)
        return self._begin(cache, hit, key, ids, whole, expected, row)

    def begin(
        self, cache: KVCache, key: Key, ids: Ids, whole: bool, expected: int, found: Found | None = None
    ) -> Sequence:
        """Starts a sequence of given tokens, which begins with what is known of them; `whole`: it has the others, too.
        Raises what `Beginning.pick`, `Beginning.take` and `Prefixes.begin` raise.

        Args:
            found: what `begin_at_once` has found for it: if somebody has had the books since, it is found anew.
        """
        have_ended = self._rows.release_abandoned()
        if found and (have_ended or found.turn + 1 != self._rows.pool.monitor.turn):
            found = None
        hit = self._find(self.prefixes, key, ids, whole, expected, found and found.hit)
        try:
            return self._begin(cache, hit, key, ids, whole, expected, hit.row)
        except OutOfPagesError:
            if not hit.tokens:
                raise
        self._rows.release_abandoned()  # what is copied is there twice meanwhile; without it there may be room
        return self._begin(cache, hit.given_up(), key, ids, whole, expected, None)

    def _find(self, prefixes: Prefixes, key: Key, ids: Ids, whole: bool, expected: int, hit: Hit | None = None) -> Hit:
        """What it can begin with, when kept rows have made way that it may adopt; `hit`: as far as that is known. Where
        none that had made way was good enough, more do."""
        hit = hit or prefixes.finder.find(key, ids, expected)
        if prefixes.evictor.make_way(hit, max(len(ids) if whole else 0, expected)):
            hit = prefixes.finder.find(key, ids, expected)
        return hit

    def _begin(
        self, cache: KVCache, hit: Hit, key: Key, ids: Ids, whole: bool, expected: int, row: int | None
    ) -> Sequence:
        """`begin`, with a hit, on a row that is picked, or kept; None: on one that is to be picked."""
        prefixes, beginning = self.prefixes, self._rows.beginning
        with prefixes.completed(key, ids, hit) as (known, complete):
            tokens, stream = len(ids) if whole else known, self._rows.pool.driver.current_stream()
            if row is None:  # one without pages, where any are laid there
                row = beginning.pick(max(tokens, expected), stream, key.number if hit.is_copied else None)
            sequence = self._new(cache, row)
            if hit.tokens:
                try:
                    with self._rows.pool.nvtx.hit:
                        prefixes.begin(row, sequence.number, hit, key, ids, tokens, expected, stream)
                except VmmkvError:  # whoever holds it holds the sequence
                    self.abandon([sequence])
                    raise
            else:
                at_once(beginning.take(row, sequence.number, tokens, expected, stream, key.number))
            self._rows.ring()
            sequence.key, sequence.cached_tokens = key, complete(sequence.index)
            if sequence.cached_tokens < tokens and not whole:  # the host's could not be copied
                self._rows.shrink(sequence.index, 0, sequence.cached_tokens)
        prefixes.count(len(ids), sequence.cached_tokens)
        return sequence

    def fork(self, cache: KVCache, parent: Sequence, count: int) -> list[Sequence]:
        """Starts sequences that begin with all tokens of another: all of them or none. Raises what `Sequence.fork`
        does."""
        row, table, stream = parent.row, self._rows.table, self._rows.pool.driver.current_stream()
        table.check_left(count)
        children: list[Sequence] = []
        try:
            for _ in range(count):
                child = self._new(cache, self._rows.beginning.pick(0, stream, None))
                self._rows.beginning.give(child.index, child.number, table.expected[row], stream, table.tenant[row])
                child.key = parent.key
                children.append(child)  # from here on somebody will free it
            if children:
                index = [child.index for child in children]
                self._rows.sharing.fork(row, index)
                self._rows.keeping.keeper.inherit(dict.fromkeys(index, row))
        except VmmkvError:  # whoever holds it holds them
            self.abandon(children)
            raise
        self._rows.ring()
        return children
