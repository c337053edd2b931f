"""The loop: steps of a schedule on the device, one ahead of it, as CUDA graphs.

All tokens of all requests lie one after another in one tensor on the device: a step reads its tokens there and writes
those that it samples. As the schedule follows from lengths alone, the host waits for no token; after it has launched a
step it waits for the step before, and so knows when tokens were there. With `wait` it waits for each step at once, as
an engine must that looks at tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from time import perf_counter, perf_counter_ns
from typing import Any

import numpy as np
import torch

from .attention import ATTENTION, Batch
from .backend import KVBackend, Numbers, pinned
from .blocks import PagedKV, ReusingPagedKV
from .model import Angles, Model
from .rows import VmmKV
from .run import InFlight, Run, SeenTokens
from .schedule import Schedule, Step

BACKENDS: dict[str, Callable[..., KVBackend]] = {"vmm": VmmKV, "paged": PagedKV}


class Engine:
    """Serves requests with a model and a KV backend.

    Args:
        backend: "vmm" or "paged".
        max_bytes: for K and V.
        max_sequences: requests that run at a time.
        max_seq_len: tokens of the longest request.
        max_tokens: tokens of all requests of a run together, and one more for each.
        chunk: tokens of prompts in a step.
        attention: "numba", our kernels, or "torch"; None: ours on a GPU.
        graphs: run steps from CUDA graphs, where there is a GPU: decode by batch size, and, with our kernels, which
            take no lengths from the host, prompts by number of tokens.
        reuse: begin prompts with known K and V; the tokens of each step are copied to the host for it, behind the next
            step.
        late: see `Schedule`.
        options: of the backend beside these, as `pool` of "vmm".
    """

    def __init__(
        self,
        model: Model,
        backend: str,
        max_bytes: int,
        max_sequences: int,
        max_seq_len: int,
        max_tokens: int,
        *,
        chunk: int = 2048,
        attention: str | None = None,
        graphs: bool = True,
        reuse: bool = False,
        late: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.device = model, model.device
        self.max_sequences, self.chunk = max_sequences, chunk
        self.reuse, self.late = reuse, late
        layout = model.config.kv_layout(model.dtype)
        make = ReusingPagedKV if reuse and backend == "paged" else BACKENDS[backend]
        self.kv = make(layout, max_sequences, max_seq_len, max_bytes, self.device, **(options or {}))
        attention = attention or ("numba" if self.device.type == "cuda" else "torch")
        self.write, self.attention = (make_kernel(self.kv) for make_kernel in ATTENTION[attention])
        # Prompts take two by token, of which each sequence that decodes beside them has one, four by sequence, one more
        # where the last one ends, two by sequence that samples. Decode alone takes less.
        self.inputs = torch.zeros(8 * max_sequences + 2 * chunk + 2, dtype=torch.int32, device=self.device)
        # Behind the last token one place is read for padding and one is written.
        self.tokens = torch.zeros(max_tokens + 2, dtype=torch.int64, device=self.device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.prompt_graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.use_graphs = graphs and self.device.type == "cuda"
        self.use_prompt_graphs = self.use_graphs and attention == "numba"
        self.hidden = torch.empty(0)
        """Where graphs of prompts, if there are any, leave hidden states, of which some are sampled from."""

    @torch.inference_mode()
    def run(
        self, prompts: list[torch.Tensor], outputs: list[int], *, wait: bool = False, deadline: float = float("inf")
    ) -> Run:
        """Serve requests that all wait from the start to their end.

        Args:
            prompts: int64 `[tokens]` each.
            outputs: tokens to generate for each.
            wait: for the tokens of each step before anything else is done; else the host is a step ahead.
            deadline: `perf_counter()` when to stop, finished or not.

        Raises:
            ValueError: a request is too long for the backend, or all are for `max_tokens`.
        """
        sizes, counts = np.array([len(prompt) for prompt in prompts]), np.array(outputs)
        seen = SeenTokens(prompts, sizes + counts + 1) if self.reuse else None
        ids = seen.of if seen else None
        schedule = Schedule(self.kv, sizes, counts, self.max_sequences, self.chunk, late=self.late, ids=ids)
        self._take_tokens(prompts, sizes + counts + 1)
        if self.use_graphs and not self.graphs:
            self._capture()
        schedule.waiting.extend(range(len(prompts)))
        run = Run(sizes, counts)
        flight = InFlight(run, seen)
        try:
            self._serve(schedule, flight, wait, deadline)
        finally:
            schedule.remove_all()
        run.seconds = flight.now()
        ends = (sizes + counts + 1).cumsum()
        run.tokens = np.delete(self.tokens[: ends[-1]].cpu().numpy(), ends - 1)
        run.preempted, run.cached = schedule.preempted, schedule.cached
        run.recomputed = schedule.recomputed
        run.samples.append((run.seconds, self.kv.physical_bytes(), 0))
        return run

    def _serve(self, schedule: Schedule, flight: InFlight, wait: bool, deadline: float) -> None:
        """Run steps until all requests have finished, or it is too late."""
        run = flight.run
        finished = 0
        while finished < len(run.outputs) and perf_counter() < deadline:
            now = flight.now()
            start, managed = perf_counter_ns(), schedule.manager_ns
            step = schedule.next()
            if step is None:
                break
            self._begin_step(schedule, step, flight)
            run.host_ns += perf_counter_ns() - start
            if wait:
                flight.complete()
            start = perf_counter_ns()
            leaving = schedule.advance(step)
            run.host_ns += perf_counter_ns() - start
            run.manager_ns.append(schedule.manager_ns - managed)
            if run.wants_sample(now):
                run.samples.append((now, self.kv.physical_bytes(), run.running[-1]))
            if len(flight) > 1:
                flight.complete()
            finished += len(leaving)
        while flight:
            flight.complete()

    def _begin_step(self, schedule: Schedule, step: Step, flight: InFlight) -> None:
        """Gives the device a step, and takes down who runs in it."""
        sampled = self._launch(schedule, step)
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        flight.append(event, step, sampled)
        flight.run.running.append(len(schedule.running))
        flight.run.waiting.append(len(schedule.waiting))

    def _take_tokens(self, prompts: list[torch.Tensor], totals: Numbers) -> None:
        """Lays the tokens of all requests out, each in so many places."""
        ends = totals.cumsum()
        if ends[-1] > len(self.tokens) - 2:
            raise ValueError(f"got {ends[-1]} tokens; this engine was made with max_tokens={len(self.tokens) - 2}")
        self.offsets = ends - totals
        tokens = torch.zeros(int(ends[-1]), dtype=torch.int64)
        for offset, prompt in zip(self.offsets.tolist(), prompts):
            tokens[offset : offset + len(prompt)] = prompt
        self.tokens[: len(tokens)] = tokens.to(self.device)

    def _launch(self, schedule: Schedule, step: Step) -> torch.Tensor | None:
        """Launches decode, or prompts and decode in one forward pass. With reuse it returns what is sampled, which is
        there when the step is done."""
        requests = np.append(step.decode, step.prefill)
        starts, counts = schedule.computed[requests], np.append(np.ones_like(step.decode), step.counts)
        offsets, host = self.offsets[requests], np.stack([schedule.row[requests], starts, counts])
        ends = self.offsets[step.sampled] + schedule.known[step.sampled]
        if len(step.prefill):
            last = counts.cumsum()[starts + counts == schedule.known[requests]] - 1
            targets = self._launch_prompts(offsets, host, len(step.prefill), last, ends)
        else:
            targets = self._launch_decode(offsets, host, ends)
        return self.tokens[targets].to("cpu", non_blocking=True) if self.reuse else None

    def _launch_decode(self, offsets: Numbers, host: Numbers, ends: Numbers) -> torch.Tensor:
        """Compute a token of each sequence, from a graph where there is one; return where samples go."""
        size = padded(len(offsets), self.graphs)
        *_, targets = self._send([*self._decode_inputs(offsets, host, size), ends])
        if graph := self.graphs.get(size):
            graph.replay()
        else:
            self._decode(size, host)
        return targets

    def _launch_prompts(
        self, offsets: Numbers, host: Numbers, prompts: int, last: Numbers, ends: Numbers
    ) -> torch.Tensor:
        """Compute new tokens of each sequence, from a graph where there is one, and sample behind those at `last`;
        return where samples go, the `ends` of their requests."""
        tokens = padded(int(host[2].sum()), self.prompt_graphs)
        graph = self.prompt_graphs.get(tokens)
        arrays = self._prefill_inputs(offsets, host, self.max_sequences if graph else len(offsets), tokens)
        *inputs, sampled, targets = self._send([*arrays, last, ends])
        if graph:
            graph.replay()
            hidden = self.hidden
        else:
            hidden = self._prefill(inputs, host, prompts)
        if len(targets):
            self._sample(hidden[sampled], targets)
        return targets

    def _send(self, arrays: list[Numbers]) -> list[torch.Tensor]:
        """Brings arrays to the device in one copy, to the beginning of the inputs."""
        flat = np.concatenate(arrays).astype(np.int32)
        inputs = self.inputs[: len(flat)].copy_(pinned(flat, self.device), non_blocking=True)
        return list(inputs.split(list(map(len, arrays))))

    def _decode_inputs(self, offsets: Numbers, host: Numbers, size: int) -> list[Numbers]:
        """What `_decode` takes, padded to so many sequences."""
        rows, starts, _ = host
        return [
            pad(offsets + starts, size, len(self.tokens) - 2),
            pad(rows, size),
            pad(starts + 1, size),
            np.minimum(np.arange(size + 1), len(rows)),
        ]

    def _prefill_inputs(self, offsets: Numbers, host: Numbers, batch: int, tokens: int) -> list[Numbers]:
        """What `_prefill` takes, padded to so many sequences and tokens."""
        rows, starts, counts = host
        ends = counts.cumsum()
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
        return [
            pad(np.repeat(offsets, counts) + positions, tokens, len(self.tokens) - 2),
            pad(positions, tokens),
            pad(rows, batch),
            pad(starts, batch),
            pad(starts + counts, batch),
            pad(np.append(0, ends), batch + 1, int(ends[-1])),
        ]

    def _decode(self, size: int, host: Numbers | None = None) -> None:
        """Compute a token of each sequence of a batch, whose indices are at the beginning of the inputs."""
        sizes = [size, size, size, size + 1]
        places, rows, seq_lens, cu_seqlens = self.inputs[: sum(sizes)].split(sizes)
        positions = (seq_lens - 1).clamp_(min=0)
        hidden = self._forward(places, positions, Batch(rows, positions, seq_lens, cu_seqlens, host, prompts=0))
        self._sample(hidden, places + 1)

    def _prefill(self, inputs: list[torch.Tensor], host: Numbers | None, prompts: int) -> torch.Tensor:
        """Hidden states of a chunk of each of some prompts, and of a token of each other sequence."""
        places, positions, rows, starts, seq_lens, cu_seqlens = inputs
        batch = Batch(rows, starts, seq_lens, cu_seqlens, host, prompts=prompts)
        return self._forward(places, positions, batch)

    def _forward(self, places: torch.Tensor, positions: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The model over the tokens at some places of `tokens`."""

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, angles: Angles) -> torch.Tensor:
            q = self.write(layer, q, k, v, angles, batch)
            return self.attention(layer, q, batch)

        return self.model.forward(self.tokens[places], positions, attend)

    def _sample(self, hidden: torch.Tensor, targets: torch.Tensor) -> None:
        """A token behind each of some hidden states, written where it belongs."""
        self.tokens[targets] = self.model.logits(hidden).argmax(-1)

    def _capture(self) -> None:
        """A graph for each of some numbers of tokens, and for each of some batch sizes of decode, made with padding
        only: what it does depends on its inputs.

        The least size is 2: one token alone would be compiled apart.
        """
        pool = torch.cuda.graph_pool_handle()
        if self.use_prompt_graphs:
            largest = self.chunk + self.max_sequences
            self.hidden = self.model.weights["embed"].new_empty(largest, self.model.config.hidden_size)
            for tokens in sorted({*range(64, largest, 64), largest}, reverse=True):
                self.prompt_graphs[tokens] = self._graph_of(self._prefill_padded, tokens, pool)
        most = max(self.max_sequences, 2)
        for size in sorted({min(size, most) for size in (2, 4, 8, *range(16, most, 16), most)}, reverse=True):
            self.graphs[size] = self._graph_of(self._decode, size, pool)
        torch.cuda.synchronize()

    def _graph_of(self, function: Callable[[int], None], size: int, pool: Any) -> torch.cuda.CUDAGraph:
        """What a function does with so many tokens; `pool` is whose memory it shares with other graphs."""
        self.inputs.zero_()
        self.inputs[:size] = len(self.tokens) - 2
        function(size)  # compiles, and makes workspaces
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            function(size)
        return graph

    def _prefill_padded(self, tokens: int) -> None:
        """So many tokens of as many sequences as can run, whose indices are at the beginning of the inputs."""
        most = self.max_sequences
        sizes = tokens, tokens, most, most, most, most + 1
        states = self._prefill(list(self.inputs[: sum(sizes)].split(sizes)), None, most)
        self.hidden[:tokens] = states

    def close(self) -> None:
        """Gives all memory back; the engine is of no use any more."""
        self.graphs.clear()
        self.prompt_graphs.clear()
        self.kv.close()


def padded(size: int, graphs: Iterable[int]) -> int:
    """The least size of a graph for so many; as many where there is none."""
    return min((graph for graph in graphs if graph >= size), default=size)


def pad(array: Numbers, size: int, value: int = 0) -> Numbers:
    """With so many values, in less time than `np.pad`."""
    values = np.full(size, value)
    values[: len(array)] = array
    return values
