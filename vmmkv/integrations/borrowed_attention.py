"""How a model attends while somebody uses it: as before once the last of them is done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet


class Loan:
    """The attention of a config, which has a name for it: so all models that share the config attend alike."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.before: str | None = None
        """How its models attend otherwise; None: nobody has told."""
        self.users: WeakSet[object] = WeakSet()
        """Of any of them."""


class BorrowedAttention:
    """Has models run one `attn_implementation` for those who need it. Threads may begin and end with one model.

    Args:
        name: of the `attn_implementation`.
        clear: called with a model that nobody uses any more.
    """

    def __init__(self, name: str, clear: Callable[[Any], None]) -> None:
        self._name, self._clear = name, clear
        self._lock = threading.RLock()
        """Of the loans."""
        self._loans: WeakKeyDictionary[Any, Loan] = WeakKeyDictionary()
        """By model; models that share a config share one."""
        self._alone: dict[object, Any] = {}
        """The configs of models that are to be left alone, and were, by who asks for that."""

    def borrow(self, model: Any, user: object) -> None:
        """Has a model attend so, until this user gives it back, and all others."""
        with self._lock:
            # First of all: who finds itself alone has not met what follows.
            for asking in [asking for asking, config in self._alone.items() if config is model.config]:
                del self._alone[asking]
            before = model.config._attn_implementation
            model.set_attn_implementation(self._name)
            loan = self._loans[model] = self._loan_of(model.config) or Loan(model.config)
            if before != self._name:
                loan.before = before
            loan.users.add(user)

    @contextmanager
    def left_alone(self, model: Any, refused: Exception) -> Iterator[None]:
        """Raises `refused` if somebody uses a model, or one of its config, or begins to meanwhile: masks that were made
        for one way to attend would meet the other."""
        asking = object()
        with self._lock:
            if self._loan_of(model.config) is not None:
                raise refused
            self._alone[asking] = model.config
        try:
            yield
        except Exception as error:
            if asking in self._alone:
                raise
            raise refused from error
        else:
            if asking not in self._alone:
                raise refused
        finally:
            with self._lock:
                self._alone.pop(asking, None)

    def give_back(self, model: Any, user: object) -> None:
        """Has a model attend as before, unless others use it; of who has it no more, it changes nothing."""
        with self._lock:
            if loan := self._loans.get(model):
                loan.users.discard(user)
                self._end_unused(loan)

    def restore(self, model: Any) -> None:
        """Has a model that nobody uses attend as before, also where it never was lent: a copy of one that was attends
        so, too. How it did before nobody knows, so it attends as it would if nobody had chosen."""
        with self._lock:
            loan = self._loan_of(model.config)
            if loan is None and model.config._attn_implementation == self._name:
                loan = self._loans[model] = Loan(model.config)
            if loan is not None:
                self._end_unused(loan)

    def _loan_of(self, config: Any) -> Loan | None:
        return next((loan for loan in self._loans.values() if loan.config is config), None)

    def _end_unused(self, loan: Loan) -> None:
        if loan.users:
            return
        for model in [model for model, its in self._loans.items() if its is loan]:
            del self._loans[model]
            model.set_attn_implementation(loan.before or model.get_correct_attn_implementation(None))
            self._clear(model)
