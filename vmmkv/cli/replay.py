"""Continuous batching over a cache: requests arrive, grow token by token, finish, and leave their pages.

K and V are written for real, and ordinary attention on the rows is compared with a float64 reference. What a
token's K and V are follows from a table and a hash of its sequence and position, so that the reference never
looks at the cache: a page that went to the wrong place shows as a wrong answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from .. import KVCache, OutOfPagesError, Sequence
from ..errors import InvariantError
from ..schemes import allocated_bytes
from ..workload import Request

TABLE_SIZE = 4093
GROUP = 4
"""Query heads per KV head."""


@dataclass
class Running:
    """A request that has a sequence."""

    request: Request
    sequence: Sequence
    generated: int


@dataclass
class Replay:
    """Replays `requests` on `cache`, as many at a time as it has rows and pages for.

    Attributes:
        steps: decode steps so far.
        preemptions: sequences that were freed to make room, to be computed again.
        lengths: per step the lengths of all running sequences.
        waste: per step the waste that the cache reports of itself.
        max_error: the worst attention error, |out - reference| / |reference|.
        page_maps: `(step, KVCache.page_map())` at regular steps.
    """

    cache: KVCache
    requests: deque[Request]
    check_every: int
    rng: np.random.Generator
    steps: int = 0
    preemptions: int = 0
    checks: int = 0
    max_error: float = 0.0
    lengths: list[npt.NDArray[np.int64]] = field(default_factory=list)
    waste: list[float] = field(default_factory=list)
    page_maps: list[tuple[int, npt.NDArray[np.int64]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        layout = self.cache.layout
        (heads,), (width,) = (
            {layer.num_kv_heads for layer in layout.layers},
            {layer.k_head_dim for layer in layout.layers},
        )
        generator = torch.Generator().manual_seed(int(self.rng.integers(2**31)))
        self._table = torch.randn(TABLE_SIZE, layout.num_layers, 2, heads, width, generator=generator)
        self._table = self._table.to(layout.dtype).to(self.cache.device)
        self._running: list[Running] = []
        self._waiting = deque((request, 0) for request in self.requests)

    def run(self) -> Iterator[int]:
        """Runs to the end; yields how many requests have finished after each step."""
        finished = 0
        while self._waiting or self._running:
            self._admit()
            self._decode()
            self._observe()
            done = [running for running in self._running if running.generated >= running.request.output]
            self._running = [running for running in self._running if running.generated < running.request.output]
            self.cache.free([running.sequence for running in done])
            finished += len(done)
            yield finished
        self.cache.check()

    def _admit(self) -> None:
        """Starts waiting requests, in order, while there are rows and pages."""
        while self._waiting and len(self._running) < self.cache.max_sequences:
            request, generated = self._waiting[0]
            try:
                sequence = self.cache.sequence(request.prompt + generated)
            except OutOfPagesError:
                if not self._running:
                    raise
                return
            self._waiting.popleft()
            self._running.append(Running(request, sequence, generated))
            positions = torch.arange(sequence.length, device=self.cache.device)
            records = self._records(sequence.number, positions)
            for layer in range(self.cache.layout.num_layers):
                sequence.write(layer, records[:, layer, 0], records[:, layer, 1])

    def _decode(self) -> None:
        """One more token for every running sequence; the newest make room where pages are short."""
        while True:
            try:
                self.cache.extend([running.sequence for running in self._running], 1)
                break
            except OutOfPagesError:
                if len(self._running) == 1:
                    raise
                victim = self._running.pop()
                victim.sequence.free()
                self._waiting.appendleft((victim.request, victim.generated))
                self.preemptions += 1
        device = self.cache.device
        numbers, rows, positions = (
            torch.tensor(values, device=device)
            for values in zip(*((r.sequence.number, r.sequence.row, r.sequence.length - 1) for r in self._running))
        )
        records = self._records(numbers, positions)
        for layer in range(self.cache.layout.num_layers):
            k, v = self.cache.kv(layer)
            k[rows, positions] = records[:, layer, 0]
            v[rows, positions] = records[:, layer, 1]
        for running in self._running:
            running.generated += 1

    def _observe(self) -> None:
        """Takes down what is live; at regular steps checks the books and the attention."""
        lengths = np.array([running.sequence.length for running in self._running])
        self.lengths.append(lengths)
        self.steps += 1
        if self.steps % self.check_every and self.steps > 1:
            return
        stats = self.cache.stats()
        self.waste.append(stats.waste)
        self.page_maps.append((self.steps, self.cache.page_map()))
        expected = allocated_bytes(
            "vmmkv", self.cache.layout, lengths, self.cache.max_seq_len, self.cache.page_size
        ).sum()
        if stats.pages["used"] * self.cache.page_size != expected:
            raise InvariantError(
                f"step {self.steps}: {stats.pages['used']} pages are used; the tokens need {expected} bytes"
            )
        self.cache.check()
        for index in self.rng.choice(len(self._running), min(4, len(self._running)), replace=False):
            layer = int(self.rng.integers(self.cache.layout.num_layers))
            self.max_error = max(self.max_error, self._attention_error(self._running[index].sequence, layer))
            self.checks += 1

    def _attention_error(self, sequence: Sequence, layer: int) -> float:
        """Relative error of attention of one random query over a sequence's row, against float64."""
        k, v = (view.transpose(0, 1).unsqueeze(0) for view in (sequence.k(layer), sequence.v(layer)))
        q = torch.randn(1, GROUP * k.shape[1], 1, k.shape[3]).to(k)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        positions = torch.arange(sequence.length, device=k.device)
        records = self._records(sequence.number, positions)[:, layer].double()
        wide_k, wide_v = (records[:, which].transpose(0, 1).repeat_interleave(GROUP, 0) for which in (0, 1))
        weights = (q[0].double() @ wide_k.transpose(1, 2) / k.shape[3] ** 0.5).softmax(-1)
        reference = weights @ wide_v
        return float((out[0].double() - reference).norm() / reference.norm())

    def _records(self, number: int | torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """K and V of tokens, `[tokens, layers, 2, heads, width]`."""
        return self._table[(number * 2_654_435_761 ^ positions * 40_503) % TABLE_SIZE]
