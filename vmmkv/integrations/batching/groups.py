"""The layer groups of a model on rows, and their caches: a forward pass of one token shows what its layers keep."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.continuous_batching import cache as their_cache
from transformers.generation.continuous_batching.cache_allocators import SLIDING_ATTENTION
from transformers.utils import logging

from ...cache import KVCache
from ...core.addresses import ADDRESS_LIMIT
from ...errors import DeviceError, UnsupportedError
from ...layout import KVLayout
from ...pool import FramePool
from ..attention import kernels_take
from ..stand_ins import check_quantizable
from .config import budget, host_bytes
from .requests import Ranks

logger = logging.get_logger(__name__)

CACHE = "vmmkv_cache"
"""The keyword by which attention is told of a cache: transformers' own, `cache`, does not reach it since 5.24."""


@dataclass(frozen=True)
class Options:
    """The arguments of `enable`."""

    max_bytes: float | str | None
    pool: FramePool | None
    max_seq_len: int
    idle_seconds: float
    kv_dtype: torch.dtype | None
    persistent: bool = False
    raise_errors: bool = False


class Group(NamedTuple):
    """Layers on a device that attend to as many tokens."""

    name: str  # transformers' name of their kind
    layers: list[int]
    window: int  # tokens that a token attends to, itself included; 0: all before it
    layout: KVLayout
    has_kernels: bool  # there are kernels for all layers of the model
    device: torch.device


class LeftToAttention:
    """In the place of a cache: models hand K and V to it before attention since transformers 5.24."""

    def update(self, key: Tensor, value: Tensor, layer: int, kwargs: Any = None) -> tuple[Tensor, Tensor]:
        """Return K and V as they are: attention writes them."""
        return key, value


class Probe(LeftToAttention):
    """In the place of a cache: learns what layers keep of a token."""

    def __init__(self) -> None:
        self.layers: list[int] = []  # each layer that attended, as often as it did
        self.kept: dict[int, tuple[torch.device, int, int, int]] = {}
        """By layer: its device, KV heads, the width of K, and of V."""
        self.dtypes: set[torch.dtype] = set()
        self.has_kernels = True

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
        """Note a layer's K and V, `[1, heads, tokens, head_dim]`, and attend to nothing."""
        self.layers.append(layer)
        self.kept[layer] = key.device, key.shape[1], key.shape[3], value.shape[3]
        self.dtypes |= {key.dtype, value.dtype}
        self.has_kernels &= kernels_take(key, value)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def groups_of(model: PreTrainedModel, kv_dtype: torch.dtype | None) -> list[Group]:
    """The layer groups of a model, those of a device one behind the other. `kv_dtype` is the 8-bit format that K and V
    are kept in, with scales; None: their own dtype."""
    config, probe = model.config.get_text_config(), Probe()
    try:
        kinds = their_cache.group_layers_by_attn_type(config)
    except ValueError as error:
        raise not_for_rows(model, f"a kind of layer that keeps something else ({error})") from None
    with torch.no_grad(), torch.autocast(model.device.type, enabled=False):  # as in the thread that runs the model
        try:
            _run(model, _zeros(model, 1), probe)
        except AttributeError as error:
            if error.obj is not probe:
                raise
            raise not_for_rows(model, f"layers that ask their cache for more than K and V ({error.name})") from None
    if sorted(probe.layers) != sorted(layer for layers in kinds.values() for layer in layers) or len(probe.dtypes) > 1:
        what = f"{config.num_hidden_layers} layers, of which not each keeps K and V once, of one dtype"
        raise not_for_rows(model, what)
    (dtype,) = probe.dtypes
    if kv_dtype:
        check_quantizable(dtype, kv_dtype)
    kept, scales = (kv_dtype, "token_head") if kv_dtype else (dtype, None)
    groups = []
    for device, (name, of_kind) in itertools.product(
        dict.fromkeys(at for at, *_ in probe.kept.values()), kinds.items()
    ):
        if layers := [layer for layer in of_kind if probe.kept[layer][0] == device]:
            _, heads, k_widths, v_widths = zip(*(probe.kept[layer] for layer in layers))
            layout = KVLayout(len(layers), heads, k_widths, kept, v_widths, scales=scales)
            window = config.sliding_window if name == SLIDING_ATTENTION else 0
            groups.append(Group(name, layers, window, layout, probe.has_kernels, device))
    return groups


def _run(model: PreTrainedModel, tokens: Tensor, probe: Probe) -> None:
    """Run a model on tokens, as continuous batching calls it."""
    told = {"block_table": None, CACHE: probe}
    model(input_ids=tokens, position_ids=tokens, cache=probe, use_cache=False, **told)


def _zeros(model: PreTrainedModel, count: int) -> Tensor:
    return torch.zeros(1, count, dtype=torch.int64, device=model.device)


def can_be_captured(model: PreTrainedModel, count: int) -> bool:
    """Whether a forward pass of so many tokens can be a CUDA graph: some models choose experts on the host."""
    if model.device.type != "cuda":
        return False
    from ...driver.captures import trial_capture

    tokens = _zeros(model, count)
    try:
        with torch.no_grad(), trial_capture(model.device):
            _run(model, tokens, Probe())
    except RuntimeError as error:
        what = "of prompts" if count > 1 else "of decode"
        logger.warning("%s runs without CUDA graphs %s: %s", type(model).__name__, what, error)
        return False
    return True


def devices_of(groups: list[Group]) -> list[torch.device]:
    """The devices that layers are on, each once."""
    return list(dict.fromkeys(group.device for group in groups))


def check_pool(pool: FramePool | None, groups: list[Group]) -> None:
    """Raise `DeviceError` if layers are on other devices than the pool."""
    devices = devices_of(groups)
    if pool is not None and devices != [pool.device]:
        raise DeviceError(
            f"got a pool on {pool.device}, and layers on {', '.join(map(str, devices))}. Give a pool that is there or, "
            "for a model on several devices, max_bytes, of which each has a pool of so many"
        )


def not_for_rows(model: PreTrainedModel, what: str) -> UnsupportedError:
    """The error of a model that cannot run on rows."""
    return UnsupportedError(
        f"{type(model).__name__} has {what}; vmmkv.integrations.continuous_batching.disable(model), or transformers "
        "serve instead of vmmkv serve, leaves it to transformers"
    )


def make_caches(options: Options, groups: list[Group], config: Any, ranks: Ranks) -> list[KVCache]:
    """Make the cache of each group, those of a device on one pool, with the same limit in every process."""
    caches: list[KVCache] = []

    def make() -> int:
        caches[:] = _caches_here(options, groups, config)
        return caches[0].pool.limit_pages

    here, least = ranks.attempt(make)
    if options.pool is None and least < here:
        caches[0].pool.set_limit(int(least) * caches[0].pool.page_size)
    return caches


def _caches_here(options: Options, groups: list[Group], config: Any) -> list[KVCache]:
    pools: dict[torch.device, FramePool] = {}
    for device in devices_of(groups):
        if device.type == "cuda" and options.pool is None:
            torch.cuda.empty_cache()  # after a training step torch has nearly all of a GPU, and shares are of the rest
        limit = options.max_bytes
        if limit is None:
            limit = budget(config, bytes_of_token([group for group in groups if group.device == device]))
        pools[device] = options.pool or FramePool(limit, device=device)
    token_bytes, has_windows = bytes_of_token(groups), any(group.window for group in groups)
    most_rows = ADDRESS_LIMIT // 2 // (options.max_seq_len * token_bytes)
    return [
        KVCache(
            group.layout,
            max(min(2 * config.max_requests_per_batch, most_rows), 1),
            options.max_seq_len,
            pool=pools[group.device],
            large_frames=not group.window,
            host_bytes=host_bytes(config) * group.layout.token_bytes // token_bytes,
            host_priority=None if has_windows else 30,
        )
        for group in groups
    ]


def bytes_of_token(groups: list[Group]) -> int:
    """Bytes of a token in all layers."""
    return sum(group.layout.token_bytes for group in groups)
