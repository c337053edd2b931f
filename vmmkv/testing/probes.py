"""The calls of a check: each gives the kernel rows of one awkward kind. They run in a child process (see `child`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .answers import Answer, Case, Verdict, compare, reference
from .rows import Maker, Rows

TILES = (16, 32, 64, 128, 256)
"""Tokens that kernels work on at a time."""
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Any]


class Request(NamedTuple):
    """One call of a check.

    Attributes:
        target: the kernel, by name (see `targets.load`).
        name: of the probe.
        power: the power of two that offsets, in bytes, are beyond, for those of far apart rows.
        extra: tokens that are mapped behind each end.
    """

    target: str
    case: Case
    name: str
    power: int = 0
    extra: int = 0


class Probe(NamedTuple):
    """Rows of one kind.

    Attributes:
        rows: what they are, for the report.
        finding: what a kernel does that does not answer right.
        needs: probes without whose right answer this one says nothing.
        run: makes the call.
    """

    rows: str
    finding: str
    needs: tuple[str, ...]
    run: Callable[[Caller, Request], Answer]


class Caller:
    """Calls a kernel on rows and holds its output against float64."""

    def __init__(self, kernel: Kernel, case: Case) -> None:
        self.kernel, self.case, self.make = kernel, case, Maker(case)
        self.on_gpu = self.make.device.type == "cuda"
        self._kept: list[torch.Tensor] = []

    def query(self, batch: int) -> torch.Tensor:
        return self.make.noise(batch, self.case.queries, self.case.heads, self.case.head_dim)

    def lengths(self, lengths: Sequence[int]) -> torch.Tensor:
        """Lengths on the device. They live as long as this: a kernel may know a tensor again by its address."""
        self._kept.append(torch.tensor(lengths, dtype=torch.int32, device=self.make.device))
        return self._kept[-1]

    def call(self, rows: Rows) -> Answer:
        """The answer to one call."""
        q, lengths = self.query(len(rows.lengths)), self.lengths(rows.lengths)
        return self.judge(lambda: self.kernel(q, rows.k, rows.v, lengths), q, rows)

    def judge(self, run: Callable[[], Any], q: torch.Tensor, rows: Rows) -> Answer:
        """The answer of what `run` returns, or raises."""
        expected = reference(q, *rows.values, rows.lengths)
        self.make.driver.synchronize()
        try:
            out = run()
            self.synchronize()
        except Exception as error:
            lines = str(error).splitlines() or [""]
            lost = self.is_lost()
            return Answer(Verdict.FAULTS if lost else Verdict.REFUSES, note=f"{type(error).__name__}: {lines[0]}")
        return compare(out, expected, rows.lengths, self.case.tolerance)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.make.device)

    def is_lost(self) -> bool:
        """Whether the device's context has ended: after a fault nothing works in it."""
        try:
            self.synchronize()
        except Exception:
            return True
        return False


def some_lengths(tokens: int) -> list[int]:
    """1, 2, tiles and one token more and less, as far as there are so many tokens."""
    return sorted({length for tile in (1, *TILES) for length in (tile - 1, tile, tile + 1) if 0 < length <= tokens})


def plain(caller: Caller, _: Request) -> Answer:
    return caller.call(caller.make.strided([caller.make.whole] * 2, caller.make.whole))


def ragged(caller: Caller, _: Request) -> Answer:
    tokens = caller.case.tokens
    return caller.call(caller.make.strided([tokens, *some_lengths(tokens)], tokens))


def empty(caller: Caller, _: Request) -> Answer:
    tokens = caller.case.tokens
    return caller.call(caller.make.strided([0, tokens, 0, 1], tokens))


def nan_behind(caller: Caller, _: Request) -> Answer:
    tokens = caller.case.tokens
    return caller.call(caller.make.strided(some_lengths(tokens), tokens + 1, behind=torch.nan))


def end(caller: Caller, request: Request) -> Answer:
    """The worst of the answers to all lengths."""
    rows = caller.make.ending(some_lengths(caller.case.tokens), request.extra)
    right = Answer(Verdict.RIGHT, 0.0)
    for each in rows:
        for view, value in zip((each.k, each.v), each.values):
            view[:, : each.lengths[0]] = value
        answer = caller.call(each)
        if answer.verdict != Verdict.RIGHT:
            return answer._replace(note=f"length {each.lengths[0]}: {answer.note}" if answer.note else "")
        right = max(right, answer, key=lambda each: each.error or 0.0)
    return right


def token_strides(caller: Caller, _: Request) -> Answer:
    whole, width = caller.make.whole, caller.make.width
    return caller.call(caller.make.strided([whole] * 2, whole, [(whole * 3 * width, 3 * width)] * 2))


def v_strides(caller: Caller, _: Request) -> Answer:
    whole, width = caller.make.whole, caller.make.width
    return caller.call(caller.make.strided([whole] * 2, whole, [None, (whole * 3 * width, 3 * width)]))


def row_strides(caller: Caller, _: Request) -> Answer:
    whole, width = caller.make.whole, caller.make.width
    return caller.call(caller.make.strided([whole] * 3, whole, [((whole + 5) * width, width)] * 2))


def far_tokens(caller: Caller, request: Request) -> Answer:
    return caller.call(caller.make.far(request.power, False, request.extra))


def far_rows(caller: Caller, request: Request) -> Answer:
    return caller.call(caller.make.far(request.power, True, request.extra))


def read_only(caller: Caller, request: Request) -> Answer:
    return caller.call(caller.make.read_only(2, request.extra))


def replay(caller: Caller, _: Request) -> Answer:
    """Other lengths in the same tensor: in a CUDA graph that was captured before, or, on the host, in a second call."""
    tokens = caller.case.tokens
    before, after = [tokens, 1, tokens // 2], [1, tokens, tokens // 2 + 1]
    rows = caller.make.strided([tokens] * 3, tokens)
    q, lengths = caller.query(3), caller.lengths(before)

    def run() -> Any:
        again, out = record(lambda: caller.kernel(q, rows.k, rows.v, lengths)) if caller.on_gpu else (None, None)
        if again is None:
            caller.kernel(q, rows.k, rows.v, lengths)
        lengths.copy_(caller.lengths(after))
        if again is None:
            return caller.kernel(q, rows.k, rows.v, lengths)
        again()
        return out

    return caller.judge(run, q, rows._replace(lengths=after))


def record(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Captures a call as a CUDA graph: what replays it, and its output."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles, allocates, and plans
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = call()
    return graph.replay, out


BASIC = ("plain",)
RAGGED = ("plain", "ragged")
PROBES = {
    "plain": Probe("dense rows of one length", "fails on ordinary rows", (), plain),
    "ragged": Probe("ragged lengths, tiles ± 1 token", "fails on ragged lengths", BASIC, ragged),
    "empty": Probe("lengths of 0 between others", "fails on lengths of 0", RAGGED, empty),
    "nan": Probe("NaN behind every length", "lets NaN behind lengths through", RAGGED, nan_behind),
    "end": Probe("no page behind the last token", "reads past the end", RAGGED, end),
    "tokens": Probe("strides of tokens", "ignores strides of tokens", BASIC, token_strides),
    "v": Probe("other strides in V than in K", "ignores strides of V", ("plain", "tokens"), v_strides),
    "rows": Probe("strides of rows", "ignores strides of rows", BASIC, row_strides),
    "far-tokens": Probe("tokens that lie gigabytes apart", "wraps tokens at 32 bits", ("plain", "tokens"), far_tokens),
    "far-rows": Probe("rows that lie gigabytes apart", "wraps rows at 32 bits", ("plain", "tokens", "rows"), far_rows),
    "read-only": Probe("read-only rows", "writes to K or V", BASIC, read_only),
    "replay": Probe("lengths that change in place", "keeps lengths of an earlier call", RAGGED, replay),
}
"""By name, in the order in which they are run."""
