"""The weights of a model: what K and V depend on beside tokens."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from operator import attrgetter
from typing import Any

import torch


def addresses(model: torch.nn.Module) -> list[int]:
    """At which addresses the weights of a model are."""
    return [each.data_ptr() for each in tensors(model)]


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
    """Whether PEFT has put adapters into a model."""
    return hasattr(model, "peft_config")


def adapters(model: Any) -> Hashable:
    """The adapters that PEFT has put into a model, and uses, and how much of each; None where it has put none."""
    if not has_adapters(model):
        return None
    tuned = [each for each in model.modules() if isinstance(getattr(each, "active_adapters", None), list)]
    return tuple((each.disable_adapters, *_parts(each)) for each in tuned)


def _parts(tuned: Any) -> Iterator[tuple[str, Any]]:
    """The adapters that a layer uses, and by what it multiplies what comes of each."""
    scaling = getattr(tuned, "scaling", {})
    return ((name, scaling.get(name)) for name in tuned.active_adapters)
