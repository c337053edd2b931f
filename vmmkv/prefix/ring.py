"""The tree's ring of events, for an `EventLog`. It keeps neither the tree nor its cache alive."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.pool import at
from ..events.log import Change, Kind
from ..events.naming import Name
from . import entries
from .tables import CLEARED, EVENT_WORDS, REMOVED, STORED

DRAINED = 256
"""Events that are drained at a time."""
KINDS: dict[int, Kind] = {STORED: "stored", REMOVED: "removed", CLEARED: "cleared"}


class Ring:
    """The events of a tree, numbered from 0 on; the oldest are lost when there is no room for more.

    Args:
        state: the tree's.
        keys: salts, adapters and tenants, and the tree's numbers for them, which grow.
    """

    def __init__(self, state: Any, keys: dict[tuple[Name, Name, Name], Any]) -> None:
        self.state, self.keys = state, keys
        self.names: dict[int, tuple[Name, Name, Name]] = {}

    @property
    def first(self) -> int:
        """The number of the oldest event that is there."""
        return int(self.state[0]["first_event"])

    def drain(self) -> tuple[int, list[Change]]:
        """Takes the oldest events. Returns the number of the first, and the events. One thread at a time may call
        this."""
        out = np.zeros((DRAINED, int(self.state[0]["event_words"])), np.int64)
        events = out[: entries.drain(at(self.state), at(out), DRAINED)]
        return int(events[0, 0]) if len(events) else self.first, [self._change(each) for each in events]

    def _change(self, words: np.ndarray[Any, np.dtype[np.int64]]) -> Change:
        _, kind, node, parent, key, begin, end, priority = words[:EVENT_WORDS].tolist()
        if key not in self.names:
            self.names = {number: names for names, (number, _tenant) in self.keys.copy().items()}
        ids = words[EVENT_WORDS : EVENT_WORDS + end - begin].copy()
        return Change(KINDS[kind], node, parent, self.names[key], begin, ids, priority)
