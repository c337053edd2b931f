"""Requests on rows of several devices, of which each holds a share of the layers: what happens to a request happens on
all of them, or on none.

Each device has a pool of its own, and may be full where others are not. So what one may refuse all try, and who could
do it takes it back.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import partial

from ..cache import KVCache
from .row_groups import Group, devices_of
from .row_ranks import RankedRequests, Ranks
from .row_requests import NO_ROOM, RowRequests


class StagedRequests:
    """See above; methods are those of `RowRequests`.

    Args:
        stages: of each device the requests there.
    """

    def __init__(self, stages: Many[RowRequests]) -> None:
        self.stages = list(stages)
        self.reuse = all(stage.reuse for stage in stages)

    def __contains__(self, name: str) -> bool:
        return name in self.stages[0]

    def is_away(self, name: str) -> bool:
        return self.stages[0].is_away(name)

    def rows(self, name: str) -> list[int]:
        return [row for stage in self.stages for row in stage.rows(name)]

    def begin(self, name: str, expected: int, token_ids: list[int] | None = None, weights: str | None = None) -> int:
        token_ids = token_ids if self.reuse else None
        try:
            known = [stage.begin(name, expected, token_ids, weights) for stage in self.stages]
        except NO_ROOM:
            self.end(name)
            raise
        return min(known)  # who knows more gives it back when the request grows

    def grow_in_place(self, name: str, held: int, tokens: int) -> bool:
        return all(stage.grow_in_place(name, held, tokens) for stage in self.stages)  # or else `make_room` comes

    def make_room(self, name: str, held: int, tokens: int) -> bool:
        was_away = self.is_away(name)
        if all(stage.make_room(name, held, tokens) for stage in self.stages):
            return True
        for stage in self.stages:
            if name in stage:
                stage.take_back(name, held)
                if was_away:
                    stage.put_back(name)
        return False

    def fills_pages(self, before: int, tokens: int) -> bool:
        return any(stage.fills_pages(before, tokens) for stage in self.stages)

    def commit(self, name: str, token_ids: list[int]) -> None:
        for stage in self.stages:
            stage.commit(name, token_ids)

    def fork(self, parent: str, children: Many[str]) -> list[str]:
        started = min((stage.fork(parent, children) for stage in self.stages), key=len)
        for child in children[len(started) :]:
            self.end(child)
        return started

    def put_away(self, name: str) -> bool:
        moved = [stage.put_away(name) for stage in self.stages]
        if not all(moved):
            self.end_away(name)
        return all(moved)

    def end(self, name: str) -> None:
        for stage in self.stages:
            stage.end(name)

    def end_away(self, name: str) -> None:
        for stage in self.stages:
            stage.end_away(name)

    def end_all(self) -> None:
        for stage in self.stages:
            stage.end_all()

    def forget_known(self) -> None:
        for stage in self.stages:
            stage.forget_known()


Requests = RowRequests | StagedRequests


def make_requests(groups: list[Group], caches: list[KVCache], ranks: Ranks, *, reuse: bool, has_host: bool) -> Requests:
    """Requests on the devices that layer groups are on, each with its cache, in one process or as one of several; the
    others as in `RowRequests`."""
    make = partial(RankedRequests, ranks) if ranks.size > 1 else RowRequests
    stages = []
    for device in devices_of(groups):
        there = [(cache, group.window) for cache, group in zip(caches, groups) if group.device == device]
        stages.append(make(*zip(*there), reuse=reuse, has_host=has_host))
    return StagedRequests(stages) if len(stages) > 1 else stages[0]
