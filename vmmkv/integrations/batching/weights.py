"""What K and V depend on beside tokens: the weights of a model, and the adapters that PEFT has put into it.

torch tells `_note` of each module, parameter and buffer that is registered, and counts writes to each tensor. So no
step walks the module tree. Walks follow a registration in the tree, and precede a request if there are adapters.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


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

    def note(self, parent: torch.nn.Module) -> None:
        """Note a registration in a module, if it is part of the tree: passes make lists of layers, which are not."""
        if self._ids is None or id(parent) in self._ids:
            with _lock:
                self._walks = 2  # torch tells before it registers: the first walk may come too early

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
    for each in [*_watching]:
        if (weights := each()) is not None:
            weights.note(parent)


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
