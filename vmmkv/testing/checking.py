"""check_attention: which awkward rows a kernel reads right, the report, and the process that calls the kernel."""

from __future__ import annotations

import ctypes
import os
import resource
import secrets
import signal
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple

import torch

from ..driver.driver import open_driver
from ..errors import ArgumentError, DtypeError
from .answers import TOLERANCES, Answer, Case, Verdict
from .probes import PROBES, Caller, Request
from .rows import SLACK, SPREAD
from .targets import load, name_of

START = "import sys; fd, *sys.path = [*sys.argv[1:], '']; from vmmkv.testing.checking import serve; serve(int(fd))"
CHECKING = "VMMKV_CHECKING"
"""A variable that children have: a script must not start a check again when one of them imports it."""
DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of `prctl`."""
BAD = Verdict.WRONG, Verdict.FAULTS, Verdict.HANGS
NEAR = 30
"""The power of two of the nearest of far apart rows: their offsets, in bytes, are below 2**31."""
FAR = "far_tokens", "far_rows"
MOST_BYTES = 1 << 13
"""Of K and V of a token: far apart tokens lie closely in one frame, which has to fit between two of them."""


class Finding(NamedTuple):
    """What a kernel does on rows of one kind.

    Attributes:
        probe: the kind.
        rows: what is awkward about the rows.
        verdict: what came of it.
        error: how far the output is off, relative to the largest number of the right one; None where it is unknown, and
            where the output holds NaN or infinity.
        finding: what the kernel does that it should not do; empty where it answers right, refuses, or was not run.
        note: details, as the message of an error.
    """

    probe: str
    rows: str
    verdict: Verdict
    error: float | None
    finding: str
    note: str


class Report(NamedTuple):
    """What a kernel does on awkward rows. `print` shows a table.

    Attributes:
        kernel: its name.
        case: what it was called with.
        findings: one for each kind of rows.
        overread: tokens that must be mapped behind each length, as in `KVCache(overread=...)`; None if it is not known,
            or more than 1,024.
    """

    kernel: str
    case: Case
    findings: list[Finding]
    overread: int | None

    @property
    def faults(self) -> list[str]:
        """Everything that the kernel does and should not do."""
        return [each.finding for each in self.findings if each.finding]

    @property
    def right(self) -> bool:
        """Whether the kernel reads ordinary rows right, and all others right or not at all."""
        return self.findings[0].verdict == Verdict.RIGHT and not self.faults

    def lines(self) -> list[tuple[str, str, str]]:
        """The cells of a table: rows, what came of them, what that means."""
        told = ["; ".join(filter(None, (each.finding, each.note))) for each in self.findings]
        return [(each.rows, shown(each), meaning) for each, meaning in zip(self.findings, told)]

    def __str__(self) -> str:
        return "\n".join(f"{rows:<32}  {answer:<12}  {meaning}".rstrip() for rows, answer, meaning in self.lines())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        case = self.case._asdict() | {"dtype": str(self.case.dtype).removeprefix("torch.")}
        return self._asdict() | {"case": case, "findings": [each._asdict() for each in self.findings]}


def shown(finding: Finding) -> str:
    """A verdict, and how far a wrong output is off."""
    if finding.verdict != Verdict.WRONG or finding.error is None:
        return str(finding.verdict)
    return f"wrong by {finding.error:.0%}" if finding.error < 9.995 else f"wrong by {finding.error:.0e}"


def check_attention(
    kernel: str | Callable[..., Any],
    *,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    heads: int = 4,
    kv_heads: int | None = None,
    head_dim: int = 64,
    queries: int = 1,
    tokens: int = 257,
    tolerance: float | None = None,
    seed: int | None = None,
    time_limit: float = 300.0,
) -> Report:
    """Calls an attention kernel on rows of every awkward kind, and says what it does with them.

    The kernel is called as `kernel(q, k, v, lengths) -> out`:

    - `q`: `[batch, queries, heads, head_dim]`, contiguous.
    - `k`, `v`: `[batch, tokens, kv_heads, head_dim]`, views with any strides of rows and of tokens, each with its own;
      `heads / kv_heads` neighbouring query heads share a KV head. They are not to be written.
    - `lengths`: int32 `[batch]` on the same device. Sequence `i` has the tokens `k[i, :lengths[i]]`. What lies behind
      them may be anything, or not be mapped.
    - `out`: a tensor like `q`. Each query sees all tokens of its sequence, there is no causal mask:
      `softmax(q @ k.T / sqrt(head_dim)) @ v`, and zeros where the length is 0.

    All calls are made in a child process, which imports the kernel by its name. It needs a few MiB of memory: where
    tokens are gigabytes apart, one piece of memory lies under all of their addresses.

    Args:
        kernel: a function at the top level of a module; or its name, `"package.module:function"` or
            `"file.py:function"`; or one of `vmmkv.testing.TARGETS`, as `"sdpa-math"`.
        device: `"cuda"`, `"cuda:1"` or `"cpu"`; None takes CUDA where there is a GPU.
        dtype: of Q, K and V; None: bf16 on a GPU, fp32 on the host.
        kv_heads: None: as many as `heads`.
        queries: of each sequence.
        tokens: of the longest sequence. 257 is one more than the largest tile that is usual.
        tolerance: the error that is rounding, relative to the largest number of the right output; None: 1e-3 for fp32,
            5e-3 for fp16, 2e-2 for bf16.
        seed: of all numbers; None: a new one, which the report names.
        time_limit: seconds that one call may take, with the start of its process.

    Returns:
        The report.

    Raises:
        ArgumentError: another process cannot import the kernel, or a number does not fit. Or the kernel's module
            calls this when it is imported: a script does so under `if __name__ == "__main__"`.
        DtypeError: the dtype is not fp64, fp32, fp16 or bf16.
        DeviceError: there is no such device.
    """
    if CHECKING in os.environ:
        raise ArgumentError(
            "called while a check imports the kernel's module; put it under `if __name__ == '__main__'`"
        )
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    if dtype not in TOLERANCES:
        raise DtypeError(f"asked for Q, K and V as {dtype}; the checker knows {', '.join(map(str, TOLERANCES))}")
    kv_heads = kv_heads or heads
    if min(heads, kv_heads, head_dim, queries) < 1 or heads % kv_heads or tokens < 4:
        raise ArgumentError(
            f"got heads={heads}, kv_heads={kv_heads}, head_dim={head_dim}, queries={queries}, tokens={tokens}; heads "
            "must be a multiple of kv_heads, tokens at least 4, and all positive"
        )
    if (record := 2 * kv_heads * head_dim * dtype.itemsize) > MOST_BYTES:
        raise ArgumentError(
            f"K and V of a token take {record} bytes; fewer heads, of {MOST_BYTES} bytes, find the same"
        )
    seed = secrets.randbits(32) if seed is None else seed
    case = Case(device, dtype, heads, kv_heads, head_dim, queries, tokens, tolerance or TOLERANCES[dtype], seed)
    with closing(Child(time_limit)) as child:
        return judge(child, name_of(kernel), case)


def judge(child: Child, target: str, case: Case) -> Report:
    """Makes all calls of a check in a child."""
    findings: dict[str, Finding] = {}
    overread: int | None = None
    for name, probe in PROBES.items():
        request = Request(target, case, name, extra=overread or 0)
        lacking = [each for each in probe.needs if findings[each].verdict != Verdict.RIGHT]
        finding = probe.finding
        if lacking:
            answer = Answer(Verdict.NOT_RUN, note=f"needs {PROBES[lacking[-1]].rows}")
        elif name == "end":
            answer, overread, finding = find_end(child, request, finding)
        elif name in FAR:
            answer, finding = find_wrap(child, request, finding)
        else:
            answer = child.ask(request)
        findings[name] = Finding(
            name, probe.rows, answer.verdict, answer.error, finding if answer.verdict in BAD else "", answer.note
        )
    return Report(target, case, [*findings.values()], overread)


def find_end(child: Child, request: Request, finding: str) -> tuple[Answer, int | None, str]:
    """The answer with nothing mapped behind the end, the fewest tokens that must be there for no fault, if they are at
    most `SLACK`, and the finding."""
    answer = child.ask(request)
    if answer.verdict != Verdict.FAULTS:
        return answer, 0 if answer.verdict == Verdict.RIGHT else None, "fails where the next page is not mapped"

    def faults(extra: int) -> bool:
        return child.ask(request._replace(extra=extra)).verdict == Verdict.FAULTS

    if faults(SLACK):
        return answer, None, f"{finding} by more than {SLACK:,} tokens"
    needed = 1 + bisect_left(range(1, SLACK), True, key=lambda extra: not faults(extra))
    return answer, needed, f"{finding} by up to {needed} token{'s' * (needed > 1)}: overread={needed}"


def find_wrap(child: Child, request: Request, finding: str) -> tuple[Answer, str]:
    """The answer for the nearest tokens, or rows, that are not read right, else for the farthest, and the finding."""
    size = request.case.dtype.itemsize.bit_length() - 1
    for power in sorted({NEAR, 31, 32, 31 + size, 32 + size}):
        answer = child.ask(request._replace(power=power))
        if answer.verdict != Verdict.RIGHT:
            break
    if answer.verdict == Verdict.RIGHT:
        answer = answer._replace(note=f"up to {SPREAD * 2 ** (power - 30):.0f} GiB")
    finding = f"{finding}: beyond 2^{power} bytes or 2^{power - size} elements"
    if power == NEAR:
        finding = "fails where gaps are large, below 2^31 bytes"
    return answer, finding


class Child:
    """The process in which kernels are called, so that a fault is a finding and not the end. It starts with the first
    request, and ends when its parent does.

    On host memory it forks for each call: it has imported torch and the kernel once, and a call that dies costs only
    its own process. A process that has used a GPU cannot be forked: there it makes the calls itself, and after a fault
    the next call starts another.

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
