"""K and V of all requests, in rows: what transformers asks of its `PagedAttentionCache`.

transformers' table of blocks has one column, the row of each request. Attention calls `RowCache.attend`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching import cache as their_cache
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.utils import stream_context

from ...cache import KVCache
from ...core.addresses import ADDRESS_LIMIT
from ...driver.host import memory as host_memory
from ...errors import UnsupportedAttentionError, UnsupportedError
from ...pool import FramePool
from .attention import Packed, kept_in, write_and_attend
from .config import ALIKE
from .model import Group, LeftToAttention, Options, Weights, bytes_of_token, devices_of
from .requests import Ranks, Requests

MAX_BATCH_TOKENS = 8192  # tokens of a forward pass at most, as transformers has it without a setting
WARMUP = "__warmup_"
"""How transformers names the requests that it makes up for a warm-up; their tokens were never computed."""


class RowCache(LeftToAttention, their_cache.PagedAttentionCache):
    """The rows of a model. `theirs` are the arguments of transformers' cache."""

    def __init__(self, options: Options, groups: list[Group], weights: Weights, **theirs: Any) -> None:
        batching, ranks = theirs["continuous_batching_config"], Ranks(theirs["distributed_helper"])
        self.device, self.options, self.weights, self._groups = theirs["device"], options, weights, groups
        self.stream: Any = None  # the stream of forward passes
        self.kv_caches = make_caches(options, groups, batching, ranks)
        windows = [group.window for group in groups]
        self.requests = Requests(self.kv_caches, windows, weights, ranks, reuse=batching.allow_block_sharing)
        ranks.check_alike(  # else processes would choose other requests, or see other tokens
            page_size=self.kv_caches[0].pool.page_size,
            bytes_of_a_token=bytes_of_token(groups),
            kv_dtype=options.kv_dtype,
            max_seq_len=options.max_seq_len,
            **{name: getattr(batching, name) for name in ALIKE},
        )
        self._layers = {
            layer: (index, kept_in(cache, number))
            for index, (group, cache) in enumerate(zip(groups, self.kv_caches))
            for number, layer in enumerate(group.layers)
        }
        self._packed: dict[int, Packed] = {}  # by layer group: where the tokens of the current pass are
        self._counts: tuple[int, int] | None = None
        """Sequences of the next pass, and those with more than one new token; None: as many as its tensors have room
        for, as in a CUDA graph, which serves other batches too."""
        self._rows: list[list[int]] | None = None
        """The rows of each request of the next pass, if layers are on several devices."""
        self._computed: dict[str, tuple[RequestState, int]] = {}
        """By request: tokens that it holds, of which others may not know some."""
        # What transformers reads from a cache.
        self.cache_allocators: dict[str, Any] = {
            name: GroupRows(self.requests, index, name)
            for index, name in enumerate(dict.fromkeys(group.name for group in groups))
        }
        self.use_prefix_sharing = self.requests.reuse
        self.max_batch_tokens = batching.max_batch_tokens or MAX_BATCH_TOKENS
        tokens = min(
            caches[0].pool.limit_pages * caches[0].page_size // sum(each.layout.token_bytes for each in caches)
            for caches in self.requests.pools
        )
        self.num_blocks = tokens // batching.page_size
        self.max_blocks_per_request, self.max_decode_fast_path_length = 1, options.max_seq_len
        self.max_tokens_read, self.read_cache_limit = 0, None
        self.pool: Any = SimpleNamespace(try_to_free_sectors=lambda: None)

    # ------------------------------------------------------------------ admission

    def begin_step(self, active: list[RequestState]) -> None:
        """Make room for the next token of all requests that decode."""
        decoding = [(each.request_id, each.position_offset) for each in active if each.status == RequestStatus.DECODING]
        with stream_context(self.stream):
            self.requests.begin_step(decoding)

    def can_store_request_tokens(self, state: RequestState, request_len: int, dry_run: bool = False) -> bool:
        name, held = state.request_id, state.position_offset
        if request_len == 1 and name in self.requests.grown:
            return True
        tokens, is_made_up = held + request_len, name.startswith(WARMUP)
        if is_made_up and tokens > self.options.max_seq_len:
            return False
        if dry_run:
            return self.requests.fits(name, tokens)
        if held and not is_made_up and name not in self.requests:
            raise UnsupportedError(f"request {name} has computed {held} tokens, and no row here holds them")
        with stream_context(self.stream):
            if is_made_up:
                self.requests.begin_step(())  # one that had no room says nothing about the next, which may be smaller
            has_room = self.requests.admit(name, held, tokens, expected=len(state.initial_tokens))
            if is_made_up and not has_room:
                self.requests.end(name)
            return has_room

    def count_storable_requests(self, list_blocks_needed: list[dict[str, Any]]) -> int:
        return self.requests.count_that_fit(next(iter(needed.values())) for needed in list_blocks_needed)

    def compute_free_capacity(self, relative: bool = True) -> int | float:
        return self.requests.free_capacity(relative)

    def evict_cached_blocks(self) -> bool:
        return False  # cached prefixes give way when pages are needed

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        self._commit(request_id)
        with stream_context(self.stream):
            self.requests.end(request_id)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        self._counts = None  # a warm-up may follow
        self._computed.clear()
        with stream_context(self.stream):
            self.requests.end_all()
            if clear_ledgers:
                self.requests.trim()

    def reset(self) -> None:
        self.free_all_requests(clear_ledgers=True)

    # ------------------------------------------------------------------ prefixes and forks

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        with stream_context(self.stream):
            return self.requests.begin(request_id, len(prompt_ids), prompt_ids) or 0

    def count_new_complete_blocks(self, state: RequestState, request_len: int) -> dict[str, int]:
        return {"tokens": state.position_offset + request_len} if self.use_prefix_sharing else {}

    def mark_complete_blocks(self, state: RequestState, complete_blocks: dict[str, int]) -> None:
        if self.use_prefix_sharing:
            self._computed[state.request_id] = state, complete_blocks["tokens"]
            if len(state.generated_tokens) <= 1:  # others may wait for a prompt; an answer is committed when it ends
                self._commit(state.request_id)

    def _commit(self, name: str) -> None:
        """Let others begin with what a request has computed."""
        state, tokens = self._computed.pop(name, (None, 0))
        if state and self.requests.has_news(name, tokens, is_over=state.status == RequestStatus.FINISHED):
            with stream_context(self.stream):
                self.requests.commit(name, (state.initial_tokens + state.generated_tokens)[:tokens])

    def prepare_fork_request(self, src_state: RequestState, dst_req_ids: list[str], _: Any) -> list[str]:
        with stream_context(self.stream):
            return self.requests.fork(src_state.request_id, dst_req_ids)

    def perform_cache_copy(self, copy_src_and_dst: dict[str, Any]) -> None:
        pass  # a fork has copied what it does not share

    # ------------------------------------------------------------------ forward passes

    def fill_block_table(self, request_id: str, past_length: int, query_length: int, block_table: Tensor) -> None:
        pass  # `RowBatch` takes the rows of all requests at once

    def extend_read_and_write_indices(
        self, request_id: str, past_length: int, query_length: int, read_index: Any, write_index: list[list[int]]
    ) -> None:
        for row, indices in zip(*self.requests.rows([request_id]), write_index):
            indices += [row] * query_length

    def begin_pass(self, requests: list[Any], *, is_graph_of_prompts: bool) -> None:
        """Take the requests of the next forward pass, with their new tokens."""
        self.weights.switches()
        counts = len(requests), sum([each.query_length > 1 for each in requests])
        self._counts = None if is_graph_of_prompts else counts
        if len(self.requests.pools) > 1:  # what transformers' tensors hold of rows is on one device
            self._rows = self.requests.rows([each.state.request_id for each in requests])

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, told: dict[str, Any], **options: Any
    ) -> Tensor:
        """Write K and V of new tokens, `[1, num_kv_heads, tokens, head_dim]`, into rows, and attend to all tokens of
        their sequences, in a pass that transformers has `told` where its tokens are: `[1, tokens, num_heads,
        v_head_dim]`. Options are those of `write_and_attend`. Raises `UnsupportedAttentionError` if the layer attends
        to another window than its group."""
        index, kept = self._layers[layer]
        group, window = self._groups[index], told.get("sliding_window")
        if window is not None and window != group.window:
            raise UnsupportedAttentionError(
                f"layer {layer} attends to {window} tokens, and its config says {group.window or 'all'} of them"
            )
        if layer == group.layers[0]:  # in the pass itself: a CUDA graph computes it anew
            self._packed[index] = self._pack(index, told)
        query, key, value = [each.squeeze(0).transpose(0, 1) for each in (query, key, value)]
        packed = self._packed[index]
        return write_and_attend(query, key, value, kept, packed, window=group.window, **options).unsqueeze(0)

    def _pack(self, index: int, told: dict[str, Any]) -> Packed:
        """Where the tokens of a pass are in a layer group. Padding is sequences without tokens."""
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
    """What transformers asks of the allocator of a kind of layers."""

    write_trash_index = read_trash_index = 0

    def __init__(self, requests: Requests, index: int, layer_type: str) -> None:
        self._requests, self.index, self.layer_type = requests, index, layer_type
        self.block_table: dict[str, list[int]] = {}

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        """Tokens that a row holds after a forward pass."""
        return past_length + query_length

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Pages that a request lacks on each pool, in all groups."""
        return self._requests.pages_missing(request_id, past_length + query_length)


class RowOffloading(OffloadingManager):
    """Has requests begin anew where memory is short. What they had computed are prefixes, which may go to the host."""

    def __init__(self, cpu_offload_space_gib: float | None, **kwargs: Any) -> None:
        super().__init__(cpu_offload_space_gib=0.0, **kwargs)

    def _compute_num_cpu_sectors(self, *args: Any) -> int:
        return 0


def make_caches(options: Options, groups: list[Group], config: Any, ranks: Ranks) -> list[KVCache]:
    """Make the cache of each group, those of a device on one pool, with the same limit in every process."""
    token_bytes, has_windows = bytes_of_token(groups), any(group.window for group in groups)
    most_rows = ADDRESS_LIMIT // 2 // (options.max_seq_len * token_bytes)
    host_bytes = config.cpu_offload_space_safety_threshold * host_memory()[1]
    if config.cpu_offload_space is not None:
        host_bytes = config.cpu_offload_space * 2**30
    pools: dict[torch.device, FramePool] = {}
    caches: list[KVCache] = []

    def make() -> int:
        for device in devices_of(groups):
            if device.type == "cuda" and options.pool is None:
                torch.cuda.empty_cache()  # after a training step torch has nearly all of a GPU; shares are of the rest
            limit = options.max_bytes
            if limit is None and config.num_blocks is None:
                limit = f"{100 * config.max_memory_percent:g}%"
            elif limit is None:
                of_device = bytes_of_token([group for group in groups if group.device == device])
                limit = int(config.num_blocks * config.page_size * of_device)
            pools[device] = options.pool or FramePool(limit, device=device)
        caches[:] = [
            KVCache(
                group.layout,
                max(min(2 * config.max_requests_per_batch, most_rows), 1),
                options.max_seq_len,
                pool=pools[group.device],
                large_frames=not group.window,
                host_bytes=int(host_bytes) * group.layout.token_bytes // token_bytes,
                host_priority=None if has_windows else 30,
            )
            for group in groups
        ]
        return caches[0].pool.limit_pages

    here, least = ranks.attempt(make)
    if options.pool is None and least < here:
        caches[0].pool.set_limit(int(least) * caches[0].pool.page_size)
    return caches
