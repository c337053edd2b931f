"""The layer groups of a model on rows: what its layers keep of a token is seen in a forward pass of one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..errors import DeviceError, UnsupportedError
from ..layout import KVLayout
from ..pool import FramePool
from .attention import kernels_take
from .left_to_attention import LeftToAttention
from .scaled_states import check_quantizable

logger = logging.get_logger(__name__)


class Group(NamedTuple):
    """Layers on a device that attend to as many tokens: their numbers, the window (0: all), what they keep of a token,
    whether there are kernels for all layers of the model, and where they are."""

    name: str
    layers: list[int]
    window: int
    layout: KVLayout
    has_kernels: bool
    device: torch.device


class Probe(LeftToAttention):
    """In the place of a cache: learns what layers keep of a token."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        """Those that attended, as often as they did."""
        self.shapes: dict[int, tuple[int, int, int]] = {}
        """By layer: KV heads, the width of K, and of V."""
        self.devices: dict[int, torch.device] = {}
        self.dtypes: set[torch.dtype] = set()
        self.has_kernels = True
        """Whether there are kernels for all layers."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
        """Takes a layer's K and V, `[1, heads, tokens, head_dim]`; attends to nothing."""
        self.layers.append(layer)
        self.shapes[layer] = key.shape[1], key.shape[3], value.shape[3]
        self.devices[layer] = key.device
        self.dtypes |= {key.dtype, value.dtype}
        self.has_kernels &= kernels_take(key, value)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


Run = Callable[[PreTrainedModel, torch.Tensor, Probe], None]
"""A forward pass of tokens, int64 `[1, tokens]`, which are their positions as well."""


def layer_groups(
    model: PreTrainedModel,
    kinds: Mapping[str, list[int]],
    windows: Mapping[str, int],
    run: Run,
    kv_dtype: torch.dtype | None,
) -> list[Group]:
    """The layer groups of a model, those of a device one behind the other, by what it hands to attention for one token.

    Args:
        kinds: its layers, by a name for each kind.
        windows: of kinds that have one, the tokens that a token attends to.
        kv_dtype: the 8-bit format that K and V are kept in, with scales; None: their own dtype.

    Raises:
        DtypeError: they cannot be kept so.
        UnsupportedError: its layers do not all keep K and V of their own, of one dtype, or ask a cache for more.
    """
    probe = Probe()
    with torch.no_grad(), torch.autocast(model.device.type, enabled=False):  # as in the thread that runs the model
        try:
            run(model, _tokens(model, 1), probe)
        except AttributeError as error:
            if error.obj is not probe:
                raise
            raise not_for_rows(model, f"layers that ask their cache for more than K and V ({error.name})") from None
    if sorted(probe.layers) != sorted(layer for layers in kinds.values() for layer in layers) or len(probe.dtypes) > 1:
        number = model.config.get_text_config().num_hidden_layers
        raise not_for_rows(model, f"{number} layers, of which not each keeps K and V once, of one dtype")
    (dtype,) = probe.dtypes
    if kv_dtype:
        check_quantizable(dtype, kv_dtype)
    kept, scales = (kv_dtype, "token_head") if kv_dtype else (dtype, None)
    groups = []
    for device, (name, all_layers) in itertools.product(dict.fromkeys(probe.devices.values()), kinds.items()):
        if layers := [layer for layer in all_layers if probe.devices[layer] == device]:
            heads, k_widths, v_widths = zip(*(probe.shapes[layer] for layer in layers))
            layout = KVLayout(len(layers), heads, k_widths, kept, v_widths, scales=scales)
            groups.append(Group(name, layers, windows.get(name, 0), layout, probe.has_kernels, device))
    return groups


def devices_of(groups: list[Group]) -> list[torch.device]:
    """The devices that layers are on, each once."""
    return list(dict.fromkeys(group.device for group in groups))


def check_pool(pool: FramePool | None, groups: list[Group]) -> None:
    """Raises `DeviceError` where layers are on other devices than the pool that they are to lie on."""
    devices = devices_of(groups)
    if pool is not None and devices != [pool.device]:
        raise DeviceError(
            f"got a pool on {pool.device}, and layers on {', '.join(map(str, devices))}. Give a pool that is there or, "
            "for a model on several devices, max_bytes, of which each has a pool of so many"
        )


def can_be_captured(model: PreTrainedModel, run: Run, tokens: int) -> bool:
    """Whether a forward pass of so many tokens can be a CUDA graph: some choose experts on the host, others go on on
    another device."""
    if model.device.type != "cuda":
        return False
    from ..driver.captures import trial_capture

    given = _tokens(model, tokens)
    try:
        with torch.no_grad(), trial_capture(model.device):
            run(model, given, Probe())
    except RuntimeError as error:
        what = "of prompts" if tokens > 1 else "of decode"
        logger.warning("%s runs without CUDA graphs %s: %s", type(model).__name__, what, error)
        return False
    return True


def _tokens(model: PreTrainedModel, count: int) -> torch.Tensor:
    return torch.zeros(1, count, dtype=torch.int64, device=model.device)


def not_for_rows(model: PreTrainedModel, what: str) -> UnsupportedError:
    """Why a model cannot run on rows."""
    return UnsupportedError(
        f"{type(model).__name__} has {what}; vmmkv.integrations.continuous_batching.disable(model), or transformers "
        "serve instead of vmmkv serve, leaves it to transformers"
    )
