"""Prefixes of one cache: sequences that begin with tokens that are there already, and what is left of those that end.

Pages whose tokens were made known (`commit`) are held by the prefix tree, mapped somewhere or nowhere, until they are
evicted. A new sequence that begins with such tokens

 1. adopts the row of a freed one, where that holds all that is known of it: no driver call;
 2. otherwise has the frames mapped in a row of its own, read-only, and what does not fill a frame copied: from pages
    that the tree knows, or from the tail of another row.

What is known is in `known`, with its invariants; what of it a sequence can begin with is found in `finding`; what of it
gives way when memory is short is in `evicting`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from ..driver.fence import Fence
from ..errors import ArgumentError, DriverError, ShapeError, UnsupportedError
from ..events import EventLog
from ..events.log import check_ids
from ..memory.monitor import at_once
from ..rows.keeping import Keeper
from ..rows.rows import Rows
from .evicting import Evictor
from .finding import Finder, Hit
from .host_prefixes import NOTHING, HostPrefixes
from .known import Chain, Known, Pages
from .lookup import token_ids
from .node import Ids, common
from .promoting import Promotion
from .retention import Retention
from .tails import Tail
from .telling import Key


class Prefixes(Keeper):
    """See above.

    Args:
        rows: the rows of the cache.
        log: what is told of them to routers, if anything is.
        host: keeps what is evicted, if anybody does.
    """

    def __init__(self, rows: Rows, log: EventLog | None = None, host: HostPrefixes | None = None) -> None:
        self._log, self._host = log, host
        self._rows: Rows = weakref.proxy(rows)  # which hold this: memory must not wait for the garbage collector
        self._table, self._books, self._pool = rows.table, rows.books, rows.pool
        self.known = Known(rows, log)
        self.finder = Finder(self.known)
        """What a sequence can begin with."""
        self.prompt_tokens = self.cached_tokens = 0
        """Of sequences that have begun since the beginning: all, and those that were there."""
        self.promotion: Promotion | None = None
        """What moves pages to large frames, where somebody does."""
        if rows.rules.large and rows.rules.lookahead:
            self.promotion = Promotion(self.known, self._books)
            rows.movers.append(self.promotion)
        self.evictor = Evictor(rows, self.known, host, self.promotion)
        """What gives way."""
        rows.keeping.keeper = self

    @property
    def pages(self) -> int:
        """How many are known."""
        return self.known.tree.pages

    def shared_pages(self, key: Key, ids: Ids, expected: int) -> int:
        """How many pages that live sequences use a new one of these tokens would have, too."""
        hit, size = self.finder.find(key, ids, expected), self._books.page_size
        if hit.row is None:
            shared = [frame for of in hit.laid for piece in of for frame in piece.frames]
            pages = self._pool.frames.in_pages(shared)
        else:
            places = ((arena, hit.tokens * record // size) for arena, record in self._books.ranges)
            pages = [page for arena, end in places for page in arena.table.pages_in(hit.row, 0, end).tolist()]
        return int(np.count_nonzero(self._pool.frames.users[pages]))

    # ------------------------------------------------------------------ beginning with what is there

    def is_at_hand(self, hit: Hit) -> bool:
        """Whether a row that has pages of its own can begin with a hit without a call that maps."""
        return not hit.tokens or self._rows.laying.is_at_hand(hit.laid, hit.partial)

    def begin(
        self, row: int, owner: int, hit: Hit, key: Key, ids: Ids, tokens: int, expected: int, stream: Any
    ) -> None:
        """Gives a row to a new sequence of so many of these ids on a stream, which begins with a hit.

        Raises:
            OutOfPagesError, DriverError, StreamCaptureError: see `Growing.make_room`; the row is to be released.
        """
        if hit.row is None:
            adopted = self._rows.beginning.give_trimmed(row, owner, tokens, expected, stream, key.number)
            self._lay(row, hit, key, ids, tokens)
            self._rows.beginning.adoptions += adopted
        else:
            try:
                self._rows.beginning.afford(row, hit.tokens)
            except DriverError:
                self.known.give_up(row)  # pages may have gone that it is said to hold
                raise
            self._rows.beginning.adopt(row, owner, hit.tokens, expected, stream, key.number)
            self._continue(row, hit)
            self._order_behind(row)
            at_once(self._rows.grow_one(row, tokens))

    def _continue(self, row: int, hit: Hit) -> None:
        """Has a row that was kept be live, with the tokens of a hit."""
        known = self.known
        chain, tail = known.chains.pop(row), known.tails.pop(row)
        known.roomy.pop(row, None)
        own = min(chain.own, hit.tokens)
        known.chains[row] = Chain(chain.key, chain.ids[: hit.tokens], known.lock(hit.node, min(own, hit.locked)), own)
        if own < hit.locked:  # what the tree knows by other numbers than the row's was used, too
            known.tree.unlock(known.tree.lock(hit.node, hit.locked))
        if tail:
            known.continue_tail(row, tail)

    def _lay(self, row: int, hit: Hit, key: Hashable, ids: Ids, tokens: int) -> None:
        """Lays a hit on a row without pages, which is to have so many tokens."""
        meanwhile = self.known.tree.lock(hit.node, hit.locked)
        try:
            known = ids[: hit.tokens].copy()
            self._order_behind(row)
            if hit.source is not None:
                self._table.fences[hit.source].order(self._pool.driver.current_stream())
            copied, better = self._rows.laying.lay(row, hit.tokens, tokens, hit.laid, hit.partial)
            if hit.source is not None:
                self._used_tail(hit.source, copied)
            self.known.written |= copied
            for index, at, piece in better:
                self._know_instead(row, key, known, index, at, piece.page, piece.pages)
            self.known.chains[row] = self.known.locked(row, meanwhile, key, known)
            if self.promotion:
                self.promotion.count(meanwhile, key, known, hit.laid)
        finally:
            self.known.tree.unlock(meanwhile)

    def _used_tail(self, row: int, copied: Fence) -> None:
        """Says that a row's tail was copied, behind a fence: what is written there next must not be."""
        self._table.fence(row, copied)
        if self._table.is_live(row):
            copied.order(self._table.own_streams[row])
        elif tail := self.known.tails.of.get(row):  # or it has given way for what was copied
            tail.used = self.known.tree.use()
            self.known.tails.use(tail, self.known.tree.now())
            self._table.kept.move_to_end(row)

    def _know_instead(self, row: int, key: Hashable, ids: Ids, index: int, first: int, number: int, pages: int) -> None:
        """Has the tree know a row's copies of whole pages, instead of what they are copies of."""
        arena, record = self._books.ranges[index]
        if (first + pages) * self._books.page_size <= len(ids) * record:
            old, new = list(range(number, number + pages)), arena.table.pages_in(row, first, first + pages).tolist()
            if self.known.move(Pages(key, ids, index, first, old), new):
                self._rows.sharing.mark(arena, row, 0, first + pages)

    def _order_behind(self, row: int) -> None:
        """Has a row's stream come behind what has written all that is known, and behind what may still read or write
        on the row."""
        stream = self._table.own_streams[row]
        self.known.written.order(stream)
        self._table.fences[row].order(stream)

    def completed(self, key: Hashable, ids: Ids, hit: Hit) -> AbstractContextManager[tuple[int, Callable[[int], int]]]:
        """Around the beginning of a sequence of these ids with a hit, whose pages stay there meanwhile. Gives how many
        tokens there are together with those behind that the host knows, and what gives a row these, as if it had
        computed them, and returns how many it has then."""
        if self._host is None and hit.source is None:
            return nullcontext((hit.tokens, lambda row: hit.tokens))
        return self._completed_by(key, ids, hit)

    @contextmanager
    def _completed_by(self, key: Hashable, ids: Ids, hit: Hit) -> Iterator[tuple[int, Callable[[int], int]]]:
        host, cached, frames = self._host, hit.tokens, self._pool.frames
        copied = frames.frames_of(page for page in hit.partial if page is not None) if hit.source is not None else []
        frames.share(copied)
        try:
            with host.found(key, ids[:-1], cached) if host else nullcontext(NOTHING) as found:
                yield max(found.tokens, cached), lambda row: host.load(row, found, cached) if host else cached
        finally:
            self._pool.give(self._rows.account, copied)

    def count(self, tokens: int, cached: int) -> None:
        """Counts a sequence that has begun, with so many tokens, of which so many were there."""
        self.prompt_tokens += tokens
        self.cached_tokens += cached
        self._pool.prompt_tokens += tokens
        self._pool.cached_tokens += cached

    # ------------------------------------------------------------------ making known

    def commit(self, row: int, key: Hashable, ids: Ids, retention: Iterable[Retention]) -> None:
        """Makes the first tokens of a live row known: those that fill pages to the tree, and the rest as its tail.

        Raises:
            ArgumentError: the row has not as many tokens.
            ValueError: the row is known to hold others, or pages of it are.
            UnsupportedError: its first tokens were given back.
            RetentionError: ranges overlap.
            StreamCaptureError: a CUDA graph is being captured. Nothing has changed in all cases.
        """
        if self._log:
            check_ids(ids)
        length = self._table.length[row]
        if len(ids) > length:
            raise ArgumentError(f"asked to commit {len(ids)} tokens; the sequence has {length}. Compute them first")
        if self._table.start[row]:
            raise UnsupportedError(
                f"asked to commit tokens from the first on; those before {self._table.start[row]} were given back with "
                "release_before"
            )
        before = self.known.chains.get(row)
        if before and common(before.ids, ids) < min(len(before.ids), len(ids)):
            raise ValueError("asked to commit other token ids than this sequence is known to hold; truncate it first")
        if before and len(ids) < len(before.ids):
            return
        written = self._table.fence_after(self._pool.driver, [row])
        tokens = self.known.insert(row, key, ids, retention)
        for (arena, _), pages in zip(self._books.ranges, self.known.tree.geometry.pages(tokens)):
            self._rows.sharing.mark(arena, row, 0, pages)
        self.known.written |= written
        self._commit_tail(row, retention)

    def _commit_tail(self, row: int, retention: Iterable[Retention]) -> None:
        """Has others find the tail of a live row, which is kept as the token is that its page begins with."""
        tail = self.known.tail_of(row, self.known.tails.pop(row))
        if tail is None:
            return
        geometry, now = self.known.tree.geometry, self.known.tree.now()
        for each in retention:
            begin = geometry.known(len(self.known.chains[row].ids))
            end = inf if each.end is None else geometry.whole_after(each.end)
            if geometry.whole_after(each.start) <= begin < end:
                tail.priority, tail.expires = each.priority, inf if each.seconds is None else now + each.seconds
        self.known.tails.put(tail, now)

    # ------------------------------------------------------------------ what rows ask

    @property
    def is_copying(self) -> bool:
        return any(each is not None and each.is_copying for each in (self._host, self.promotion))

    def known_tenants(self) -> set[int]:
        return self._host.known_tenants() if self._host else set()

    def held_pages(self) -> list[int]:
        held = self.known.held.mapped_pages()
        for row in self._table.kept:
            for (arena, _), (_, end) in zip(self._books.ranges, self._books.spans(0, len(self.known.chains[row].ids))):
                held += arena.table.pages_in(row, 0, end).tolist()
        return held

    def ids(self, row: int) -> Ids:
        """What the first tokens of a row are known to be."""
        chain = self.known.chains.get(row)
        return chain.ids if chain else np.empty(0, np.int64)

    def shorten(self, row: int, tokens: int) -> None:
        chain = self.known.chains.get(row)
        if chain is None or chain.node is None:
            return
        if self._table.start[row]:
            self.forget(row)
        elif len(chain.ids) > tokens:
            pages = [tokens * record // self._books.page_size for record in self._books.records]
            tables = [arena.table for arena, _ in self._books.ranges]
            before = self.known.tokens_before(  # from where on it will have pages of its own when it grows
                table.frame_begin(row, page) if page < table.own[row] else page for table, page in zip(tables, pages)
            )
            node, own = self.known.lock(chain.node, before), min(chain.own, before)
            self.known.hold(row, Chain(chain.key, chain.ids[:tokens], node, own))
            if tail := self.known.tails.pop(row):
                self.known.continue_tail(row, tail)

    def forget(self, row: int) -> None:
        self.known.hold(row, None)
        self.known.tails.pop(row)

    def leave(self, row: int) -> bool:
        chain = self.known.chains.get(row)
        if chain is None:
            return False
        used = self.known.tree.use()  # before what it follows: it goes first
        own = min(chain.own, chain.node.end) if chain.node else 0
        self.known.hold(row, Chain(chain.key, chain.ids, None, own))
        before = self.known.tails.pop(row)
        tail = None if self._books.rules.cleans else self.known.tail_of(row, before, used, kept=True)
        if tail is None or self._is_known_without(tail):
            del self.known.chains[row]  # nobody could adopt it, or find it, or need it
            return False
        self.known.tails.put(tail, self.known.tree.now())
        self.known.roomy[row] = None
        return True

    def _is_known_without(self, tail: Tail) -> bool:
        """Whether a kept row holds all that a tail's row does."""
        if not tail.ids and not isinstance(tail.place, int):
            return True  # nothing
        found = self.known.tails.longest(tail.place, np.frombuffer(tail.ids, np.int64), kept=True)
        return found is not None and found.tokens == tail.tokens

    def inherit(self, sources: dict[int, int]) -> None:
        chains: dict[int, Chain] = {}
        for row, source in sources.items():  # all are locked before any is unlocked
            chain = self.known.chains.get(source)
            if chain and chain.node:
                behind = self.known.tokens_before(arena.table.own[row] for arena, _ in self._books.ranges)  # are copies
                own = min(chain.own, behind)
                chains[row] = Chain(chain.key, chain.ids, self.known.lock(chain.node, own), own)
        for row, source in sources.items():
            if row != source:
                self.known.tails.pop(row)  # whoever held it first still does
            self.known.hold(row, chains.get(row))

    def give_up(self, row: int) -> None:
        self.known.give_up(row)

    def least_needed(self) -> int:
        return self.evictor.least_needed()

    def give_way(self, pages: int) -> None:
        self.evictor.give_way(pages)

    def evict(self, pages: int, wait: bool) -> int:
        return self.evictor.evict(pages, wait)

    def reset(self) -> None:
        self.known.reset()
        if self._host:
            self._host.reset()
        if self.promotion:
            self.promotion.reset()
        if self._log:
            self._log.cleared()

    def close(self) -> None:
        self.reset()
        if self.promotion:
            self.promotion.close()
        self.known.held.leave_behind()
        self._pool.collect()

    def check(self) -> None:
        self.known.check()
        if self._host:
            self._host.check()


def ids_of(token_ids_given: npt.ArrayLike) -> Ids:
    """Token ids as an array.

    Raises:
        ArgumentError, ShapeError, DtypeError: they are none.
    """
    try:
        ids = np.asarray(token_ids_given)
    except ValueError:
        raise ShapeError(
            "got token_ids that are lists of several lengths; give ids of one sequence, [tokens]"
        ) from None
    except TypeError as error:  # a tensor on a GPU
        raise ArgumentError(f"got token_ids that are no array: {error}") from None
    return token_ids(ids if ids.size else ids.astype(np.int64))  # an empty list is one of floats to numpy
