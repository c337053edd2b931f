"""What a forward pass reads, and what it makes: one batch, or two, of which one is prepared while the other runs."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers.generation.continuous_batching.input_outputs import (
    ContinuousBatchingAsyncIOs,
    ContinuousBatchingIOs,
    HostDeviceIOPair,
)
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.utils import CudaGraphBuffer

from ..left_to_attention import CACHE
from ..with_names import with_names
from .cache import RowCache

SEQUENCES = 64
"""Batches with prompts have a multiple of so many, where they are padded."""
MOST_TOKENS, GRAPH_SEQUENCES = 2048, 256
"""Of batches with prompts that run as CUDA graphs: tokens at most, since the more there are, the less matters how long
the host launches; and sequences, to which they are padded, since each number would be a graph of its own."""

GONE = RequestState("__gone__", [], _status=RequestStatus.FINISHED)
"""In the place of a request that has ended while a batch with it runs."""


class RowBatch(ContinuousBatchingIOs):
    """A batch."""

    cache: RowCache
    has_graphs_of_prompts = False
    """Whether a warm-up has made CUDA graphs of batches with prompts: who did not wait for them then, never does."""

    def prepare_batch_tensors(self, *args: Any, **kwargs: Any) -> None:
        """Makes up a batch: see `ContinuousBatchingIOs.prepare_batch_tensors`. Rows take the place of block tables."""
        super().prepare_batch_tensors(*args, **kwargs)
        if self.use_block_table:
            rows = [self.cache.requests.rows(each.state.request_id) for each in self.requests_in_batch]
            groups = self.block_table.shape[0]
            self.block_table[:, : len(rows), 0] = torch.tensor(rows, dtype=self.block_table.dtype).T[:groups]

    def _get_num_sequences(self, use_padding: bool) -> int:
        """Sequences of a batch, some of them without tokens where it is padded. transformers computes logits of each; a
        batch with prompts has far fewer than it has tokens."""
        most = int(super()._get_num_sequences(use_padding))
        if use_padding and not self.use_block_table:
            if self.is_graph_of_prompts:
                return min(GRAPH_SEQUENCES, most)
            return min(-(-self.num_request_in_batch // SEQUENCES) * SEQUENCES, most)
        return most

    @property
    def is_graph_of_prompts(self) -> bool:
        """Whether it holds prompts, and runs as a CUDA graph."""
        if not self.has_graphs_of_prompts or self.use_block_table:
            return False
        return bool(self.num_q_tokens <= MOST_TOKENS and self.num_request_in_batch <= GRAPH_SEQUENCES)

    def _get_graph_key(self) -> tuple[int, ...]:
        """By what graphs are told apart: not by lengths, which lie on the device."""
        if self.use_block_table:
            return super()._get_graph_key()
        return self.num_q_tokens, self._get_num_sequences(use_padding=True)

    def get_model_kwargs(self, use_padding: bool = False) -> Any:
        """What a pass is told, and our attention with it: not all layers hand it transformers' `cache`."""
        return {**super().get_model_kwargs(use_padding), CACHE: self.cache}

    @property
    def prepared(self) -> RowBatch:
        """The batch that runs next."""
        return self

    @property
    def sides(self) -> list[RowBatch]:
        """Wherever that batch is: on the host, or on the device as well."""
        return [self]

    def forget_graphs(self) -> None:
        """Has none of those that were made: others are, when they are needed, of decode alone. Batches are padded as
        before, as they are in other processes, which may have kept theirs."""
        self.graphs = CudaGraphBuffer()

    def keep_only(self, active: dict[str, RequestState]) -> None:
        """Knows those no more, while it runs, that are not `active`: ended, moved, or to begin anew. transformers knows
        them by name, which another may have by now, and would give that one their next token."""
        gone = [each for each in self.requests_in_batch if active.get(each.state.request_id) is not each.state]
        if not gone:
            return
        names = {each.state.request_id for each in gone}
        self.req_id_to_new_token_position = {
            f"{name} {GONE.request_id}" if name in names else name: place  # as many: their order says whose a token is
            for name, place in self.req_id_to_new_token_position.items()
        }
        for each in gone:
            each.state = GONE


class RowBatchOnBothSides(HostDeviceIOPair):
    """The same on the host and on the device."""

    def __init__(self, **kwargs: Any) -> None:
        with_names(HostDeviceIOPair.__init__, ContinuousBatchingIOs=RowBatch)(self, **kwargs)


class RowBatchesAhead(ContinuousBatchingAsyncIOs):
    """Two of these: one is prepared while the other runs."""

    def __init__(self, **kwargs: Any) -> None:
        with_names(ContinuousBatchingAsyncIOs.__init__, HostDeviceIOPair=RowBatchOnBothSides)(self, **kwargs)

    def infer_carry_over_ids(self) -> torch.Tensor:
        """Of each token which of those that the batch before makes takes its place; -1: none. transformers makes a list
        of all tokens that a batch may have, in each step."""
        places, before = self.prepared.req_id_to_new_token_position, self.running.req_id_to_new_token_position
        taken = {places[name]: at for at, name in enumerate(before) if name in places}
        ids = torch.full((self.max_batch_tokens,), -1, dtype=torch.int32)
        ids[list(taken)] = torch.tensor([*taken.values()], dtype=torch.int32)
        return ids

    @property
    def prepared(self) -> RowBatch:
        """The batch that runs next."""
        return cast(RowBatch, self.io_pairs[self.current_pair].host_io)

    @property
    def sides(self) -> list[RowBatch]:
        """Wherever that batch is: on the host, and on the device."""
        pair = self.io_pairs[self.current_pair]
        return [cast(RowBatch, side) for side in (pair.host_io, pair.device_io)]

    def forget_graphs(self) -> None:
        """Has none of those that were made: see `RowBatch.forget_graphs`."""
        for pair in self.io_pairs:
            for side in (pair.host_io, pair.device_io):
                cast(RowBatch, side).forget_graphs()

    @property
    def running(self) -> RowBatch:
        """The batch whose tokens nobody has taken yet."""
        return cast(RowBatch, self.io_pairs[1 - self.current_pair].host_io)
