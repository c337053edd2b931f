"""How a model attends while somebody uses it: as before once the last of them is done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet


class BorrowedAttention:
    """Has models run one `attn_implementation` for those who need it. Threads may begin and end with one model.

    Args:
        name: of the `attn_implementation`.
        clear: called with a model that nobody uses any more.
    """

    def __init__(self, name: str, clear: Callable[[Any], None]) -> None:
        self._name, self._clear = name, clear
        self._lock = threading.RLock()
        """Of the two tables below."""
        self._before: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        """How models attend otherwise."""
        self._users: WeakKeyDictionary[Any, WeakSet[object]] = WeakKeyDictionary()

    def borrow(self, model: Any, user: object) -> None:
        """Has a model attend so, until this user gives it back, and all others."""
        with self._lock:
            before = model.config._attn_implementation
            if before != self._name:
                model.set_attn_implementation(self._name)
                self._before[model] = before
            self._users.setdefault(model, WeakSet()).add(user)

    def give_back(self, model: Any, user: object) -> None:
        """Has a model attend as before, unless others use it; of who has it no more, it changes nothing."""
        with self._lock:
            users = self._users.get(model, WeakSet())
            users.discard(user)
            if not users and (before := self._before.pop(model, None)):
                model.set_attn_implementation(before)
                self._clear(model)
