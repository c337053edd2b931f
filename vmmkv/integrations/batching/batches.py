"""What a forward pass reads and makes, of one batch, or of two when one is prepared while the other runs; and what runs
passes. In transformers: `ContinuousBatchingIOs`, `ContinuousBatchingAsyncIOs` and `ModelRunner`.

transformers pads batches of decode to powers of two; here they are padded to closer sizes, see `decode_sizes`. Of
batches with prompts a warm-up captures graphs of all sizes; transformers captures one of the largest.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation.continuous_batching.input_outputs import (
    ContinuousBatchingAsyncIOs,
    ContinuousBatchingIOs,
    HostDeviceIOPair,
)
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.utils import CudaGraphBuffer

from .cache import RowCache
from .config import decode_sizes, with_names
from .model import CACHE

SEQUENCES = 64  # batches with prompts are padded to a multiple of so many sequences
MOST_TOKENS, GRAPH_SEQUENCES = 2048, 256
"""Batches with prompts that run as CUDA graphs: their tokens at most, since larger passes hide the time of launches;
and their sequences, to which they are padded, since each number would be a graph of its own."""
GONE = RequestState("__gone__", [], _status=RequestStatus.FINISHED)
"""In the place of a request that has ended while a batch with it runs."""


class RowBatch(ContinuousBatchingIOs):
    """A batch."""

    cache: RowCache
    has_graphs_of_prompts = False
    """A warm-up has captured graphs of batches with prompts; without one none are captured later."""

    def prepare_batch_tensors(self, *args: Any, **kwargs: Any) -> None:
        super().prepare_batch_tensors(*args, **kwargs)
        if self.use_block_table:
            rows = self.cache.requests.rows([each.state.request_id for each in self.requests_in_batch])
            groups = self.block_table.shape[0]
            self.block_table[:, : len(rows), 0] = torch.tensor(rows, dtype=self.block_table.dtype).T[:groups]

    def _get_num_sequences(self, use_padding: bool) -> int:
        """Sequences of a batch, padding included. transformers computes logits of each; a batch with prompts has far
        fewer than it has tokens."""
        most = int(super()._get_num_sequences(use_padding))
        if use_padding and not self.use_block_table:
            if self.is_graph_of_prompts:
                return min(GRAPH_SEQUENCES, most)
            return min(-(-self.num_request_in_batch // SEQUENCES) * SEQUENCES, most)
        return most

    @property
    def is_graph_of_prompts(self) -> bool:
        """Whether it has prompts, and runs as a CUDA graph."""
        if not self.has_graphs_of_prompts or self.use_block_table:
            return False
        return bool(self.num_q_tokens <= MOST_TOKENS and self.num_request_in_batch <= GRAPH_SEQUENCES)

    def _get_graph_key(self) -> tuple[int, ...]:
        """The key of a graph: without lengths, which are on the device."""
        if self.use_block_table:
            return super()._get_graph_key()
        return self.num_q_tokens, self._get_num_sequences(use_padding=True)

    def get_model_kwargs(self, use_padding: bool = False) -> Any:
        return {**super().get_model_kwargs(use_padding), CACHE: self.cache}

    def keep_only(self, active: dict[str, RequestState]) -> None:
        """Forget requests that are not active any more: transformers would give their next token to a new request of
        the same name."""
        gone = [each for each in self.requests_in_batch if active.get(each.state.request_id) is not each.state]
        names = {each.state.request_id for each in gone}
        if gone:
            self.req_id_to_new_token_position = {
                f"{name} {GONE.request_id}" if name in names else name: place  # their order says whose a token is
                for name, place in self.req_id_to_new_token_position.items()
            }
        for each in gone:
            each.state = GONE


class RowBatchOnBothSides(HostDeviceIOPair):
    """The same batch on the host and on the device."""

    __init__ = with_names(HostDeviceIOPair.__init__, ContinuousBatchingIOs=RowBatch)


class RowBatchesAhead(ContinuousBatchingAsyncIOs):
    """Two batches: one is prepared while the other runs."""

    __init__ = with_names(ContinuousBatchingAsyncIOs.__init__, HostDeviceIOPair=RowBatchOnBothSides)

    def infer_carry_over_ids(self) -> Tensor:
        """For each token the one of the running batch that takes its place, or -1. transformers makes a list of all
        tokens that a batch may have, in each step."""
        places = sides(self)[0].req_id_to_new_token_position
        before = sides(self, running=True)[0].req_id_to_new_token_position
        taken = {places[name]: at for at, name in enumerate(before) if name in places}
        ids = torch.full((self.max_batch_tokens,), -1, dtype=torch.int32)
        ids[list(taken)] = torch.tensor([*taken.values()], dtype=torch.int32)
        return ids


def sides(batches: RowBatch | RowBatchesAhead, *, running: bool = False) -> list[RowBatch]:
    """The batch that runs next, or the one that runs, whose tokens were not taken yet: on the host, and on the device
    as well if there are two batches."""
    if isinstance(batches, RowBatch):
        return [batches]
    pair = batches.io_pairs[batches.current_pair ^ running]
    return [cast(RowBatch, pair.host_io), cast(RowBatch, pair.device_io)]


def forget_graphs(batches: RowBatch | RowBatchesAhead) -> None:
    """Drop captured graphs. Batches are padded as before, as in other processes, which may keep theirs."""
    for running in (False, True):
        for side in sides(batches, running=running):
            side.graphs = CudaGraphBuffer()


class RowRunner(ModelRunner):
    """Runs forward passes."""

    cache: RowCache
    inputs_and_outputs: RowBatch | RowBatchesAhead

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._all_sizes = decode_sizes(cast(int, self.cb_config.max_requests_per_batch))
        self._sizes: list[int] = []  # the sizes of decode that a warm-up was for
        self._made_up = 0  # the size of the batch that is being made up; 0: none is

    def compute_batch(self, model: Any, batch_data: dict[str, Any]) -> None:
        is_spread = len(self.cache.weights.devices) > 1
        with _hidden_states_at(batch_data["logits_indices"].device, model) if is_spread else nullcontext():
            super().compute_batch(model, batch_data)

    def maybe_pad_inputs(self, num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool) -> tuple[int, int]:
        tokens, read = super().maybe_pad_inputs(num_q_tokens, max_kv_read, use_decode_fast_path)
        if use_decode_fast_path and self.pad_inputs:
            tokens = max(tokens, self._all_sizes[0])
            tokens = min((size for size in self._sizes if size >= num_q_tokens), default=tokens)
        return self._made_up or tokens, read

    def _get_forward_fn(self, use_block_table: bool) -> tuple[Any, bool]:
        forward, is_graph = super()._get_forward_fn(use_block_table)
        is_graph = is_graph and not self.cache.weights.has_adapters
        if is_graph and not use_block_table:  # what could not be captured before is not tried again among requests
            is_graph = sides(self.inputs_and_outputs)[0].is_graph_of_prompts
            is_graph = is_graph and bool(self._made_up or self.inputs_and_outputs.get_graph())
        return forward, is_graph

    def run_one_warmup(self, model: Any, num_q_tokens: int, max_kv_read: int | None) -> float:
        """Warm up a size of transformers', and with it others: with a power of two, of decode, those that would be
        padded to it otherwise; with the largest batch of prompts all smaller ones that are graphs."""
        if max_kv_read is not None:
            return float(super().run_one_warmup(model, num_q_tokens, max_kv_read)) + self._warm_up_prompts(model)
        if _has_program_for_each(self.cb_config.decode_compile_config):
            return float(super().run_one_warmup(model, num_q_tokens, None))
        took = 0.0
        for size in self._all_sizes:
            if super().maybe_pad_inputs(size, 0, True)[0] != num_q_tokens:
                continue
            if seconds := self._make_up(model, size, None):  # else it failed
                self._sizes = sorted({*self._sizes, size})
                took += seconds
        return took

    def _warm_up_prompts(self, model: Any) -> float:
        """Capture the graphs of batches with prompts, the largest first, which take the most memory."""
        if not self.use_cuda_graph_varlen or self.cache.weights.has_adapters:
            return 0.0
        if _has_program_for_each(self.cb_config.varlen_compile_config):
            return 0.0
        for side in sides(self.inputs_and_outputs):
            side.has_graphs_of_prompts = True
        most = min(self.cache.max_batch_tokens, MOST_TOKENS)
        padded = dict.fromkeys(self.maybe_pad_inputs(size, 0, False)[0] for size in range(most, 0, -1))
        return sum(self._make_up(model, size, 0) for size in padded if size <= most)

    def _make_up(self, model: Any, size: int, max_kv_read: int | None) -> float:
        """Warm up a batch of a size, in which one request has a token and the rest is padding."""
        self._made_up = size
        try:
            return float(super().run_one_warmup(model, 1, max_kv_read))
        finally:
            self._made_up = 0


def _has_program_for_each(compiling: Any) -> bool:
    """Whether each size is compiled to a program of its own: making all of them would be slow."""
    return compiling is not None and compiling.dynamic is False


def _hidden_states_at(device: torch.device, model: Any) -> AbstractContextManager[Any]:
    """Bring what a decoder returns from the device of its last layer to that of its inputs: the model indexes it by
    tensors there, before the hook of the next module brings it anywhere."""

    def bring(_module: torch.nn.Module, _given: Any, output: Any) -> None:
        output.last_hidden_state = output.last_hidden_state.to(device)

    return cast(AbstractContextManager[Any], model.get_decoder().register_forward_hook(bring))
