"""What a model on rows keeps of tokens, and what that depends on beside tokens.

A forward pass of one token shows what its layers keep. K and V also depend on weights, and on the adapters that PEFT
has put into the model: torch tells `_note` of each module, parameter and buffer that is registered, and counts writes
to each tensor. So no step walks the module tree. Walks follow a registration in the tree, and precede a request if
there are adapters.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel
from transformers.generation.continuous_batching import cache as their_cache
from transformers.generation.continuous_batching.cache_allocators import SLIDING_ATTENTION
from transformers.utils import logging

from ...errors import DeviceError, UnsupportedError
from ...layout import KVLayout
from ...pool import FramePool
from ..attention import kernels_take
from ..stand_ins import check_quantizable

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

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, told: Any, **_: Any) -> Tensor:
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
    from ...driver.cuda import trial_capture

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


def bytes_of_token(groups: list[Group]) -> int:
    """Bytes of a token in all layers."""
    return sum(group.layout.token_bytes for group in groups)


class Weights:
    """The weights and adapters of a model. CUDA graphs read weights where they were, at their `addresses`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._changes, self._switches = model, 0, 0
        self._ids: set[int] | None = None
        self._walks = 0
        with _lock:
            _watching[:] = [each for each in _watching if each()] + [weakref.ref(self)]
        self._look()
        self._used = self._adapters()

    def _look(self) -> None:
        """Walk the module tree."""
        with _lock:
            self._ids, self._walks = None, max(self._walks - 1, 0)  # a registration meanwhile causes other walks
        modules: list[torch.nn.Module] = []
        while not modules:
            with suppress(RuntimeError):  # a dictionary of modules has changed its size meanwhile
                self._tensors = [*self._model.parameters(), *self._model.buffers()]
                modules = [*self._model.modules()]
        self._ids = {*map(id, modules)}
        self.addresses = addresses(self._tensors)
        self.devices = {each.device for each in self._tensors}
        self._counting = [each for each in self._tensors if not each.is_inference()]
        own = (each for each in modules if _has(each, "active_adapters"))
        self._tuned = [each for each in own if isinstance(each.active_adapters, list)]  # models have a method

    def change(self) -> None:
        """Take the weights as changed, and look where they are now."""
        self._changes += 1
        self._look()

    def _refresh(self, *, anyway: bool = False) -> None:
        """Look again if modules were registered since, or anyway, and count a change if there are other weights."""
        if anyway or self._walks:
            ids, places = [*map(id, self._tensors)], self.addresses
            self._look()
            self._changes += ids != [*map(id, self._tensors)] or places != self.addresses

    @property
    def has_adapters(self) -> bool:
        """Whether PEFT has put adapters into the model. CUDA graphs keep those that they were captured with."""
        self._refresh()
        return bool(self._tuned)

    def _adapters(self) -> Hashable:
        """The adapters that each layer uses or has merged, and how much of each."""
        return tuple(map(_adapters_of, self._tuned))

    def switches(self) -> int:
        """How often adapters have changed. Called before and behind each pass, so that no change goes unseen."""
        self._refresh()
        if (used := self._adapters()) != self._used:
            self._used, self._switches = used, self._switches + 1
        return self._switches

    def key(self) -> str:
        """A text that differs wherever K and V of the same tokens may differ. Writes through `.data` do not count."""
        self._refresh(anyway=bool(self._tuned))  # PEFT swaps what is in a tensor, and removes modules
        return repr((self._changes, sum(each._version for each in self._counting), self._adapters()))


_watching: list[weakref.ref[Weights]] = []  # the weights that are told of registrations
_lock = threading.RLock()  # guards that list, and how many walks are to come


def _note(parent: torch.nn.Module, *_: object) -> None:
    """Note a registration in the trees that its parent is part of: passes make lists of layers, which are not."""
    for each in [*_watching]:
        weights = each()
        if weights is not None and (weights._ids is None or id(parent) in weights._ids):
            with _lock:
                weights._walks = 2  # torch tells before it registers: the first walk may come too early


torch_module.register_module_module_registration_hook(_note)
torch_module.register_module_parameter_registration_hook(_note)
torch_module.register_module_buffer_registration_hook(_note)


def addresses(weights: Iterable[torch.Tensor]) -> list[int]:
    """The addresses of weights; of quantized or distributed ones those of the tensors that they are made of."""
    found = []
    for each in weights:
        if is_traceable_wrapper_subclass(each):
            parts = (getattr(each, name) for name in each.__tensor_flatten__()[0])
            found += addresses(part for part in parts if isinstance(part, torch.Tensor))
        else:
            found.append(each.data_ptr())
    return found


def _adapters_of(tuned: Any) -> Hashable:
    merged = tuned.merged_adapters if _has(tuned, "merged_adapters") else []
    scaling = vars(tuned).get("scaling", {})  # its own: some modules answer for the module inside
    return tuned.disable_adapters, (*merged,), tuple((name, scaling.get(name)) for name in tuned.active_adapters)


def _has(module: torch.nn.Module, name: str) -> bool:
    """Whether a module itself, or its class, has an attribute."""
    return hasattr(type(module), name) or name in vars(module)
