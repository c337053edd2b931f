"""Continuous batching over a cache: requests arrive, grow token by token, finish, and leave their pages.

K and V are written for real, and ordinary attention on the rows is compared with a float64 reference. The K and V of a
token follow from a table and a hash of its position and of its sequence. So the reference never reads the cache: a page
in the wrong place gives a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import KVCache, Sequence
from ..errors import InvariantError
from ..schemes import allocated_bytes
from ..workload import Request
from .batching import Batching

TABLE_SIZE = 4093
CHUNK = 1024
"""Tokens of a prompt that are written at a time."""
GROUP = 4
"""Query heads per KV head."""


@dataclass
class Replay:
    """Replays `requests` on `cache`, as many at a time as it has rows and pages for.

    Attributes:
        batching: the requests that run and that wait.
        lengths: per step the lengths of all running sequences.
        waste: at each check the waste that the cache reports of itself.
        max_error: the worst attention error, |out - reference| / |reference|.
        page_maps: at each check the step and `KVCache.page_map()`.
    """

    cache: KVCache
    requests: list[Request]
    check_every: int
    rng: np.random.Generator
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
        self._generator = torch.Generator().manual_seed(int(self.rng.integers(2**31)))
        self._table = torch.randn(TABLE_SIZE, layout.num_layers, 2, heads, width, generator=self._generator)
        self._table = self._table.to(layout.dtype).to(self.cache.device)
        self.batching = Batching(self.cache, self.requests, self.cache.max_sequences, self._start)

    def run(self, advance: Callable[[int], None]) -> None:
        """Runs to the end, and calls `advance` with the number of tokens whenever some were added."""
        self._advance = advance
        while self.batching.waiting or self.batching.running:
            self.batching.admit()
            self.batching.decode()
            sequences = [running.sequence for running in self.batching.running]
            last = [(each.number, each.row, each.length - 1) for each in sequences]
            self._write(*torch.tensor(last, device=self.cache.device).unbind(1))
            self._observe(sequences)
            advance(len(self.batching.running))
            self.batching.retire()
        self.cache.check()

    def _start(self, request: Request, generated: int) -> Sequence:
        """Starts a sequence and writes its prompt."""
        sequence = self.cache.sequence(request.prompt + generated)
        for positions in torch.split(torch.arange(sequence.length, device=self.cache.device), CHUNK):
            self._write(sequence.number, sequence.row, positions)
        self._advance(sequence.length)
        return sequence

    def _write(self, numbers: torch.Tensor | int, rows: torch.Tensor | int, positions: torch.Tensor) -> None:
        """Writes K and V of tokens, by the numbers and rows of their sequences."""
        records = self._table[self._indices(numbers, positions)]
        for layer in range(self.cache.layout.num_layers):
            for which, cache in enumerate(self.cache.kv(layer)):
                cache[rows, positions] = records[:, layer, which]

    def _observe(self, sequences: list[Sequence]) -> None:
        """Records the live lengths; at regular steps checks pages and attention."""
        lengths = np.array([sequence.length for sequence in sequences])
        self.lengths.append(lengths)
        steps = self.batching.steps
        if steps % self.check_every and steps > 1:
            return
        stats = self.cache.stats()
        self.waste.append(stats.waste)
        self.page_maps.append((steps, self.cache.page_map()))
        size = self.cache.page_size
        expected = allocated_bytes("vmmkv", self.cache.layout, lengths, self.cache.max_seq_len, size).sum()
        if stats.pages["used"] * size != expected:
            raise InvariantError(
                f"step {steps}: {stats.pages['used']} pages are used; the tokens need {expected} bytes"
            )
        self.cache.check()
        for index in self.rng.choice(len(sequences), min(4, len(sequences)), replace=False):
            layer = int(self.rng.integers(self.cache.layout.num_layers))
            error = self._attention_error(sequences[index], layer)
            self.max_error = float(np.maximum(self.max_error, error))  # NaN stays
            self.checks += 1

    def _attention_error(self, sequence: Sequence, layer: int) -> float:
        """Relative error of attention of one random query over a sequence's row, against float64."""
        row, length = sequence.row, sequence.length
        k, v = (cache[row, :length].transpose(0, 1) for cache in self.cache.kv(layer))
        q = torch.randn(k.shape[0], GROUP, k.shape[2], generator=self._generator).to(k)
        # Not the memory-efficient kernel, which would wrap behind `int32_token_limit` tokens.
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            heads_first = q.view(1, -1, 1, k.shape[2]), k.unsqueeze(0), v.unsqueeze(0)
            out = torch.nn.functional.scaled_dot_product_attention(*heads_first, enable_gqa=True)
        indices = self._indices(sequence.number, torch.arange(length, device=k.device))
        true_k, true_v = self._table[:, layer][indices].double().permute(1, 2, 0, 3)
        weights = (q.double() @ true_k.transpose(1, 2) / k.shape[2] ** 0.5).softmax(-1)
        reference = weights @ true_v
        return float((out.view(q.shape).double() - reference).norm() / reference.norm())

    def _indices(self, numbers: torch.Tensor | int, positions: torch.Tensor) -> torch.Tensor:
        """Where in the table K and V of tokens are, by the numbers of their sequences."""
        return (numbers * 2_654_435_761 ^ positions * 40_503) % TABLE_SIZE
