"""Interruptions for tests: KeyboardInterrupt at any line of vmmkv's own code, or at any moment."""

from __future__ import annotations

import ast
import functools
import gc
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import vmmkv

SOURCES = str(Path(vmmkv.__file__).parent)


class Interruption(KeyboardInterrupt):
    """One of a test's own."""


@functools.cache
def with_lines(path: str) -> frozenset[int]:
    """Lines of `with` statements. Their ends are traced as well, where no interruption can come: the interpreter calls
    `__exit__` without looking at signals."""
    tree = ast.parse(Path(path).read_text())
    return frozenset(node.lineno for node in ast.walk(tree) if isinstance(node, ast.With))


def interrupted(operation: Callable[[], object], line: int) -> int | None:
    """Runs an operation and interrupts it at the n-th line of vmmkv that it comes to.

    Returns:
        None; of an operation that is shorter, its lines.
    """
    left = line
    entered: dict[int, set[int]] = {}  # by a frame's id: to hold frames would keep alive what they hold

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        path = frame.f_code.co_filename
        if not path.startswith(SOURCES):
            return None
        if event == "call":
            entered[id(frame)] = set()
        elif event == "line":
            seen = entered[id(frame)]
            ends = frame.f_lineno in with_lines(path) and frame.f_lineno in seen
            seen.add(frame.f_lineno)
            if not ends:
                left -= 1
                if left == 0:
                    raise Interruption
        return trace

    before = sys.gettrace()
    gc.disable()  # what it collects is another's, and interrupted there for nothing
    sys.settrace(trace)
    try:
        operation()
    except Interruption:
        pass
    finally:
        sys.settrace(before)
        gc.enable()
    error = sys.exc_info()[1]  # Python takes it for handled still, where the interrupt came as an `except` ended
    while error:
        error.__traceback__, error = None, error.__context__  # whose frames hold what was interrupted
    return line - left if left > 0 else None


def interrupted_after(operation: Callable[[], object], seconds: float) -> bool:
    """Runs an operation and interrupts it by a real signal, which comes at whatever moment; returns whether it came."""

    is_over = False

    def ring(*_: object) -> None:
        if not is_over:
            raise KeyboardInterrupt

    def report(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is not KeyboardInterrupt:  # Python drops one that comes in a finalizer
            hook(unraisable)

    signal.signal(signal.SIGALRM, ring)  # it stays: a signal that comes late, to another thread, ends no process
    hook, sys.unraisablehook = sys.unraisablehook, report
    gc.disable()  # as above
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        operation()
        is_over = True
    except KeyboardInterrupt:
        return True
    finally:
        is_over = True  # also of what has failed: nothing is to hide that
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = hook
        gc.enable()
    return False
