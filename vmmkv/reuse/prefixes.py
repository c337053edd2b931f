"""Prefixes of one cache: which sequences begin with tokens that are there already, and what they begin on.

Pages whose tokens were made known (`commit`) are held by the prefix tree, mapped somewhere or nowhere, until they are
evicted. A new sequence that begins with such tokens

 1. adopts the row of a freed one, where that holds all that is known of it: no driver call;
 2. otherwise has the frames mapped in a row of its own, read-only, and what does not fill a frame copied.

Invariants:
 1. A frame that holds a page of the tree is held here, as one place more where it is.
 2. A live row's committed pages are locked in the tree, and those that it has copies of: what is used is never evicted,
    and all that is not can be, where nothing else is left after the tree has come to know the copies instead.
 3. `kept` rows belong to nobody, are whole from their first page on, and hold what their chain says.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, InvariantError, UnsupportedError
from ..events import EventLog
from ..events.log import check_ids
from ..memory.fence import Fence
from ..memory.frames import LARGE
from ..memory.monitor import at_once
from ..memory.pool import Account, FramePool
from ..rows.laying import Piece, pieces
from ..rows.rows import Rows
from .host_prefixes import HostPrefixes
from .lookup import token_ids
from .node import Ids, Node, Root, common
from .promoting import Pages, Promotion
from .retention import Retention
from .telling import Key
from .tree import Match, Page, PrefixTree


class Chain(NamedTuple):
    """What a row is known to hold: the tokens of these ids. What the tree knows of the first `own` of them lies in this
    row itself. While it is live `node` is locked; while it is kept, `last` is the number of its last page that the tree
    knows, in the first arena."""

    key: Hashable
    ids: Ids
    node: Node | None
    own: int = 0
    last: int = -1


class Hit(NamedTuple):
    """What a new sequence can begin with: so many tokens, on a kept row, or laid on one without pages.

    Attributes:
        tokens: how many.
        row: the kept one; None where there is none.
        node: with `locked` tokens on its path, which are not to be evicted meanwhile.
        laid: by range the pieces of whole pages.
        partial: by range the page that holds the rest.
    """

    tokens: int
    row: int | None
    node: Node
    locked: int
    laid: Sequence[list[Piece]] = ()
    partial: Sequence[int | None] = ()

    def given_up(self) -> Hit:
        """Nothing, instead."""
        return self._replace(tokens=0)


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
        for frame in frames.frames_of(pages):
            count = held.get(frame, 0)
            held[frame] = count + 1
            if not count:
                new.append(frame)
        frames.share(new)

    def drop(self, pages: Iterable[int]) -> int:
        """Gives up the frames of pages that are known no more, if they were the last ones there. Returns how many pages
        these still have on rows that do not use them."""
        frames, held, gone = self._pool.frames, self._pages, list[int]()
        for frame in frames.frames_of(pages):
            held[frame] -= 1
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


class Prefixes:
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
        self._last: dict[int, int] = {}
        """Kept rows, by the last page that the tree knows of each."""
        self.prompt_tokens = self.cached_tokens = 0
        """Of sequences that have begun since the beginning: all, and those that were there."""
        self.written = Fence()
        """Passes when all that is known has been written."""
        self._held = Held(rows.pool, rows.account)
        rows.pool.tables.append(self._held)
        self.promotion: Promotion | None = None
        """What moves pages to large frames, where somebody does."""
        if rows.rules.large and rows.rules.lookahead:
            self.promotion = Promotion(self, rows.pool, rows.account, self._books)
            rows.movers.append(self.promotion)
        rows.keeper, rows.reclaimer.evict, rows.sharing.forget = self, self.evict, self.forget
        rows.ahead.give_way = self.give_way
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
        pages = match.pages[0] + [page for page in match.partial[:1] if page is not None]
        for count, page in zip(range(len(pages), 0, -1), reversed(pages)):
            if page in self._last:  # a row's last page may end in the middle of a token
                row, same = self._last[page], min(count * self._books.page_size // self._books.records[0], match.tokens)
                tokens = same + common(self._chains[row].ids[same:], ids[same:-1])
                if tokens >= match.tokens and self._may_adopt(row, tokens):
                    return Hit(tokens, row, match.node, match.tokens)
                break
        return self._laid(match)

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
            self._rows.begin(row, owner, expected, stream, key.number)
            self._lay(row, hit, key, ids, tokens)
        else:
            self._rows.afford(row, hit.tokens)
            self._rows.adopt(row, owner, hit.tokens, expected, stream, key.number)
            self._continue(row, hit)
            self._order_behind(row)
            at_once(self._rows.grow_one(row, tokens))

    def _continue(self, row: int, hit: Hit) -> None:
        """Has a row that was kept be live, with the tokens of a hit."""
        chain = self._chains.pop(row)
        self._last.pop(chain.last)
        own = min(chain.own, hit.tokens)
        self._chains[row] = Chain(chain.key, chain.ids[: hit.tokens], self._lock(hit.node, min(own, hit.locked)), own)
        if own < hit.locked:  # what the tree knows by other numbers than the row's was used, too
            self._tree.unlock(self._tree.lock(hit.node, hit.locked))

    def _lay(self, row: int, hit: Hit, key: Hashable, ids: Ids, tokens: int) -> None:
        """Lays a hit on a row without pages, which is to have so many tokens."""
        meanwhile = self._tree.lock(hit.node, hit.locked)
        try:
            known = ids[: hit.tokens].copy()
            self._order_behind(row)
            self._rows.laying.lay(row, hit.tokens, tokens, hit.laid, hit.partial)
            self._chains[row] = self._locked(row, meanwhile, key, known)
            if self.promotion:
                self.promotion.count(meanwhile, key, known, hit.laid)
        finally:
            self._tree.unlock(meanwhile)

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
            ends.append(next((page for page, its in enumerate(mine) if its != known[page]), len(known) + 1))
        own = self._tokens_before(ends)
        return Chain(key, ids, self._lock(node, own), own)

    def _lock(self, node: Node, tokens: int) -> Node:
        """Locks of the path to a node what is whole in so many tokens."""
        return self._tree.lock(node, min(node.end, tokens))

    def _tokens_before(self, ends: Iterable[int]) -> int:
        """How many tokens lie in front of pages, one of each range."""
        return min(end * self._books.page_size // record for end, record in zip(ends, self._books.records))

    def completed(
        self, key: Hashable, ids: Ids, cached: int
    ) -> AbstractContextManager[tuple[int, Callable[[int], int]]]:
        """Around the beginning of a sequence with so many tokens of these ids. Gives how many there are together with
        those behind that the host knows, and what gives a row these, as if it had computed them, and returns how many
        it has then."""
        if self._host is None:
            return nullcontext((cached, lambda row: cached))
        return self._completed_by(self._host, key, ids, cached)

    @contextmanager
    def _completed_by(
        self, host: HostPrefixes, key: Hashable, ids: Ids, cached: int
    ) -> Iterator[tuple[int, Callable[[int], int]]]:
        with host.found(key, ids[:-1], cached) as found:
            yield max(found.tokens, cached), lambda row: host.load(row, found, cached)

    def count(self, tokens: int, cached: int) -> None:
        """Counts a sequence that has begun, with so many tokens, of which so many were there."""
        self.prompt_tokens += tokens
        self.cached_tokens += cached
        self._pool.prompt_tokens += tokens
        self._pool.cached_tokens += cached

    # ------------------------------------------------------------------ making known

    def commit(self, row: int, key: Hashable, ids: Ids, retention: Iterable[Retention]) -> None:
        """Makes the first tokens of a live row known: those that fill pages.

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
        return self._held.mapped_pages()

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

    def forget(self, row: int) -> None:
        """Says that a live row holds nothing any more."""
        chain = self._chains.pop(row, None)
        if chain and chain.node:
            self._tree.unlock(chain.node)

    def leave(self, row: int) -> bool:
        """Says that a row's sequence has ended; returns whether the row is to be kept for others that begin alike."""
        chain = self._chains.pop(row, None)
        if chain is None:
            return False
        own = 0
        if chain.node:
            own = min(chain.own, chain.node.end)
            self._tree.unlock(chain.node)
        last = self._last_page(row, len(chain.ids))
        if self._books.rules.cleans or last is None or last in self._last:
            return False  # nobody could adopt it, or find it
        self._last[last] = row
        self._chains[row] = Chain(chain.key, chain.ids, None, own, last)
        return True

    def inherit(self, sources: dict[int, int]) -> None:
        """Says that live rows hold what others have held so far, and have the same pages as far as they may share."""
        chains = [(row, self._chains.get(source)) for row, source in sources.items()]
        before = [self._chains.pop(row, None) for row in sources]
        for row, chain in chains:
            if chain and chain.node:
                ends = [arena.table.own[row] for arena, _ in self._books.ranges]  # behind are copies
                own = min(chain.own, self._tokens_before(ends))
                self._chains[row] = Chain(chain.key, chain.ids, self._lock(chain.node, own), own)
        for chain in before:
            if chain and chain.node:
                self._tree.unlock(chain.node)

    def _last_page(self, row: int, tokens: int) -> int | None:
        """The number of the last whole page of the first arena, if the tree knows it."""
        count = self._tree.geometry.pages(tokens)[0]
        arena, _ = self._books.ranges[0]
        if not 0 < count <= arena.table.end[row] or arena.table.first[row]:
            return None
        page = int(arena.table.memory[row, count - 1])
        return page if page in self._tree.numbers[0] else None

    def give_up(self, row: int) -> None:
        """Has a kept row be one that nobody can adopt. What the tree knows of it stays known."""
        self._last.pop(self._chains.pop(row).last)
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
        while missing() > 0 and (
            gone := self._tree.evict(missing() + beside, leaving=self._leaving) or self._know_copies()
        ):
            waiting = self._let_go(gone, wait)
            later += 0 if wait else waiting  # who has waited already, and what is there still, is about to be copied
        while missing() > 0 and self._table.kept:
            row = next(iter(self._table.kept))
            self.give_up(row)
            self._unmap([row], wait)
        return before - self._pool.frames.taken

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
                    unused = [page for page in copied if not self._pool.frames.users[known[page]]]
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
                    self._chains[row] = Chain(chain.key, chain.ids, chain.node, min(chain.own, before), chain.last)

    def _leaving(self, leaf: Node) -> None:
        """Has the host keep what is about to be evicted."""
        if self._host:
            *_, top = leaf.path()
            assert isinstance(top.parent, Root)
            self._host.keep(top.parent.key, leaf, self.written)

    def give_way(self, pages: int) -> None:
        """Gives up so many pages that are known, least needed first, before somebody needs them. Those that lie on no
        row are free then; the rows of the others are nobody's."""
        if not self._host:  # the driver has no work in between for who has to copy them
            self._drop(self._tree.evict(pages))

    def _let_go(self, gone: Sequence[Page], wait: bool) -> int:
        """Drops pages that the tree knows no more, and unmaps the kept rows that they lie in. Returns how many will be
        free as soon as nothing reads them."""
        rows, later = self._drop(gone)
        before = self._pool.frames.taken
        self._unmap(rows, wait)
        self._rows.sharing.clear(wait)  # of what was copied to the host, and lay on no row
        return max(later - (before - self._pool.frames.taken), 0)

    def _drop(self, gone: Sequence[Page]) -> tuple[list[int], int]:
        """Drops pages that the tree knows no more, where they are held. Returns the kept rows that they lie in, which
        are given up, and how many are left on rows that do not use them."""
        # Of a kept row the last page goes first, in the first arena; what others hold behind it is beside that.
        rows = [self._last[number] for arena, _, number in gone if arena == 0 and number in self._last]
        for row in rows:
            self.give_up(row)
        return rows, self._held.drop(page.number for page in gone)

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
        for row in [self._last[number] for number in old if not arena and number in self._last]:
            self.give_up(row)  # nobody could find it any more
        self._disown(Page(arena, page, number) for page, number in enumerate(old, first))
        self._held.drop(old)
        return True

    def reset(self) -> None:
        """Forgets all, after an interruption: frames that were held are nobody's then."""
        self._tree = self._new_tree()
        self._chains.clear()
        self._last.clear()
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
        for row in self._table.kept:
            if self._last.get(self._chains[row].last) != row:
                raise InvariantError(f"kept row {row} cannot be found")


def ids_of(token_ids_given: npt.ArrayLike) -> Ids:
    """Token ids as an array.

    Raises:
        ArgumentError, ShapeError, DtypeError: they are none.
    """
    ids = np.asarray(token_ids_given)
    return token_ids(ids if ids.size else ids.astype(np.int64))  # an empty list is one of floats to numpy
