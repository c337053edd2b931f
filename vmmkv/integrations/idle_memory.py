"""Memory that nobody has asked for in a while goes back to the system, once."""

from __future__ import annotations

import time
from collections.abc import Callable


class IdleMemory:
    """See above.

    Args:
        seconds: how long a while is.
        give_back: gives the memory back.
        clock: says how late it is, in seconds.
    """

    def __init__(
        self, seconds: float, give_back: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds, self._give_back, self._clock = seconds, give_back, clock
        self._since: float | None = None
        """Since when there is nothing to do; None: there is, infinity: memory has gone back."""

    def note(self, is_busy: bool) -> None:
        """Takes whether there is something to do, as often as somebody knows."""
        if is_busy:
            self._since = None
        elif self._since is None:
            self._since = self._clock()
        elif self._clock() - self._since > self._seconds:
            self._since = float("inf")
            self._give_back()
