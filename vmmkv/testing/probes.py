"""The calls of a check: each gives the kernel rows of one awkward kind. They run in a child process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import StreamCaptureError
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


class Caller(Maker):
    """Calls a kernel on rows that it makes, and holds the output against float64."""

    def __init__(self, kernel: Kernel, case: Case) -> None:
        super().__init__(case)
        self.kernel = kernel
        self._kept: list[torch.Tensor] = []

    def inputs(self, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Q, and lengths, which live as long as this: a kernel may know a tensor again by its address."""
        self._kept.append(torch.tensor(lengths, dtype=torch.int32, device=self.device))
        return self.noise(len(lengths), self.case.queries, self.case.heads, self.case.head_dim), self._kept[-1]

    def call(self, rows: Rows) -> Answer:
        q, lengths = self.inputs(rows.lengths)
        return self.judge(lambda: self.kernel(q, rows.k, rows.v, lengths), q, rows)

    def judge(self, run: Callable[[], Any], q: torch.Tensor, rows: Rows) -> Answer:
        """The answer of what `run` returns, or raises."""
        expected = reference(q, *rows.values, rows.lengths)
        self.driver.synchronize()
        try:
            out = run()
            self.driver.synchronize()
        except Exception as error:
            verdict = Verdict.FAULTS if self.is_lost() else Verdict.REFUSES
            return Answer(verdict, note=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        return compare(out, expected, rows.lengths, self.case.tolerance)

    def is_lost(self) -> bool:
        """Whether the device's context has ended: after a fault nothing works in it."""
        try:
            self.driver.synchronize()
        except Exception as error:
            return not isinstance(error, StreamCaptureError)
        return False

    def some_lengths(self) -> list[int]:
        """1, 2, tiles and one token more and less, as far as a row has so many tokens."""
        near = {tile + step for tile in (1, *TILES) for step in (-1, 0, 1)}
        return sorted(length for length in near if 0 < length <= self.case.tokens)

    @property
    def gaps(self) -> tuple[int, int]:
        """Strides of rows and tokens with room for two more tokens behind each."""
        return 3 * self.whole * self.width, 3 * self.width

    def full_rows(self, k: tuple[int, int] | None, v: tuple[int, int] | None) -> Answer:
        """The answer to full rows with strides of rows and tokens, of K and of V; None: dense."""
        return self.call(self.strided([self.whole] * 3, self.whole, (k, v)))

    def plain(self, _: Request) -> Answer:
        return self.full_rows(None, None)

    def ragged(self, _: Request) -> Answer:
        return self.call(self.strided([self.case.tokens, *self.some_lengths()], self.case.tokens))

    def empty(self, _: Request) -> Answer:
        return self.call(self.strided([0, self.case.tokens, 0, 1], self.case.tokens))

    def nan(self, _: Request) -> Answer:
        return self.call(self.strided(self.some_lengths(), self.case.tokens + 1, behind=torch.nan))

    def tokens(self, _: Request) -> Answer:
        return self.full_rows(self.gaps, self.gaps)

    def v(self, _: Request) -> Answer:
        return self.full_rows(None, self.gaps)

    def rows(self, _: Request) -> Answer:
        return self.full_rows(*[((self.whole + 5) * self.width, self.width)] * 2)

    def far_tokens(self, request: Request) -> Answer:
        return self.call(self.far(request.power, False, request.extra))

    def far_rows(self, request: Request) -> Answer:
        return self.call(self.far(request.power, True, request.extra))

    def read_only(self, request: Request) -> Answer:
        return self.call(self.read_only_rows(request.extra))

    def end(self, request: Request) -> Answer:
        """The worst of the answers to sequences of some lengths."""
        worst = Answer(Verdict.RIGHT, 0.0)
        for rows in self.ending(self.some_lengths(), request.extra):
            for view, value in zip((rows.k, rows.v), rows.values):
                view[:, : rows.lengths[0]] = value
            answer = self.call(rows)
            if answer.verdict != Verdict.RIGHT:
                return answer._replace(note=f"length {rows.lengths[0]}{answer.note and f': {answer.note}'}")
            worst = max(worst, answer, key=lambda each: each.error or 0.0)
        return worst

    def replay(self, _: Request) -> Answer:
        """Lengths that change in their tensor: in a CUDA graph, or, on the host, before a second call."""
        tokens = self.case.tokens
        rows = self.strided([tokens] * 3, tokens)._replace(lengths=[1, tokens, tokens // 2 + 1])
        q, lengths = self.inputs([tokens, 1, tokens // 2])
        after = self.inputs(rows.lengths)[1]

        def call() -> Any:
            return self.kernel(q, rows.k, rows.v, lengths)

        def run() -> Any:
            if self.device.type == "cpu":
                call()
                lengths.copy_(after)
                return call()
            graph, out = record(call)
            lengths.copy_(after)
            graph.replay()
            return out

        return self.judge(run, q, rows)


def record(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Captures a call, and returns the graph and the output."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles, allocates, and plans
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = call()
    return graph, out


class Probe(NamedTuple):
    """Rows of one kind: their description, the finding where a kernel answers wrong, and the probes that it must answer
    right before this one is asked. The method of `Caller` with the probe's name makes the call."""

    rows: str
    finding: str
    needs: tuple[str, ...] = ()


PROBES = {
    "plain": Probe("dense rows of one length", "fails on ordinary rows"),
    "ragged": Probe("ragged lengths, tiles ± 1 token", "fails on ragged lengths", ("plain",)),
    "empty": Probe("lengths of 0 between others", "fails on lengths of 0", ("ragged",)),
    "nan": Probe("NaN behind every length", "lets NaN behind lengths through", ("ragged",)),
    "end": Probe("no page behind the last token", "reads past the end", ("ragged",)),
    "tokens": Probe("strides of tokens", "ignores strides of tokens", ("plain",)),
    "v": Probe("other strides in V than in K", "ignores strides of V", ("tokens",)),
    "rows": Probe("strides of rows", "ignores strides of rows", ("plain",)),
    "far_tokens": Probe("tokens that lie gigabytes apart", "wraps tokens at 32 bits", ("tokens",)),
    "far_rows": Probe("rows that lie gigabytes apart", "wraps rows at 32 bits", ("tokens", "rows")),
    "read_only": Probe("read-only rows", "writes to K or V", ("plain",)),
    "replay": Probe("lengths that change in place", "keeps lengths of an earlier call", ("ragged",)),
}
"""By name, in the order in which they are run."""
