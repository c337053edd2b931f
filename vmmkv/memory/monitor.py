"""A monitor: one operation at a time on a pool and all that lies on it, in whatever thread.

Invariants:
 1. `lock` is held wherever books are read or written, and `changing` wherever pages are mapped or unmapped; `changing`
    is taken first. So who maps ahead, or grows, holds it alone while the driver maps, with `running`, and others go on
    meanwhile. Who maps in need holds `door` before, through which who maps ahead has to go each time: it cannot keep
    others waiting for more than what it has begun.
 2. `inside`, of which each thread has its own, is held by an operation, before it takes `lock` without `changing`:
    nobody may come between who waits for `changing` then. All locks are given back by the interpreter
    itself, which an interruption cannot prevent. Who finds it held comes in the middle of an operation of the same
    thread, from a finalizer, say: so it asks before it waits for anybody, who may be waiting for that operation.
 3. `is_dirty` stays set unless an operation has ended, with a result or with an error of its own, and `is_unfinished`
    from where one gave up `lock` to where it has it again. The next one that holds `changing` has the books worked out
    anew before it looks at them.

Who holds what:

    operation      `door`, `changing`, `lock`, `inside`, to its end
    stepwise       `door`, `changing`, `stepping`, to its end; `lock`, `inside` between calls, `running` in them
    bookkeeping    `inside`, `lock`, to its end
    the mapper     `changing`, behind `door`, for a change; `running` all the while; `lock`, `inside` to plan and commit
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from ..errors import BusyError, VmmkvError

OWN_ERRORS = VmmkvError, ValueError, TypeError
"""What operations raise themselves, with the books as before, but for `BusyError`."""


def is_own(error: BaseException | None) -> bool:
    """Whether it is an operation's own error. A refusal is not: a signal handler that lets it through has come at any
    line of the operation, and interrupts that."""
    return isinstance(error, OWN_ERRORS) and not isinstance(error, BusyError)


class _Own(threading.local):
    """What each thread has."""

    def __init__(self) -> None:
        self.inside, self.stepping = threading.Lock(), threading.Lock()


class Monitor:
    """Locks, and whether the books can be trusted."""

    def __init__(self) -> None:
        self.check: Callable[[], None] | None = None
        """With debugging: checks the books, after each operation."""
        self.reset()

    def reset(self) -> None:
        """Starts anew, in a forked child: whoever held a lock is not there."""
        self.lock, self.changing, self.door = threading.RLock(), threading.RLock(), threading.RLock()
        self._own = _Own()
        self.running = threading.Lock()
        """Held in the middle of a change, by who holds `changing`: nobody else may change anything in this thread."""
        self.is_dirty = self.is_unfinished = False
        self.turn = 0
        """The number of the operation that has the books: what one has found there holds in the next one, too."""

    @property
    def inside(self) -> threading.Lock:
        """This thread's own: held in the middle of an operation."""
        return self._own.inside

    @property
    def is_mine(self) -> bool:
        """Whether this thread is in the middle of an operation, so that to wait for its end is to wait for ever."""
        return self._own.inside.locked() or self._own.stepping.locked()

    @property
    def stepping(self) -> threading.Lock:
        """This thread's own: held in an operation that makes calls which others need not wait for, also between it and
        such a call."""
        return self._own.stepping

    def check_outside(self, name: str, changing: bool = False) -> None:
        """Raises `BusyError` in the middle of another operation of this thread; if it is to map or unmap, and holds
        `changing`, also in the middle of a change."""
        own = self._own
        if own.inside.locked() or (changing and (self.running.locked() or own.stepping.locked())):
            raise BusyError(
                f"{name.strip('_')} was called in the middle of another operation of this thread on the same memory, "
                "as by a finalizer or a signal handler. Leave a note there and call it later"
            )

    def verify(self) -> None:
        """Has the books checked, where that is wanted, but not in the middle of a change. Who calls holds the lock."""
        if self.check and not self.running.locked() and not self.is_unfinished:
            self.check()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around what another thread than users' does to the books, which holds the lock."""
        with self.inside:
            self.is_dirty = True
            self.turn += 1
            yield
            self.is_dirty = False


class Monitored(Protocol):
    """Whose operations those of a pool's monitor are."""

    @property
    def monitor(self) -> Monitor: ...

    def recover(self) -> None:
        """Makes the books right after an interruption, or forbids all use."""


class User(Protocol):
    """What has operations: what lies on a pool."""

    @property
    def pool(self) -> Monitored: ...

    def check_usable(self) -> None:
        """Raises what forbids any use."""


Owner = TypeVar("Owner", bound=User)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Method = Callable[Concatenate[Owner, Parameters], Result]
Steps = Generator[Callable[[], None], None, Result]
"""What an operation does: it yields calls of the driver that others need not wait for, as `stepwise` says."""


def operation(method: Method[Owner, Parameters, Result]) -> Method[Owner, Parameters, Result]:
    """Makes a method one operation, which may map and unmap pages."""

    @functools.wraps(method)
    def run(self: Owner, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        monitor = self.pool.monitor
        monitor.check_outside(method.__name__)
        with monitor.door, monitor.changing, monitor.lock:
            monitor.check_outside(method.__name__, changing=True)
            with monitor.inside:
                _recover(self)
                self.check_usable()
                return _attempt(monitor, method, self, *args, **kwargs)

    return run


def stepwise(method: Method[Owner, Parameters, Steps[Result]]) -> Method[Owner, Parameters, Result]:
    """Makes a generator one operation, which maps pages. What it yields is called without `lock`: others look at the
    books meanwhile, and grow inside their pages. Books are right then, but for what is in doubt; what it knew of them
    it looks at again.

    Who is interrupted ends nothing: a generator must leave nothing to be done by `finally`.
    """

    @functools.wraps(method)
    def run(self: Owner, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        monitor = self.pool.monitor
        monitor.check_outside(method.__name__)
        with monitor.door, monitor.changing:
            monitor.check_outside(method.__name__, changing=True)
            inside, steps = monitor.inside, None
            with monitor.stepping:
                while True:
                    with monitor.lock, inside:
                        if steps is None or monitor.is_dirty:  # somebody was interrupted: it begins again
                            _recover(self)
                            self.check_usable()
                            steps = method(self, *args, **kwargs)
                        step, result = _attempt(monitor, _next, monitor, steps)
                    if step is None:
                        return result  # type: ignore[return-value]
                    with monitor.running:
                        step()

    return run


def _next(monitor: Monitor, steps: Steps[Result]) -> tuple[Callable[[], None] | None, Result | None]:
    """The next call of an operation, or its result."""
    monitor.is_unfinished = False
    try:
        step = next(steps)
    except StopIteration as end:
        return None, end.value
    monitor.is_unfinished = True
    return step, None


def at_once(steps: Steps[Result]) -> Result:
    """Does all of it in the middle of an operation, for which others wait."""
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        step()


def _recover(owner: User) -> None:
    """Has the books worked out anew, where somebody was interrupted."""
    monitor = owner.pool.monitor
    if monitor.is_dirty or monitor.is_unfinished:
        monitor.is_dirty = True
        monitor.turn += 1
        owner.pool.recover()
        monitor.is_unfinished = False


def bookkeeping(method: Method[Owner, Parameters, Result]) -> Method[Owner, Parameters, Result]:
    """Makes a method one operation, which maps and unmaps nothing: it does not wait for who maps ahead."""
    whole = operation(method)

    @functools.wraps(method)
    def run(self: Owner, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        monitor = self.pool.monitor
        monitor.check_outside(method.__name__)
        with monitor.inside, monitor.lock:  # in this order: who has `lock` alone must not be made to wait for others
            if not monitor.is_dirty:
                self.check_usable()
                return _attempt(monitor, method, self, *args, **kwargs)
        return whole(self, *args, **kwargs)

    return run


def _attempt(
    monitor: Monitor, method: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    outside = sys.exception()
    monitor.is_dirty = True
    monitor.turn += 1
    try:
        result = method(*args, **kwargs)
    except OWN_ERRORS as error:
        monitor.is_dirty = not is_own(error) or _was_interrupted(error, outside)
        if not monitor.is_dirty:
            monitor.verify()
        raise
    monitor.verify()
    monitor.is_dirty = False
    return result


def _was_interrupted(error: BaseException, outside: BaseException | None) -> bool:
    """Whether an error came while another was handled that is none of our own, nor one that it says in our words
    (`raise ... from`); `outside` was there before."""
    context = error.__context__
    if context is None or context is outside:
        return False
    is_said = error.__suppress_context__ and isinstance(context, Exception)
    return not (is_said or is_own(context)) or _was_interrupted(context, outside)
