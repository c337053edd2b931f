"""K and V of all requests, in rows: what transformers asks of its cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import torch
from transformers.generation.continuous_batching import cache as their_cache
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.utils import stream_context

from ...errors import UnsupportedError
from ..idle_memory import IdleMemory
from ..left_to_attention import LeftToAttention
from ..packed_attention import Packed
from ..row_admission import Admission
from ..row_attention import RowAttention
from ..row_caches import Options, bytes_of_token, make_caches
from ..row_groups import Group
from ..row_stages import make_requests
from .config import ALIKE, block_bytes, budget, host_bytes
from .ranks import ranks_of

MAX_BATCH_TOKENS = 8192
"""Of one forward pass, as transformers has it where it is told nothing."""
WARMUP = "__warmup_"
"""What names of requests begin with that are made up, before there are any, and hold what was never computed."""


class RowCache(LeftToAttention, their_cache.PagedAttentionCache):
    """See above.

    Args:
        options: what `enable` was told.
        groups: the layer groups of the model.
        weights: says what K and V depend on beside tokens.
        adapters: says which of PEFT's the model has.
        config, continuous_batching_config, device, distributed_helper, dtype, model_supports_logits_to_keep: as
            transformers gives them.
    """

    def __init__(
        self,
        options: Options,
        groups: list[Group],
        weights: Callable[[], str],
        adapters: Callable[[], Hashable],
        config: Any,
        continuous_batching_config: Any,
        device: torch.device | str,
        distributed_helper: Any,
        dtype: torch.dtype = torch.float16,
        model_supports_logits_to_keep: bool = False,
    ) -> None:
        batching, ranks = continuous_batching_config, ranks_of(distributed_helper)
        self.device = torch.device(device)
        self.stream: Any = None
        """On which forward passes run."""
        self._groups, self._max_seq_len = groups, options.max_seq_len
        limit, on_host = functools.partial(budget, batching), host_bytes(batching)
        self.kv_caches = make_caches(options, groups, limit, 2 * batching.max_requests_per_batch, on_host, ranks)
        reuse, has_host = batching.allow_block_sharing, on_host > 0
        self.requests = make_requests(groups, self.kv_caches, ranks, reuse=reuse, has_host=has_host)
        ranks.check_alike(  # or else requests look otherwise in other processes, or are chosen otherwise
            page_size=self.kv_caches[0].pool.page_size,
            bytes_of_a_token=bytes_of_token(groups),
            kv_dtype=options.kv_dtype,
            max_seq_len=options.max_seq_len,
            **{name: getattr(batching, name) for name in ALIKE},
        )
        self.admission = Admission(self.requests, ranks, options.max_seq_len, weights, adapters)
        self.attention = RowAttention(groups, self.kv_caches)
        self.idle_memory = IdleMemory(options.idle_seconds, self.requests.forget_known)
        names = dict.fromkeys(group.name for group in groups)
        self.cache_allocators: dict[str, Any] = {
            name: GroupRows(self.admission, index, name) for index, name in enumerate(names)
        }
        self._tell_sizes(batching)
        self._counts: tuple[int, int] | None = None
        """Sequences of the next forward pass, and how many of them have more than one new token; None: as many as its
        tensors have room for, as in a CUDA graph, which serves other batches too."""
        self._rows: list[list[int]] | None = None
        """Of the next forward pass, where layers are on several devices: of each request the rows that it has."""
        self._computed: dict[str, tuple[RequestState, int]] = {}
        """By request: how many tokens it holds that it generated, or others may not know yet."""

    def _tell_sizes(self, config: Any) -> None:
        """Sets what transformers reads from a cache."""
        self.use_prefix_sharing = self.requests.reuse
        self.max_batch_tokens = config.max_batch_tokens or MAX_BATCH_TOKENS
        stages = self.requests.stages
        pools = {stage.caches[0].pool: sum(cache.layout.token_bytes for cache in stage.caches) for stage in stages}
        self.num_blocks = min(
            pool.limit_pages * pool.page_size // block_bytes(config, size) for pool, size in pools.items()
        )
        self.max_blocks_per_request, self.max_decode_fast_path_length = 1, self._max_seq_len
        self.max_tokens_read, self.read_cache_limit = 0, None
        self.pool: Any = SimpleNamespace(try_to_free_sectors=lambda: None)

    # ------------------------------------------------------------------ admission

    def can_store_request_tokens(self, state: RequestState, request_len: int, dry_run: bool = False) -> bool:
        name, held = state.request_id, state.current_len()
        tokens, is_made_up = held + request_len, name.startswith(WARMUP)
        if is_made_up and tokens > self._max_seq_len:
            return False  # what is made up may be longer than rows are
        if dry_run:
            return self.admission.fits(name, tokens)
        if self.requests.grow_in_place(name, held, tokens):  # most requests of most steps
            return True
        if held and not is_made_up and name not in self.requests and not self.requests.is_away(name):
            raise UnsupportedError(f"request {name} has computed {held} tokens, and nobody has them here")
        with stream_context(self.stream):
            has_room = self.admission.admit(name, held, tokens, expected=len(state.initial_tokens))
            if is_made_up and not has_room:
                self.admission.end(name)  # the next one of its name may be smaller
            return has_room

    def count_storable_requests(self, list_blocks_needed: list[dict[str, Any]]) -> int:
        return self.admission.count_that_fit(next(iter(needed.values())) for needed in list_blocks_needed)

    def compute_free_capacity(self, relative: bool = True) -> int | float:
        return self.admission.free_pages(relative)

    def evict_cached_blocks(self) -> bool:
        return False  # what is kept gives way by itself

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        self._make_known(request_id)
        with stream_context(self.stream):
            if no_cache:  # it is being offloaded, or started anew
                self.requests.put_away(request_id)
            else:
                self.admission.end(request_id)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        self._counts = None  # batches that are made up come next
        self._computed.clear()
        with stream_context(self.stream):
            self.admission.end_all()
            if clear_ledgers:
                self.requests.forget_known()

    def reset(self) -> None:
        self.free_all_requests(clear_ledgers=True)

    # ------------------------------------------------------------------ prefixes and forks

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        with stream_context(self.stream):
            return self.admission.begin_known(request_id, prompt_ids)

    def count_new_complete_blocks(self, state: RequestState, request_len: int) -> dict[str, int]:
        return {"tokens": state.current_len() + request_len} if self.use_prefix_sharing else {}

    def mark_complete_blocks(self, state: RequestState, complete_blocks: dict[str, int]) -> None:
        if not self.use_prefix_sharing:
            return
        self._computed[state.request_id] = state, complete_blocks["tokens"]
        if state.generated_len() <= 1:  # others may wait for the prompt; what is generated is known when it ends
            self._make_known(state.request_id)

    def _make_known(self, name: str) -> None:
        """Has others find what a request has computed, if there is something that they cannot find yet."""
        state, tokens = self._computed.pop(name, (None, 0))
        if state and self.admission.commits(name, tokens, is_over=state.status == RequestStatus.FINISHED):
            with stream_context(self.stream):
                self.admission.commit(name, tokens, state.initial_tokens + state.generated_tokens)

    def prepare_fork_request(
        self, src_state: RequestState, dst_req_ids: list[str], copy_src_and_dst: dict[str, Any]
    ) -> list[str]:
        with stream_context(self.stream):
            return self.admission.fork(src_state.request_id, dst_req_ids)

    def perform_cache_copy(self, copy_src_and_dst: dict[str, Any]) -> None:
        pass  # a fork has copied what it does not share

    # ------------------------------------------------------------------ forward passes

    def fill_block_table(self, request_id: str, past_length: int, query_length: int, block_table: torch.Tensor) -> None:
        pass  # a batch takes the rows of all requests at once

    def extend_read_and_write_indices(
        self,
        request_id: str,
        past_length: int,
        query_length: int,
        read_index: list[list[int]] | None,
        write_index: list[list[int]],
    ) -> None:
        for row, indices in zip(self.requests.rows(request_id), write_index):
            indices += [row] * query_length

    def begin_batch(self, requests: list[Any], *, is_graph_of_prompts: bool) -> None:
        """Takes the requests of the next forward pass, with their new tokens."""
        self.admission.look_at_adapters()
        counts = len(requests), sum(each.query_length > 1 for each in requests)
        self._counts = None if is_graph_of_prompts else counts
        if len(self.requests.stages) > 1:  # what transformers' tensors hold of rows is for one device
            self._rows = [self.requests.rows(each.state.request_id) for each in requests]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        told: dict[str, Any],
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Writes K and V of a layer's new tokens, and attends to all of their sequences', see `RowAttention`; `told` is
        what transformers tells a forward pass."""
        packed, window = functools.partial(self._packed, told), told.get("sliding_window")
        return self.attention.attend(
            layer, query, key, value, packed, window=window, scale=scale, softcap=softcap, sinks=sinks
        )

    def _packed(self, told: dict[str, Any], index: int) -> Packed:
        """Where the tokens of a forward pass are, in a layer group. Batches are padded by sequences without tokens."""
        kind, table = self.cache_allocators[self._groups[index].name], told["block_table"]
        cu_seqlens, cu_lengths = told["cu_seq_lens_q"], told["cu_seq_lens_k"][kind.layer_type]
        sequences, prompts = self._counts or (cu_seqlens.shape[0] - 1,) * 2
        if table is None:
            cu_seqlens, cu_lengths = cu_seqlens[: sequences + 1], cu_lengths[: sequences + 1]
        lengths = cu_lengths.diff()
        if self._rows is not None:
            rows = lengths.new_tensor([rows[index] for rows in self._rows])
        elif table is not None:
            rows = table[kind.index, :, 0].contiguous()
        else:  # each token has the row of its sequence
            homes = told["write_index"][kind.index]
            rows = homes[cu_seqlens[:-1].clamp(max=homes.shape[0] - 1)].int()
        max_prompts = max(prompts, 1) if table is None else 0
        return Packed(cu_seqlens, rows, lengths - cu_seqlens.diff(), lengths, max_prompts)


class GroupRows:
    """What transformers asks about a layer group, as of its blocks."""

    write_trash_index = read_trash_index = 0

    def __init__(self, admission: Admission, index: int, layer_type: str) -> None:
        self._admission, self.index, self.layer_type = admission, index, layer_type
        self.block_table: dict[str, list[int]] = {}

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        """Tokens that a row holds after a forward pass."""
        return past_length + query_length

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Pages that a request lacks on each device, in all groups."""
        return self._admission.pages_missing(request_id, past_length + query_length)
