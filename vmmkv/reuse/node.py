"""A node of a prefix tree: tokens that follow its parent's, and the pages that become whole within them.

All tokens of a node were used together, are locked together and are kept alike: where that differs it is cut in two.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import chain
from math import inf

import numpy as np
import numpy.typing as npt

from ..events import Span
from .retention import DEFAULT_PRIORITY

Ids = npt.NDArray[np.int64]


class Node:
    """Tokens `[begin, end)` of a path."""

    __slots__ = (
        "begin",
        "children",
        "expires",
        "hits",
        "holders",
        "ids",
        "locks",
        "pages",
        "parent",
        "priority",
        "span",
        "used",
    )

    def __init__(self, parent: Node | None, begin: int, ids: Ids, pages: list[list[int]]) -> None:
        self.parent = parent
        """None of a root, and of a node that is not in a tree any more."""
        self.begin = begin
        self.ids = ids
        self.pages = pages
        """By arena the numbers of the pages that become whole with a token of this node, in their order."""
        self.children: dict[int, Node] = {}
        """By their first token; the one below which something came last comes last."""
        self.holders = 0
        """Locks of exactly this node."""
        self.locks = 0
        """Locks of this node and of all below it."""
        self.hits = 0
        """How often sequences began with these tokens on single pages."""
        self.used = 0
        """When it was used last: a number that grows with each use of the tree."""
        self.priority = DEFAULT_PRIORITY
        self.expires = inf
        """When its priority is the default again."""
        self.span: Span | None = None
        """Of its last token that routers were told of, or one behind that, whose parents lead there."""

    @property
    def end(self) -> int:
        return self.begin + len(self.ids)

    @property
    def num_pages(self) -> int:
        return sum(map(len, self.pages))

    @property
    def is_evictable(self) -> bool:
        """Whether it is a leaf that nobody uses."""
        return not self.children and not self.locks and self.parent is not None

    @property
    def can_go_on(self) -> bool:
        """Whether it is a leaf that one alone holds, and is to be kept as a new one is: what follows may be its own."""
        is_new = self.priority == DEFAULT_PRIORITY and self.expires == inf and not self.hits
        return self.holders == 1 and not self.children and is_new

    @property
    def kept(self) -> tuple[int, int, float]:
        """All that says how long it is to be kept."""
        return self.used, self.priority, self.expires

    def priority_at(self, now: float) -> int:
        return self.priority if now < self.expires else DEFAULT_PRIORITY

    def path(self) -> Iterator[Node]:
        """Itself and all above it, but for the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def path_pages(self) -> list[list[int]]:
        """By arena the numbers of all pages of the path."""
        path = list(self.path())[::-1]
        return [list(chain.from_iterable([node.pages[arena] for node in path])) for arena in range(len(self.pages))]

    def told(self) -> tuple[Span, int] | None:
        """The span of its last token that routers were told of, where there is one, and the position behind it."""
        span, end = self.span, self.end
        while span and (span.start >= end or span.start == span.stop):
            end, span = min(end, span.start), span.parent  # from there on the parent may go elsewhere
        return (span, min(span.stop, end)) if span and min(span.stop, end) > self.begin else None

    def come_last(self) -> None:
        """Takes the last place among its parent's children, as all above it do among theirs."""
        for node in self.path():
            assert node.parent is not None
            first = node.ids.item(0)
            node.parent.children.pop(first, None)
            node.parent.children[first] = node

    def cut(self, at: int, pages: list[int]) -> Node:
        """Makes a node of its own of the tokens before `at`, in which so many pages become whole, by arena. This one
        stays what is behind them, and whoever holds it still does."""
        assert self.parent is not None
        tokens = at - self.begin
        upper = Node(self.parent, self.begin, owned(self.ids[:tokens]), [of[:n] for of, n in zip(self.pages, pages)])
        upper.locks, upper.used, upper.priority, upper.expires = self.locks, self.used, self.priority, self.expires
        upper.span, upper.hits = self.span, self.hits
        self.parent.children[upper.ids.item(0)] = upper
        self.parent, self.begin, self.ids = upper, at, owned(self.ids[tokens:])
        self.pages = [of[n:] for of, n in zip(self.pages, pages)]
        upper.children[self.ids.item(0)] = self
        return upper

    def join(self) -> bool:
        """Lets its only child have its tokens and pages, if nobody holds it, and it is to be kept like the child or has
        no pages to be kept. Returns whether it did."""
        if self.parent is None or len(self.children) != 1 or self.holders:
            return False
        (child,) = self.children.values()
        if self.num_pages and self.kept != child.kept:
            return False
        child.span = child.span if child.told() else self.span
        child.hits = max(child.hits, self.hits)
        child.begin, child.ids = self.begin, np.concatenate([self.ids, child.ids])
        child.pages = [mine + its for mine, its in zip(self.pages, child.pages)]
        child.parent, self.parent = self.parent, None
        child.parent.children[child.ids.item(0)] = child
        self.children = {}
        return True

    def go_on(self, ids: Ids, pages: list[list[int]]) -> None:
        """Has tokens that follow, and their pages, be its own."""
        self.ids = np.concatenate([self.ids, ids])
        self.pages = [mine + new for mine, new in zip(self.pages, pages)]

    def shorten(self, end: int) -> None:
        """Drops the tokens from `end` on; their pages are gone already."""
        self.ids = owned(self.ids[: end - self.begin])

    def detach(self) -> Node:
        """Leaves the tree; returns what was its parent."""
        assert self.parent is not None
        del self.parent.children[self.ids.item(0)]
        parent, self.parent = self.parent, None
        return parent


class Root(Node):
    """Where the paths of a key begin: no tokens.

    Args:
        key: whose they are.
        arenas: how many there are.
    """

    __slots__ = ("key",)

    def __init__(self, key: Hashable, arenas: int) -> None:
        super().__init__(None, 0, np.empty(0, np.int64), [[] for _ in range(arenas)])
        self.key = key


def common(first: Ids, second: Ids) -> int:
    """How many ids two sequences begin with alike."""
    count = min(len(first), len(second))
    if not count:
        return 0
    differs = first[:count] != second[:count]
    place = int(differs.argmax())
    return place if differs[place] else count


def owned(ids: Ids) -> Ids:
    """Ids that do not keep alive more than twice the memory that they take."""
    return ids.copy() if ids.base is not None and ids.base.nbytes > 2 * ids.nbytes else ids
