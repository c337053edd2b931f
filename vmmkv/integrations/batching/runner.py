"""Runs forward passes. transformers pads those of decode to powers of two; here they are padded to closer sizes, see
`decode_sizes`, of which a warm-up has made graphs or programs. Of those with prompts it makes graphs of all sizes;
transformers makes one of the largest."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from transformers.generation.continuous_batching.model_runner import ModelRunner

from ..model_weights import devices, has_adapters
from .config import decode_sizes
from .inputs import MOST_TOKENS, RowBatch, RowBatchesAhead


class RowRunner(ModelRunner):
    """See above."""

    inputs_and_outputs: RowBatch | RowBatchesAhead

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._all_sizes = decode_sizes(cast(int, self.cb_config.max_requests_per_batch))
        self._sizes: list[int] = []
        """Those that a warm-up was for."""
        self._made_up = 0
        """The size of the batch that is made up now; 0: none is."""
        self._is_spread: bool | None = None
        """Whether the weights of the model are on several devices; None: nobody has looked."""
        self._has_adapters = False
        """Whether PEFT has put adapters into the model: a graph would go on with those that it was made with."""

    def compute_batch(self, model: Any, batch_data: dict[str, Any]) -> None:
        """Runs a batch: see `ModelRunner.compute_batch`."""
        if self._is_spread is None:
            self._is_spread = len(devices(model)) > 1
        self._has_adapters = has_adapters(model)
        with _hidden_states_at(batch_data["logits_indices"].device, model) if self._is_spread else nullcontext():
            super().compute_batch(model, batch_data)

    def maybe_pad_inputs(self, num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool) -> tuple[int, int]:
        tokens, read = super().maybe_pad_inputs(num_q_tokens, max_kv_read, use_decode_fast_path)
        if use_decode_fast_path and self.pad_inputs:
            tokens = max(tokens, self._all_sizes[0])
            tokens = min((size for size in self._sizes if size >= num_q_tokens), default=tokens)
        return self._made_up or tokens, read

    def _get_forward_fn(self, use_block_table: bool) -> tuple[Any, bool]:
        forward, is_graph = super()._get_forward_fn(use_block_table)
        is_graph = is_graph and not self._has_adapters
        if is_graph and not use_block_table:  # what could not be captured before is not tried again among requests
            is_graph = self.inputs_and_outputs.prepared.is_graph_of_prompts
            is_graph = is_graph and bool(self._made_up or self.inputs_and_outputs.get_graph())
        return forward, is_graph

    def run_one_warmup(self, model: Any, num_q_tokens: int, max_kv_read: int | None) -> float:
        """Warms up a size: see `ModelRunner.run_one_warmup`. With a power of two, of decode, come those that would be
        padded to it otherwise; with the largest batch of prompts all smaller ones that are graphs."""
        if max_kv_read is not None:
            return float(super().run_one_warmup(model, num_q_tokens, max_kv_read)) + self._warm_up_prompts(model)
        if _has_program_for_each(self.cb_config.decode_compile_config):
            return float(super().run_one_warmup(model, num_q_tokens, None))
        took = 0.0
        for size in self._all_sizes:
            if super().maybe_pad_inputs(size, 0, True)[0] != num_q_tokens:
                continue
            if seconds := self._make_up(model, size, None):  # or else it failed
                self._sizes = sorted({*self._sizes, size})
                took += seconds
        return took

    def _warm_up_prompts(self, model: Any) -> float:
        """Makes the graphs of batches with prompts, the largest first, which take the most memory."""
        if not self.use_cuda_graph_varlen or has_adapters(model):
            return 0.0
        if _has_program_for_each(self.cb_config.varlen_compile_config):
            return 0.0
        for side in self.inputs_and_outputs.sides:
            side.has_graphs_of_prompts = True
        most = min(self.cache.max_batch_tokens, MOST_TOKENS)
        padded = dict.fromkeys(self.maybe_pad_inputs(size, 0, False)[0] for size in range(most, 0, -1))
        return sum(self._make_up(model, size, 0) for size in padded if size <= most)

    def _make_up(self, model: Any, size: int, max_kv_read: int | None) -> float:
        """Warms up a batch of a size, in which one request has a token and the rest is padding."""
        self._made_up = size
        try:
            return float(super().run_one_warmup(model, 1, max_kv_read))
        finally:
            self._made_up = 0


def _has_program_for_each(compiling: Any) -> bool:
    """Whether each size is a program of its own: to make all of them would be slow."""
    return compiling is not None and compiling.dynamic is False


def _hidden_states_at(device: torch.device, model: Any) -> AbstractContextManager[Any]:
    """Has what a decoder returns brought to a device, from where its last layer is: the model picks tokens there, by
    indices that are on the device of its inputs, before the next module's hook brings anything anywhere."""

    def bring(_module: torch.nn.Module, _given: Any, output: Any) -> None:
        output.last_hidden_state = output.last_hidden_state.to(device)

    return cast(AbstractContextManager[Any], model.get_decoder().register_forward_hook(bring))
