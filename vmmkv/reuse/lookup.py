"""What is known of a sequence's beginning: the path that its ids lead along, and the pages that its tokens lie in.

Where several sequences go on from the same token, the page that this token is in is any of theirs. With one arena each
of them has it. With several one may lack it, for want of another arena's pages, or because the end was evicted: the one
below which something was inserted last is asked. While nothing is evicted that finds all that there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, DtypeError, ShapeError
from .geometry import Geometry
from .node import Ids, Node, common


class Duplicate(NamedTuple):
    """A page that was known by another number than the one given: both hold the same bytes."""

    arena: int
    page: int
    given: int
    known: int


def walk(begin: Node, ids: Ids) -> tuple[list[Node], int]:
    """The nodes that ids lead through, from the root on, or from a node that they are known to lead to, and how many of
    the ids; of the last node it may be a part."""
    path, tokens = [begin], begin.end
    while tokens < len(ids):
        node = path[-1].children.get(ids.item(tokens))
        if node is None:
            break
        path.append(node)
        tokens += common(node.ids, ids[tokens:])
        if tokens < node.end:
            break
    return path, tokens


def numbers_of(path: Sequence[Node], tokens: int, geometry: Geometry) -> list[list[int]]:
    """By arena the numbers of the pages that are whole after the first tokens of a path, and of the one behind, if that
    is known."""
    most = [whole + 1 for whole in geometry.pages(tokens)]
    numbers: list[list[int]] = [[] for _ in most]
    for node in path:
        _add(numbers, node, most)
    node = path[-1]
    while node.children and any(len(of) < limit for of, limit in zip(numbers, most)):
        node = next(reversed(node.children.values()))
        _add(numbers, node, most)
    return numbers


def _add(numbers: list[list[int]], node: Node, most: list[int]) -> None:
    for of, its, limit in zip(numbers, node.pages, most):
        of += its[: limit - len(of)]


def readable(path: list[Node], tokens: int, geometry: Geometry) -> tuple[int, list[list[int]]]:
    """Of the first tokens of a path as many as lie in known pages, in all arenas; and the numbers of these pages."""
    best: tuple[int, list[list[int]]] = -1, []
    while tokens > best[0]:
        numbers = numbers_of(path, tokens, geometry)
        covered = [len(of) * geometry.page_size // record for of, record in zip(numbers, geometry.records)]
        if min(tokens, *covered) > best[0]:
            best = min(tokens, *covered), numbers
        *path, last = path
        tokens = last.begin
    return best


def duplicates(
    path: Sequence[Node], tokens: int, pages: Sequence[Sequence[int]], geometry: Geometry
) -> list[Duplicate]:
    """Of the pages that become whole behind the first node of a path, in its first tokens, those known by other numbers
    than those given."""
    found: list[Duplicate] = []
    bounds = zip(pages, geometry.pages(path[0].end), geometry.pages(tokens)) if len(path) > 1 else ()
    for arena, (given, first, whole) in enumerate(bounds):
        known = list(chain.from_iterable([node.pages[arena] for node in path[1:]]))[: whole - first]
        if given[: len(known)] != known:  # at once: most have none
            places = enumerate(zip(given, known), first)
            found += [Duplicate(arena, page, *numbers) for page, numbers in places if numbers[0] != numbers[1]]
    return found


def token_ids(ids: npt.NDArray[np.integer[Any]]) -> Ids:
    """Ids as 64-bit integers, side by side.

    Raises:
        ArgumentError: no array.
        ShapeError: it has not one dimension.
        DtypeError: it is not of integers, or of such as 64 bits with a sign do not hold.
    """
    if not isinstance(ids, np.ndarray):
        raise ArgumentError(f"asked for the tokens of a {type(ids).__name__}; give a numpy array of token ids")
    if ids.ndim != 1:
        raise ShapeError(f"asked for the tokens of an array of shape {ids.shape}; give ids of one sequence, [tokens]")
    if ids.dtype != np.int64 and (ids.dtype.kind not in "iu" or not np.can_cast(ids.dtype, np.int64)):
        raise DtypeError(f"got token ids of {ids.dtype}; they are integers below 2**63, which int64 holds")
    return np.ascontiguousarray(ids, np.int64)
