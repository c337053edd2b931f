"""Which of the sequences that decode began with the same tokens, so that attention may read these once for all of them.

Sequences are in a group if the tokens that they found there when they began are the same, id by id. A group's are one
behind the other in a batch, whose kernel is told where each group begins: so a step's sequences are put in that order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .backend import Ids, Numbers

MOST = 16
"""Groups of a batch. Those that save less are read one by one."""
WORTH = 8
"""Of so many tokens that a batch reads groups must save one: else to read them apart takes longer."""


class Groups(NamedTuple):
    """Groups of a batch, from its first sequence on.

    Attributes:
        bounds: `[groups + 1]`, where each begins, and the last one ends.
        tokens: `[groups]`, the first ones that those of each have in common.
    """

    bounds: Numbers
    tokens: Numbers


class Beginnings:
    """What requests have begun with.

    Args:
        requests: how many there are.
    """

    def __init__(self, requests: int) -> None:
        self._numbers: dict[bytes, int] = {}
        self._of = np.full(requests, -1)
        """By request the number of what it began with; -1: nothing."""
        self._tokens = np.zeros(requests, np.int64)

    def note(self, request: int, ids: Ids) -> None:
        """Takes down which tokens were there when a request began, now or once more."""
        self._tokens[request] = len(ids)
        self._of[request] = self._numbers.setdefault(ids.tobytes(), len(self._numbers)) if len(ids) else -1

    def grouped(self, requests: Numbers, lengths: Numbers) -> tuple[Numbers, Groups | None]:
        """Requests, in an order in which groups come first, and these; None, and as they were, where they save little.

        Args:
            lengths: tokens that each reads.
        """
        numbers, firsts, counts = np.unique(self._of[requests], return_index=True, return_counts=True)
        tokens = self._tokens[requests[firsts]]
        saved = (counts - 1) * tokens * (numbers >= 0)
        best = np.argsort(-saved, kind="stable")[:MOST]
        best = best[saved[best] > 0]
        if saved[best].sum() * WORTH < max(lengths.sum(), 1):
            return requests, None
        places = np.full(self._of.max() + 2, len(best))  # its last is that of -1
        places[numbers[best]] = np.arange(len(best))
        order = np.argsort(places[self._of[requests]], kind="stable")
        return requests[order], Groups(np.append(0, counts[best].cumsum()), tokens[best])
