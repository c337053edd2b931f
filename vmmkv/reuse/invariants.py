"""What is wrong with a prefix tree's books, worked out anew from its nodes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from .node import Node, Root

if TYPE_CHECKING:
    from .tree import PrefixTree


def faults(tree: PrefixTree) -> Iterator[str]:
    """Each invariant that `vmmkv.reuse.tree` states and that does not hold, or a count that is wrong."""
    nodes: list[Node] = []
    for key, root in tree.roots.items():
        if root.key != key or root.parent or not root.children:
            yield f"the root of {key!r} is no root, or leads nowhere"
        waiting: list[Node] = [root]
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            nodes.append(node)
            yield from _links(node)
            if node is not root:
                yield from _contents(tree, node)
    if not tree.order.leaves(tree.now()) >= {node for node in nodes if node.is_evictable}:
        yield "a leaf that nobody uses would never be evicted"
    numbers = [list(chain.from_iterable(node.pages[arena] for node in nodes)) for arena in range(len(tree.numbers))]
    if [*map(set, numbers)] != tree.numbers or [*map(len, numbers)] != [*map(len, tree.numbers)]:
        yield "the numbers of pages are not those of the nodes, or one is there twice"
    if tree.tokens != sum(len(node.ids) for node in nodes):
        yield f"there are not {tree.tokens} tokens"
    if tree.nodes != len(nodes) - len(tree.roots) or tree.nodes > 2 * tree.pages:
        yield f"there are not {tree.nodes} nodes, or too many for {tree.pages} pages"


def _links(node: Node) -> Iterator[str]:
    """Of a node and its children."""
    for first, child in node.children.items():
        if child.parent is not node or child.begin != node.end or child.ids.item(0) != first:
            yield f"a child of tokens [{node.begin}, {node.end}) does not follow them"
        if not isinstance(node, Root) and child.used > node.used:
            yield f"tokens [{node.begin}, {node.end}) were used before those that follow them"
    if not isinstance(node, Root) and node.locks != node.holders + sum(child.locks for child in node.children.values()):
        yield f"tokens [{node.begin}, {node.end}) are not locked as often as they and their children are"


def _contents(tree: PrefixTree, node: Node) -> Iterator[str]:
    """Of a node alone."""
    where = f"tokens [{node.begin}, {node.end})"
    first, behind = tree.geometry.pages(node.begin), tree.geometry.pages(node.end)
    if [*map(len, node.pages)] != [last - page for page, last in zip(first, behind)]:
        yield f"{where} have not the pages that become whole with them"
    if tree.teller and not node.children and not tree.teller.is_right(node):
        yield f"of the path to {where} routers were told other tokens than can be found"
    if len(node.children) < 2 and not (node.num_pages and tree.geometry.last_whole(node.end) == node.end):
        yield f"{where} have no page at their end, nor several that follow"
