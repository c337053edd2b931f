"""The process in which kernels are called, so that a fault is a finding and not the end.

On host memory the child forks for each call: it has imported torch and the kernel once, and a call that dies costs only
its own process. A process that has used a GPU cannot be forked: there the child makes the calls itself, and after a
fault the next call starts another. A child ends when its parent does.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe

import torch

from ..driver.driver import open_driver
from .answers import Answer, Verdict
from .probes import Caller, Request
from .targets import load

START = "import sys; fd, *sys.path = [*sys.argv[1:], '']; from vmmkv.testing.child import serve; serve(int(fd))"
CHECKING = "VMMKV_CHECKING"
"""A variable that children have: a script must not start a check again when one of them imports it."""
DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of `prctl`."""


class Child:
    """A child process, seen from its parent. It starts with the first request.

    Args:
        time_limit: seconds that a call may take, with the start of the process and the import of the kernel.
    """

    def __init__(self, time_limit: float) -> None:
        self.time_limit = time_limit
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Request) -> Answer:
        """Makes a call. Raises what has kept the child from making it: the kernel cannot be loaded, memory is short."""
        if self._process is None:
            self._start()
        try:
            self._connection.send(request)
            if not self._connection.poll(self.time_limit):
                self.close()
                return Answer(Verdict.HANGS, note=f"more than {self.time_limit:g} s")
            answer = self._connection.recv()
        except (EOFError, ConnectionError):
            return Answer(Verdict.FAULTS, note=describe(self.close()))
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Answer)
        if answer.verdict == Verdict.FAULTS and request.case.device != "cpu":
            self.close()
        return answer

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-c", START, str(theirs.fileno()), *sys.path]
            # What a kernel prints must not be taken for what the parent prints.
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdout=2, start_new_session=True, env=os.environ | {CHECKING: "1"}
            )

    def close(self) -> int:
        """Ends the child and what it has started, and returns its exit status, negative for a signal."""
        if self._process is None:
            return 0
        self._connection.close()
        status = self._process.poll()
        if status is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait() if status is None else status
        self._process = None
        return status


def describe(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"the process exits with {status}"


def serve(fd: int) -> None:
    """What the child does: answers requests until the parent closes the connection."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)  # a process with threads of OpenMP cannot be forked
    with Connection(fd) as connection:
        while True:
            try:
                request = connection.recv()
            except EOFError:
                return
            if request.case.device == "cpu":
                serve_forked(connection, request)
            else:
                connection.send(answer(request))


def serve_forked(connection: Connection, request: Request) -> None:
    """Answers a request in a process of its own, and says how that has died, if it has."""
    try:
        open_driver("cpu"), load(request.target)  # here, so that all is imported, and linked, once
    except Exception as error:
        connection.send(error)
        return
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
        connection.send(answer(request))
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        connection.send(Answer(Verdict.FAULTS, note=describe(status)))


def answer(request: Request) -> Answer | Exception:
    """Makes a call; what has kept it from being made is returned as well."""
    try:
        call: Callable[[Request], Answer] = getattr(Caller(load(request.target), request.case), request.name)
        return call(request)
    except Exception as error:
        return error
