"""The weights of a model: what K and V depend on beside tokens."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel


def addresses(weights: Iterable[torch.Tensor]) -> list[int]:
    """At which addresses weights are."""
    return [each.data_ptr() for each in _in_memory(weights)]


def _in_memory(weights: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """What has memory of its own: of weights that are quantized, or a process's share, the tensors that they are made
    of."""
    for each in weights:
        if is_traceable_wrapper_subclass(each):
            parts = (getattr(each, name) for name in each.__tensor_flatten__()[0])
            yield from _in_memory(part for part in parts if isinstance(part, torch.Tensor))
        else:
            yield each


def tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """The weights of a model: its buffers, too, which are what some quantized layers have, and biases of experts."""
    return [*model.parameters(), *model.buffers()]


def counting_writes(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of which torch counts how often they were written to."""
    return [each for each in weights if not each.is_inference()]


def writes(weights: Iterable[torch.Tensor]) -> int:
    """How often these have been written to, of those of `counting_writes`: not through `.data`."""
    return sum(map(attrgetter("_version"), weights))


def devices(model: torch.nn.Module) -> set[torch.device]:
    """The devices that the weights of a model are on."""
    return {each.device for each in model.parameters()}


def has_adapters(model: Any) -> bool:
    """Whether PEFT has put adapters into a model, or into one that is inside."""
    if _has(model, "peft_config"):
        return True
    return isinstance(model, PreTrainedModel) and any(map(has_adapters, model.children()))


def adapters(model: Any) -> Hashable:
    """The adapters that PEFT has put into a model, and uses or has merged, and how much of each; None where it has put
    none."""
    if not has_adapters(model):
        return None
    those = (each for each in model.modules() if _has(each, "active_adapters"))
    tuned = [each for each in those if isinstance(each.active_adapters, list)]  # and no method, as models have it
    return tuple((each.disable_adapters, *_merged(each), *_parts(each)) for each in tuned)


def _merged(tuned: Any) -> list[str]:
    """The adapters that are merged into a layer, which then uses these and no others."""
    return tuned.merged_adapters if _has(tuned, "merged_adapters") else []


def _parts(tuned: Any) -> Iterator[tuple[str, Any]]:
    """The adapters that a layer uses, and by what it multiplies what comes of each."""
    scaling = vars(tuned).get("scaling", {})  # its own: some answer for the module inside
    return ((name, scaling.get(name)) for name in tuned.active_adapters)


def _has(module: torch.nn.Module, name: str) -> bool:
    """Whether a module's class, or it itself, has an attribute. To ask a module for what it has not takes long, and
    each step asks thousands."""
    return hasattr(type(module), name) or name in vars(module)
