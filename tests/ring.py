"""A ring of changes for tests of event logs, filled by hand."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from itertools import count
from typing import Any

import numpy as np

from vmmkv.events import EventLog
from vmmkv.events.log import Change

AT_ONCE = 7
"""Changes that are drained at a time."""


class Ring:
    """The changes of a cache that does not exist, for a log. Node numbers are never used twice.

    Args:
        log: follows the ring.
    """

    def __init__(self, log: EventLog) -> None:
        self.changes: deque[Change] = deque()
        self.first, self.size, self.lock, self.nodes = 0, log.max_events, threading.Lock(), count(1)
        log.follow(self)
        assert len(log.events()) == 1  # Created

    def add(self, change: Change) -> None:
        with self.lock:
            if len(self.changes) == self.size:
                self.changes.popleft()
                self.first += 1
            self.changes.append(change)

    def drain(self) -> tuple[int, list[Change]]:
        with self.lock:
            first, taken = self.first, [self.changes.popleft() for _ in range(min(AT_ONCE, len(self.changes)))]
            self.first += len(taken)
            return first, taken

    def store(
        self, ids: Iterable[int], parent: int = 0, start: int = 0, names: Any = (None, None, None), priority: int = 35
    ) -> int:
        """Stores tokens, and returns their node."""
        node = next(self.nodes)
        self.add(Change("stored", node, parent, names, start, np.array([*ids], np.int64), priority))
        return node

    def remove(self, node: int) -> None:
        self.add(Change("removed", node, 0, (None, None, None), 0, np.empty(0, np.int64), 35))

    def clear(self) -> None:
        self.add(Change("cleared", 0, 0, (None, None, None), 0, np.empty(0, np.int64), 0))
