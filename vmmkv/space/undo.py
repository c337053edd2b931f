"""What takes back the steps of an operation that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self, TypeVarTuple

from ..errors import VmmkvError
from ..memory.monitor import is_own

Arguments = TypeVarTuple("Arguments")


class Undo:
    """Around steps that happen together or not at all. Each pushes what takes it back; where one fails, these run, the
    last one first.

    What the driver does not take back either stays as it is: mapped, in the books, and nobody's. Who is interrupted
    (Ctrl-C) takes nothing back here, since books are worked out anew then.
    """

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: list[tuple[Callable[..., object], tuple[object, ...]]] = []

    def push(self, step: Callable[[*Arguments], object], *arguments: *Arguments) -> None:
        """Has a step taken back so."""
        self._steps.append((step, arguments))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        while is_own(error) and self._steps:
            step, arguments = self._steps.pop()
            try:
                step(*arguments)
            except VmmkvError as failure:
                if not is_own(failure):
                    raise
