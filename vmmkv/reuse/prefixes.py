"""Prefixes of one cache: which sequences begin with tokens that are there already, and what they begin on.

Pages whose tokens were made known (`commit`) are held by the prefix tree, mapped somewhere or nowhere, until they are
evicted. A new sequence that begins with such tokens

 1. adopts the row of a freed one, where that holds all that is known of it: no driver call;
 2. otherwise has the frames mapped in a row of its own, read-only, and what does not fill a frame copied: from pages
    that the tree knows, or from the tail of another row.

Invariants:
 1. A frame that holds a page of the tree is held here, as one place more where it is.
 2. A live row's committed pages are locked in the tree, and those that it has copies of: what is used is never evicted,
    and all that is not can be, where nothing else is left after the tree has come to know the copies instead.
 3. `kept` rows belong to nobody, are whole from their first page on, and hold what their chain says.
 4. What a row holds behind the last page that the tree knows of it is its tail, as long as it is known to hold it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, DriverError, InvariantError, StreamCaptureError, UnsupportedError
from ..events import EventLog
from ..events.log import check_ids
from ..memory.accounts import Account
from ..memory.fence import Fence
from ..memory.frames import LARGE
from ..memory.monitor import at_once
from ..memory.pool import FramePool
from ..rows.keeping import Keeper
from ..rows.laying import Piece, pieces
from ..rows.rows import Rows
from ..space.mapper import stock
from .host_prefixes import NOTHING, HostPrefixes
from .lookup import token_ids
from .node import Ids, Node, Root, common
from .promoting import Pages, Promotion
from .retention import Retention
from .tails import Tail, Tails
from .telling import Key
from .tree import Match, Page, PrefixTree


class Chain(NamedTuple):
    """What a row is known to hold: the tokens of these ids. What the tree knows of the first `own` of them lies in this
    row itself. While it is live `node` is locked."""

    key: Hashable
    ids: Ids
    node: Node | None
    own: int = 0


class Hit(NamedTuple):
    """What a new sequence can begin with: so many tokens, on a kept row, or laid on one without pages.

    Attributes:
        tokens: how many.
        row: the kept one; None where there is none.
        node: with `locked` tokens on its path, which are not to be evicted meanwhile.
        laid: by range the pieces of whole pages.
        partial: by range the page that holds the rest.
        source: the row whose tail that is; None where the tree knows it.
    """

    tokens: int
    row: int | None
    node: Node
    locked: int
    laid: Sequence[list[Piece]] = ()
    partial: Sequence[int | None] = ()
    source: int | None = None

    @property
    def calls(self) -> int:
        """How many frames are mapped for it, where it is laid. To compute a token takes about as long as to map one."""
        return sum(len(piece.frames) for of in self.laid for piece in of)

    @property
    def is_copied(self) -> bool:
        """Whether all of it is one copy in each range, as any row can begin with that has its pages for its own."""
        return all(not of or (len(of) == 1 and not of[0].frames) for of in self.laid)

    def given_up(self) -> Hit:
        """Nothing, instead."""
        return self._replace(tokens=0, source=None)


class Longer(NamedTuple):
    """A row whose tail goes on where a match ends.

    Attributes:
        row: which.
        tokens: how many of those that were asked for it holds.
        begin: where its tail begins.
        pages: those of the first range that are whole before that.
    """

    row: int
    tokens: int
    begin: int
    pages: int


class Held:
    """The frames of the tree, as the pool's tables say where frames are."""

    def __init__(self, pool: FramePool, account: Account) -> None:
        self._pool: FramePool = weakref.proxy(pool)  # which has this among its tables
        self.account = account
        self.tail_frames: list[int] = []
        self.doubt: list[Any] = []
        self._pages: dict[int, int] = {}
        """By frame, how many of its pages the tree knows."""

    def hold(self, pages: Iterable[int]) -> None:
        """Holds the frames of pages that have become known."""
        frames, held, new = self._pool.frames, self._pages, list[int]()
        for frame, count in Counter(frames.frames_of(pages)).items():
            before = held.get(frame, 0)
            held[frame] = before + count
            if not before:
                new.append(frame)
        frames.share(new)

    def drop(self, pages: Iterable[int]) -> int:
        """Gives up the frames of pages that are known no more, if they were the last ones there. Returns how many pages
        these still have on rows that do not use them."""
        frames, held, gone = self._pool.frames, self._pages, list[int]()
        for frame, count in Counter(frames.frames_of(pages)).items():
            held[frame] -= count
            if not held[frame]:
                del held[frame]
                gone.append(frame)
        shares, users = frames.shares.data, frames.users.data
        unused = sum([not users[page] for page in frames.in_pages([frame for frame in gone if shares[frame]])])
        self._pool.give(self.account, gone)
        return unused

    def known_pages(self, pages: set[int]) -> set[int]:
        """Of pages those that are held, where these are all that are."""
        counts = Counter(self._pool.frames.frames_of(pages))
        return pages if counts == self._pages else set()

    def tell_uses(self) -> None:
        """Does nothing: who maps frames counts."""

    def mapped_pages(self) -> list[int]:
        """The pages of the frames that are held."""
        return self._pool.frames.in_pages(list(self._pages))

    def settle(self) -> None:
        """Holds nothing, after an interruption: nobody can trust the tree then."""
        self._pages.clear()

    def leave_behind(self) -> None:
        """Leaves all frames to the pool, for its next operation: the cache is gone."""
        frames = list(self._pages)
        self._pages.clear()
        with suppress(ReferenceError):  # or it is gone, too, with all frames
            self._pool.left_behind.append((self, self.account, frames))


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
        self._tree = self._new_tree()
        self._chains: dict[int, Chain] = {}
        """By row, live or kept."""
        self._tails = Tails()
        """Of live rows what was committed of them, and of all kept ones."""
        self._roomy: dict[int, None] = {}
        """Kept rows that may have pages behind their tokens."""
        self.prompt_tokens = self.cached_tokens = 0
        """Of sequences that have begun since the beginning: all, and those that were there."""
        self.written = Fence()
        """Passes when all that is known has been written."""
        self._held = Held(rows.pool, rows.account)
        rows.pool.tables.append(self._held)
        self.promotion: Promotion | None = None
        """What moves pages to large frames, where somebody does."""
        if rows.rules.large and rows.rules.lookahead:
            self.promotion = Promotion(self, self._books)
            rows.movers.append(self.promotion)
        rows.keeping.keeper = self
        weakref.finalize(self, self._held.leave_behind).atexit = False

    def _new_tree(self) -> PrefixTree:
        return PrefixTree(self._books.page_size, self._books.records, log=self._log)

    @property
    def pages(self) -> int:
        """How many are known."""
        return self._tree.pages

    # ------------------------------------------------------------------ beginning with what is there

    def find(self, key: Hashable, ids: Ids) -> Hit:
        """What a sequence of these ids can begin with: at most all of its tokens but the last, which has to be computed
        for what comes after it."""
        match = self._tree.match(key, ids[:-1])
        kept, live = (self._longest(match, key, ids, is_kept) for is_kept in (True, False))
        hit = None
        longest = max(match.tokens, live.tokens if live else 0)
        if kept and kept.tokens >= longest and self._may_adopt(kept.row, kept.tokens):
            others = len(self._chains[kept.row].ids) - kept.tokens
            hit = self._laid(match) if others else None
            if hit is None or others <= hit.calls:
                return Hit(kept.tokens, kept.row, match.node, match.tokens)
        hit = hit or self._laid(match)
        for tail in sorted(filter(None, (kept, live)), key=lambda each: -each.tokens):
            if hit.tokens == match.tokens < tail.tokens and not self._is_captured(tail.row):
                return self._with_tail(hit, match, tail)
        return hit

    def _longest(self, match: Match, key: Hashable, ids: Ids, is_kept: bool) -> Longer | None:
        """The tail that goes on longest where a match ends."""
        size, record, geometry = self._books.page_size, self._books.records[0], self._tree.geometry
        pages = match.pages[0] + [page for page in match.partial[:1] if page is not None]
        for count in range(len(pages), geometry.pages(geometry.known(match.tokens))[0] - 1, -1):
            begin = -(-count * size // record)
            if found := self._tails.longest(pages[count - 1] if count else key, ids[begin:-1], is_kept):
                between = slice(match.tokens, begin)  # of a token that lies in two pages
                if np.array_equal(self._chains[found.tail.row].ids[between], ids[:-1][between]):
                    return Longer(found.tail.row, begin + found.tokens, begin, count)
        return None

    def _is_captured(self, row: int) -> bool:
        """Whether a row's stream, which is to come behind a copy, is being captured in a graph."""
        try:
            self._pool.driver.record(self._table.own_streams[row] or self._pool.driver.current_stream())
        except StreamCaptureError:
            return True
        return False

    def _with_tail(self, hit: Hit, match: Match, tail: Longer) -> Hit:
        """A hit that goes on with a tail, as far as that lies in one page more of each range."""
        size, ranges, laid = self._books.page_size, self._books.ranges, list(hit.laid)
        counts = self._tree.geometry.pages(hit.tokens)
        for index, ((arena, record), known) in enumerate(zip(ranges, match.partial)):
            is_whole = (counts[index] + 1) * size <= tail.tokens * record
            if known is not None and is_whole and arena.table.memory[tail.row, counts[index]] == known:
                counts[index] += 1  # a token before the tail lies in that page and in the next one
                laid[index] = pieces([*match.pages[index], known], self._pool.frames)
        tokens = min(tail.tokens, *((count + 1) * size // record for count, (_, record) in zip(counts, ranges)))
        if tokens <= hit.tokens or [sum(piece.pages for piece in of) for of in laid] != counts:
            return hit
        partial = [
            arena.table.memory.item(tail.row, count) if tokens * record > count * size else None
            for (arena, record), count in zip(ranges, counts)
        ]
        return Hit(tokens, None, hit.node, max(hit.locked, tail.begin), laid, partial, tail.row)

    def _laid(self, match: Match) -> Hit:
        """What of a match can be laid on a row."""
        geometry, frames, tokens = self._tree.geometry, self._pool.frames, match.tokens
        while True:
            wholes = geometry.pages(tokens)
            laid = [pieces(numbers[:whole], frames) for numbers, whole in zip(match.pages, wholes)]
            counts = [sum(piece.pages for piece in of) for of in laid]
            if counts == wholes:
                break
            # It is in too many pieces. With less of it a large frame may end behind it, and be one more.
            tokens = min(count * geometry.page_size // record for count, record in zip(counts, geometry.records))
        partial = [
            [*numbers, behind][whole] if tokens * record % geometry.page_size else None
            for numbers, behind, whole, record in zip(match.pages, match.partial, wholes, geometry.records)
        ]
        return Hit(tokens, None, match.node, tokens, laid, partial)

    def _may_adopt(self, row: int, tokens: int) -> bool:
        """Whether a kept row holds nothing behind so many tokens that a new sequence must not see, or write to."""
        return all(
            arena.table.own[row] <= tokens * record // self._books.page_size for arena, record in self._books.ranges
        )

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
                self.give_up(row)  # pages may have gone that it is said to hold
                raise
            self._rows.beginning.adopt(row, owner, hit.tokens, expected, stream, key.number)
            self._continue(row, hit)
            self._order_behind(row)
            at_once(self._rows.grow_one(row, tokens))

    def _continue(self, row: int, hit: Hit) -> None:
        """Has a row that was kept be live, with the tokens of a hit."""
        chain, tail = self._chains.pop(row), self._tails.pop(row)
        self._roomy.pop(row, None)
        own = min(chain.own, hit.tokens)
        self._chains[row] = Chain(chain.key, chain.ids[: hit.tokens], self._lock(hit.node, min(own, hit.locked)), own)
        if own < hit.locked:  # what the tree knows by other numbers than the row's was used, too
            self._tree.unlock(self._tree.lock(hit.node, hit.locked))
        if tail:
            self._continue_tail(row, tail)

    def _lay(self, row: int, hit: Hit, key: Hashable, ids: Ids, tokens: int) -> None:
        """Lays a hit on a row without pages, which is to have so many tokens."""
        meanwhile = self._tree.lock(hit.node, hit.locked)
        try:
            known = ids[: hit.tokens].copy()
            self._order_behind(row)
            if hit.source is not None:
                self._table.fences[hit.source].order(self._pool.driver.current_stream())
            self._rows.laying.lay(row, hit.tokens, tokens, hit.laid, hit.partial)
            if hit.source is not None:
                self._used_tail(hit.source)
            self._chains[row] = self._locked(row, meanwhile, key, known)
            if self.promotion:
                self.promotion.count(meanwhile, key, known, hit.laid)
        finally:
            self._tree.unlock(meanwhile)

    def _used_tail(self, row: int) -> None:
        """Says that a row's tail was copied: what is written there next must not be."""
        staged = self._rows.sharing.staged
        self._table.fence(row, staged)
        if self._table.is_live(row):
            staged.order(self._table.own_streams[row])
        elif tail := self._tails.of.get(row):  # or it has given way for what was copied
            tail.used = self._tree.use()
            self._tails.use(tail, self._tree.now())
            self._table.kept.move_to_end(row)

    def _order_behind(self, row: int) -> None:
        """Has a row's stream come behind what has written all that is known, and behind what may still read or write
        on the row."""
        stream = self._table.own_streams[row]
        self.written.order(stream)
        self._table.fences[row].order(stream)

    def _locked(self, row: int, node: Node, key: Hashable, ids: Ids) -> Chain:
        """Locks of the path to a node what is known by pages that a row has, not by others that were copied, or that
        are known instead by now. Returns what the row holds then."""
        ends = []
        for (arena, _), known in zip(self._books.ranges, node.path_pages()):
            mine = arena.table.pages_in(row, 0, len(known)).tolist()
            if mine == known[: len(mine)]:  # at once: most are
                ends.append(len(known) + 1)
            else:
                ends.append(next(page for page, its in enumerate(mine) if its != known[page]))
        own = self._tokens_before(ends)
        return Chain(key, ids, self._lock(node, own), own)

    def _lock(self, node: Node, tokens: int) -> Node:
        """Locks of the path to a node what is whole in so many tokens."""
        return self._tree.lock(node, min(node.end, tokens))

    def _tokens_before(self, ends: Iterable[int]) -> int:
        """How many tokens lie in front of pages, one of each range."""
        return min(end * self._books.page_size // record for end, record in zip(ends, self._books.records))

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
            ValueError: the row is known to hold others.
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
        before = self._chains.get(row)
        if before and common(before.ids, ids) < min(len(before.ids), len(ids)):
            raise ValueError("asked to commit other token ids than this sequence is known to hold; truncate it first")
        if before and len(ids) < len(before.ids):
            return
        written = self._table.fence_after(self._pool.driver, [row])
        node, own, tokens = self._insert(row, key, ids, retention)
        for (arena, _), pages in zip(self._books.ranges, self._tree.geometry.pages(tokens)):
            self._rows.sharing.mark(arena, row, 0, pages)
        self.written |= written
        if before and before.node:
            self._tree.unlock(before.node)
        self._chains[row] = Chain(key, ids.copy(), node, own)
        self._commit_tail(row, retention)

    def _commit_tail(self, row: int, retention: Iterable[Retention]) -> None:
        """Has others find the tail of a live row, which is kept as the token is that its page begins with."""
        tail = self._tail_of(row, self._tails.pop(row))
        if tail is None:
            return
        geometry, now = self._tree.geometry, self._tree.now()
        begin = geometry.known(len(self._chains[row].ids))
        for each in retention:
            end = inf if each.end is None else geometry.whole_after(each.end)
            if geometry.whole_after(each.start) <= begin < end:
                tail.priority, tail.expires = each.priority, inf if each.seconds is None else now + each.seconds
        self._tails.put(tail, now)

    def _tail_of(self, row: int, before: Tail | None, used: int = 0, kept: bool = False) -> Tail | None:
        """The tail of a row, as its chain says: to be kept as the one before, if that was at the same place. None where
        the tree does not know by pages of this row what lies before it."""
        ids, geometry, place = self._chains[row].ids, self._tree.geometry, self._place(row)
        if place is None:
            return None
        begin = -(-geometry.pages(geometry.known(len(ids)))[0] * geometry.page_size // geometry.records[0])
        tail = Tail(row, place, ids[begin:].tobytes(), kept, used)
        if before and before.place == place:
            tail.priority, tail.expires = before.priority, before.expires
        return tail

    def _continue_tail(self, row: int, before: Tail) -> None:
        """Writes down what is left of the tail of a live row, whose chain is another now."""
        if tail := self._tail_of(row, before):
            self._tails.put(tail, self._tree.now())

    def _insert(self, row: int, key: Hashable, ids: Ids, retention: Iterable[Retention]) -> tuple[Node, int, int]:
        """Has the tree know a row's pages, and holds those that it did not know; returns what to unlock, how many of
        the tokens are known by pages of the row alone, and how many are known now."""
        counts = self._tree.geometry.pages(len(ids))
        pages = [arena.table.pages_in(row, 0, count).tolist() for (arena, _), count in zip(self._books.ranges, counts)]
        insertion = self._tree.insert(key, ids, pages, retention)
        for new in insertion.new:
            self._held.hold(new)
        ends = [count + 1 for count in counts]
        for each in reversed(insertion.duplicates):
            ends[each.arena] = each.page
        return self._tree.lock(insertion.node), self._tokens_before(ends), insertion.tokens

    # ------------------------------------------------------------------ what rows ask

    @property
    def is_copying(self) -> bool:
        """Whether copies to the host, or from it, may be under way that no fence knows."""
        return any(each is not None and each.is_copying for each in (self._host, self.promotion))

    def known_tenants(self) -> set[int]:
        """Numbers of tenants of whom something is on the host."""
        return self._host.known_tenants() if self._host else set()

    def held_pages(self) -> list[int]:
        """The pages that are kept, wherever they lie; of large frames all."""
        held = self._held.mapped_pages()
        for row in self._table.kept:
            for (arena, _), (_, end) in zip(self._books.ranges, self._books.spans(0, len(self._chains[row].ids))):
                held += arena.table.pages_in(row, 0, end).tolist()
        return held

    def ids(self, row: int) -> Ids:
        """What the first tokens of a row are known to be."""
        chain = self._chains.get(row)
        return chain.ids if chain else np.empty(0, np.int64)

    def shorten(self, row: int, tokens: int) -> None:
        """Says that a live row holds its first tokens only, or has given back some in front."""
        chain = self._chains.get(row)
        if chain is None or chain.node is None:
            return
        if self._table.start[row]:
            del self._chains[row]
            self._tails.pop(row)
            self._tree.unlock(chain.node)
        elif len(chain.ids) > tokens:
            pages = [tokens * record // self._books.page_size for record in self._books.records]
            tables = [arena.table for arena, _ in self._books.ranges]
            ends = [  # from where on it will have pages of its own when it grows
                table.frame_begin(row, page) if page < table.own[row] else page for table, page in zip(tables, pages)
            ]
            before = self._tokens_before(ends)
            node = self._lock(chain.node, before)
            self._tree.unlock(chain.node)
            self._chains[row] = Chain(chain.key, chain.ids[:tokens], node, min(chain.own, before))
            if tail := self._tails.pop(row):
                self._continue_tail(row, tail)

    def forget(self, row: int) -> None:
        """Says that a live row holds nothing any more."""
        chain = self._chains.pop(row, None)
        self._tails.pop(row)
        if chain and chain.node:
            self._tree.unlock(chain.node)

    def leave(self, row: int) -> bool:
        """Says that a row's sequence has ended; returns whether the row is to be kept for others that begin alike."""
        chain = self._chains.get(row)
        if chain is None:
            return False
        own, used = 0, self._tree.use()  # before what it follows: it goes first
        if chain.node:
            own = min(chain.own, chain.node.end)
            self._tree.unlock(chain.node)
        self._chains[row] = Chain(chain.key, chain.ids, None, own)
        before = self._tails.pop(row)
        tail = None if self._books.rules.cleans else self._tail_of(row, before, used, kept=True)
        if tail is None or self._is_known_without(tail):
            del self._chains[row]  # nobody could adopt it, or find it, or need it
            return False
        self._tails.put(tail, self._tree.now())
        self._roomy[row] = None
        return True

    def _is_known_without(self, tail: Tail) -> bool:
        """Whether a kept row holds all that a tail's row does."""
        if not tail.ids and not isinstance(tail.place, int):
            return True  # nothing
        found = self._tails.longest(tail.place, np.frombuffer(tail.ids, np.int64), kept=True)
        return found is not None and found.tokens == tail.tokens

    def inherit(self, sources: dict[int, int]) -> None:
        """Says that live rows hold what others have held so far, and have the same pages as far as they may share."""
        chains = [(row, self._chains.get(source)) for row, source in sources.items()]
        before = [self._chains.pop(row, None) for row in sources]
        for row, source in sources.items():
            if row != source:
                self._tails.pop(row)  # whoever held it first still does
        for row, chain in chains:
            if chain and chain.node:
                ends = [arena.table.own[row] for arena, _ in self._books.ranges]  # behind are copies
                own = min(chain.own, self._tokens_before(ends))
                self._chains[row] = Chain(chain.key, chain.ids, self._lock(chain.node, own), own)
        for chain in before:
            if chain and chain.node:
                self._tree.unlock(chain.node)

    def _place(self, row: int) -> Hashable | None:
        """Where the tail of a row is, if it can be found."""
        chain, geometry = self._chains[row], self._tree.geometry
        arena, _ = self._books.ranges[0]
        count = geometry.pages(geometry.known(len(chain.ids)))[0]
        if count > arena.table.end[row] or arena.table.first[row] or not len(chain.ids):
            return None
        page = arena.table.memory.item(row, count - 1) if count else -1
        return page if page in self._tree.numbers[0] else None if count else chain.key

    def give_up(self, row: int) -> None:
        """Has a kept row be one that nobody can adopt. What the tree knows of it stays known."""
        del self._chains[row]
        self._tails.pop(row)
        self._roomy.pop(row, None)
        self._table.kept.pop(row)
        self._books.settle(row)

    def evict(self, pages: int, wait: bool) -> int:
        """Gives up what is known, least needed first, until so many pages are free, or will be as soon as nothing reads
        them; then what kept rows have beside that. Returns how many are free."""
        before, later = self._pool.frames.taken, 0
        self._rows.sharing.clear(wait)
        if self.promotion:
            self.promotion.give_way(wait)

        def missing() -> int:
            return pages - later - (before - self._pool.frames.taken)

        beside = LARGE if self._pool.frames.has_large else 0  # only what has no known page left is free
        while missing() > 0 and self._roomy and self._trim(next(iter(self._roomy)), wait):
            pass
        while missing() > 0:
            gone, rows = self._least_needed(missing() + beside, self._leaving)
            gone = gone if gone or rows else self._know_copies()
            if not gone and not rows:
                break
            waiting = self._let_go(gone, rows, wait)
            later += 0 if wait else waiting  # who has waited already, and what is there still, is about to be copied
        while missing() > 0 and self._table.kept:
            row = next(iter(self._table.kept))
            self.give_up(row)
            self._unmap([row], wait)
        return before - self._pool.frames.taken

    def _trim(self, row: int, wait: bool) -> bool:
        """Unmaps what a kept row has behind its tokens; returns False where something may still read it."""
        fence = self._table.fences[row]
        if wait:
            fence.wait()
        if fence.passed():
            del self._roomy[row]
            self._rows.reclaimer.unmap_surplus({row: len(self._chains[row].ids)})
        return row not in self._roomy

    def _least_needed(
        self, pages: int, leaving: Callable[[Node], None] | None = None, whole: bool = False
    ) -> tuple[list[Page], list[int]]:
        """Has the tree give up so many pages, as far as they are less needed than any tail, and if `whole` all of each
        leaf that loses some; or else names the kept row that has the least needed tail, if there is one."""
        now = self._tree.now()
        tail = self._tails.order.first(now)
        if tail is None:
            return self._tree.evict(pages, leaving=leaving, whole=whole), []
        gone = self._tree.evict(pages, tail.priority_at(now), tail.used, leaving, whole)
        return gone, [] if gone else [tail.row]

    def least_needed(self) -> int:
        """The kept row that gives way first when there is no other."""
        row = next(iter(self._table.kept))
        tail = self._tails.order.first(self._tree.now()) if self._tails.of[row].ids else None
        return tail.row if tail else row

    def _know_copies(self) -> list[Page]:
        """Has the tree know the copies that live rows have of pages, instead of those that nobody uses. Returns these,
        which it knows no more."""
        gone: list[Page] = []
        for row, chain in self._chains.items():
            if chain.node and chain.own < chain.node.end:
                path, ends = list(chain.node.path())[::-1], []
                for number, ((arena, _), known) in enumerate(zip(self._books.ranges, chain.node.path_pages())):
                    mine = arena.table.pages_in(row, 0, len(known)).tolist()
                    copied = [page for page, its in enumerate(known) if mine[page] != its]
                    kept = arena.table.own[row]  # behind, it may write to its pages as they are, and perhaps does soon
                    unused = [page for page in copied if page < kept and not self._pool.frames.users[known[page]]]
                    self._held.hold(mine[page] for page in unused)
                    for page in unused:
                        self._tree.renumber(path, number, page, [known[page]], [mine[page]])
                        gone.append(Page(number, page, known[page]))
                    ends.append(min(set(copied).difference(unused), default=len(known) + 1))
                self._chains[row] = Chain(chain.key, chain.ids, chain.node, self._tokens_before(ends))
        self._disown(gone)
        return gone

    def _disown(self, gone: Iterable[Page]) -> None:
        """Says that the tree knows other pages instead of these, which rows may have."""
        rows = np.fromiter(self._chains, np.int64, len(self._chains))
        for arena, page, number in gone:
            table = self._books.ranges[arena][0].table
            before = page * self._books.page_size // self._books.records[arena]
            for row in rows[(table.memory[rows, page] == number) & (table.ends[rows] > page)].tolist():
                if chain := self._chains.get(row):
                    self._chains[row] = Chain(chain.key, chain.ids, chain.node, min(chain.own, before))

    def _leaving(self, leaf: Node) -> None:
        """Has the host keep what is about to be evicted."""
        if self._host:
            *_, top = leaf.path()
            assert isinstance(top.parent, Root)
            self._host.keep(top.parent.key, leaf, self.written)

    def make_way(self, hit: Hit, tokens: int) -> bool:
        """Has kept rows be parked ahead of need, least needed first, where memory is full and a new sequence that is to
        have so many tokens can adopt one: to unmap their pages and to map them elsewhere costs more than all else.
        Returns whether anything was given up, and what was found is to be found again."""
        if (
            hit.row is not None
            or not hit.is_copied
            or self._host
            or not self._table.kept
            or not self._books.rules.lookahead
        ):
            return False
        parked = next(map(self._table.parked.size, self._table.parked.largest()), 0)
        pages, there = (sum(end for _, end in self._books.spans(0, each)) for each in (tokens, parked))
        wanted = 2 * pages + stock(self._pool)  # so that there are some to choose from, of which one may be long enough
        asked = missing = wanted - self._pool.accounts.idle(self._rows.account) - there
        if missing <= 0:
            return False
        if hit.tokens:
            self._tree.unlock(self._tree.lock(hit.node, hit.locked))  # goes last
        given_up: list[int] = []
        while missing > 0:
            leaf = self._tree.order.first(self._tree.now())
            if leaf is None or leaf.num_pages > 2 * pages:  # most of that would be given up for nothing
                break
            gone, rows = self._least_needed(1, whole=True)
            for row in rows:
                self.give_up(row)
            given_up += rows
            missing -= len(gone)
            given_up += self._drop(gone)[0]
        for row in given_up:
            if row in self._table.retired:
                self._books.settle(row)
        return missing < asked or bool(given_up)

    def give_way(self, pages: int) -> None:
        """Gives up so many pages that are known, least needed first, before somebody needs them. Those that lie on no
        row are free then; the rows of the others are nobody's."""
        while pages > 0 and not self._host:  # the driver has no work in between for who has to copy them
            gone, rows = self._least_needed(pages)
            if not gone and not rows:
                break
            pages -= len(gone) + sum(map(self._behind, rows))
            self._drop(gone)
            for row in rows:
                self.give_up(row)

    def _let_go(self, gone: Sequence[Page], given_up: list[int], wait: bool) -> int:
        """Drops pages that the tree knows no more, and unmaps the kept rows that they lie in, and others that are given
        up. Returns how many will be free as soon as nothing reads them."""
        rows, later = self._drop(gone)
        for row in given_up:
            later += self._behind(row)
            self.give_up(row)
        rows += given_up
        before = self._pool.frames.taken
        self._unmap(rows, wait)
        self._rows.sharing.clear(wait)  # of what was copied to the host, and lay on no row
        return max(later - (before - self._pool.frames.taken), 0)

    def _behind(self, row: int) -> int:
        """How many pages a kept row has behind those that the tree knows."""
        geometry = self._tree.geometry
        counts = geometry.pages(geometry.known(len(self._chains[row].ids)))
        return sum(max(arena.table.end[row] - count, 0) for (arena, _), count in zip(self._books.ranges, counts))

    def _drop(self, gone: Sequence[Page]) -> tuple[list[int], int]:
        """Drops pages that the tree knows no more, where they are held. Returns the kept rows that they lie in, which
        are given up, and how many are left on rows that do not use them."""
        left = self._held.drop(page.number for page in gone)  # before: a row that has all for its own can be adopted
        # Of a kept row the last page goes first, in the first arena; what others hold behind it is beside that.
        places = self._tails.places(number for arena, _, number in gone if arena == 0)
        return [row for place in places for row in self._lose_place(place)], left

    def _lose_place(self, number: int) -> list[int]:
        """Says that the tree does not know a page by its number any more. Returns the kept rows that nobody could find
        any more, which are given up."""
        rows = self._tails.rows(number)
        kept = [row for row in rows if row in self._table.kept]
        for row in rows:
            if row in self._table.kept:
                self.give_up(row)
            else:
                self._tails.pop(row)
        return kept

    def _unmap(self, rows: Iterable[int], wait: bool) -> None:
        """Unmaps what was kept on rows, but for those that something may still read."""
        fences = {row: self._table.fences[row] for row in rows}
        for fence in fences.values() if wait else ():
            fence.wait()
        self._rows.reclaimer.unmap_surplus({row: 0 for row, fence in fences.items() if fence.passed()})

    # ------------------------------------------------------------------ lying elsewhere

    def path(self, key: Hashable, ids: Ids) -> list[Node]:
        """The nodes that ids lead through, from the root on."""
        return self._tree.path(key, ids)

    def move(self, pages: Pages, numbers: list[int]) -> bool:
        """Has pages of a path be those of other numbers, which hold the same; returns False where they have left it.
        Rows that lie on the old ones have copies from there on."""
        _, _, arena, first, old = pages
        if not self._tree.renumber(self.path(pages.key, pages.ids), arena, first, old, numbers):
            return False
        self._held.hold(numbers)
        for place in self._tails.places(old) if not arena else ():
            self._lose_place(place)
        self._disown(Page(arena, page, number) for page, number in enumerate(old, first))
        self._held.drop(old)
        return True

    def reset(self) -> None:
        """Forgets all, after an interruption: frames that were held are nobody's then."""
        self._tree = self._new_tree()
        self._chains.clear()
        self._tails = Tails()
        self._roomy.clear()
        if self._host:
            self._host.reset()
        if self.promotion:
            self.promotion.reset()
        if self._log:
            self._log.cleared()

    def close(self) -> None:
        """Gives all up, with the cache."""
        self.reset()
        if self.promotion:
            self.promotion.close()
        self._held.leave_behind()
        self._pool.collect()

    def check(self) -> None:
        """Checks the invariants.

        Raises:
            InvariantError: one is broken; the message says which.
        """
        self._tree.check()
        if self._host:
            self._host.check()
        known = set().union(*self._tree.numbers)
        if known != self._held.known_pages(known):
            raise InvariantError("the tree knows a page whose frame is not held, or one is held for nothing")
        for row, chain in self._chains.items():
            if not self._table.is_live(row) and row not in self._table.kept:
                raise InvariantError(f"row {row} is nobody's, and known to hold tokens")
            for node in chain.node.path() if chain.node else ():
                users = self._pool.frames.users[[page for of in node.pages for page in of]]
                if node.end <= chain.own and not users.all():
                    raise InvariantError(f"row {row} keeps a page from being evicted that nobody uses")
        for row, tail in self._tails.of.items():
            ids = self._chains[row].ids
            pages = self._tree.match(self._chains[row].key, ids).pages[0]
            count = self._tree.geometry.pages(self._tree.geometry.known(len(ids)))[0]
            place = self._chains[row].key if not count else pages[count - 1] if count <= len(pages) else tail.place
            if tail.kept != (row in self._table.kept) or tail.place != place:
                raise InvariantError(f"row {row} cannot be found where its tail is")
            if not ids.tobytes().endswith(tail.ids):
                raise InvariantError(f"row {row} does not hold its tail")
        if not self._tails.of.keys() >= self._table.kept.keys():
            raise InvariantError("a kept row cannot be found")


def ids_of(token_ids_given: npt.ArrayLike) -> Ids:
    """Token ids as an array.

    Raises:
        ArgumentError, ShapeError, DtypeError: they are none.
    """
    ids = np.asarray(token_ids_given)
    return token_ids(ids if ids.size else ids.astype(np.int64))  # an empty list is one of floats to numpy
