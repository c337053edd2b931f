"""Compiled layers that are one program each: attention on rows is an operation in it.

A call that the compiler goes around would split a layer into several programs with guards of their own. So a layer is
entered by a frame that the compiler skips: it keeps what the pass tells attention, and the operation finds it there.
The layer is not told: it is the same program for all layers.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Collection, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.decorators import skip

CACHE = "vmmkv_cache"
"""The keyword by which attention is told of a cache: transformers' own, `cache`, does not reach it since 5.24."""


class LeftToAttention:
    """In the place of a cache: models hand K and V to it before attention since transformers 5.24."""

    def update(
        self, key: Tensor, value: Tensor, layer: int, kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return K and V as they are: attention writes them."""
        return key, value


class Inside(LeftToAttention):
    """What a layer that was entered gets as its cache."""


INSIDE = Inside()
_thread = threading.local()
"""`entered`: of the layer that the thread runs, attention of its cache, its number, and keywords for attention."""


def attend_inside(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float, softcap: float, window: int | None
) -> Tensor:
    """Attention of the layer that was entered, `[1, tokens, heads, v_head_dim]`; an operation where it is compiled."""
    run = _operation if torch.compiler.is_compiling() else _attend
    output: Tensor = run(query, key, value, sinks, scale, softcap, window)
    return output


def _attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float, softcap: float, window: int | None
) -> Tensor:
    attend, number, told = _thread.entered
    output: Tensor = attend(number, query, key, value, told | {"sliding_window": window}, scale, softcap, sinks)
    return output.contiguous()


_operation = torch.library.custom_op("vmmkv::attend_inside", _attend, mutates_args=())


@_operation.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


# ---------------------------------------------------------------------- in a model


def make_layers_whole(model: torch.nn.Module, layers: type, cache: Any, told: Collection[str]) -> None:
    """Have the layers of a model be entered in passes with a cache of a class, whose `attend` is called. Layers with
    several attentions, or whose `forward` other code has replaced, stay as they are.

    Args:
        layers: the class of the layers.
        told: the keywords that are for attention alone.
    """
    for module, forward in own_forwards(model):
        numbers: set[Any] = {getattr(each, "layer_idx", None) for each in module.modules()} - {None}
        if isinstance(module, layers) and len(numbers) == 1:
            forward = _with_code_of_its_own(forward)
            vars(module)["forward"] = MethodType(_Forward(forward, numbers.pop(), cache, told), module)


def split_layers(model: torch.nn.Module) -> None:
    """Undo `make_layers_whole`."""
    restore_forwards(model, _Forward)


def own_forwards(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, FunctionType]]:
    """The modules of a model that have the `forward` of their class, and that function."""
    for module in model.modules():
        forward = type(module).forward
        if isinstance(forward, FunctionType) and "forward" not in vars(module):
            yield module, forward


def restore_forwards(model: torch.nn.Module, kind: type) -> None:
    """Remove each `forward` of a kind, so that modules have that of their class again."""
    for module in model.modules():
        if isinstance(getattr(vars(module).get("forward"), "__func__", None), kind):
            del vars(module)["forward"]


@functools.cache
def _with_code_of_its_own(forward: FunctionType) -> FunctionType:
    """A copy of a function. Compilers keep a limited number of programs with each code, and layers of all classes share
    the code that checkpoints them."""
    code, known, closure = forward.__code__.replace(), forward.__globals__, forward.__closure__
    made = FunctionType(code, known, forward.__name__, forward.__defaults__, closure)
    made.__kwdefaults__ = forward.__kwdefaults__
    functools.update_wrapper(made, forward)
    return made


class _Forward:
    """The `forward` of a layer, which enters it."""

    def __init__(self, forward: FunctionType, number: int, cache: Any, told: Collection[str]) -> None:
        functools.update_wrapper(self, forward)
        self._forward, self._number, self._cache = forward, number, cache
        self._told = {*told} - inspect.signature(forward).parameters.keys()

    @skip
    def __call__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE)
        if not isinstance(cache, self._cache):
            return self._forward(module, *args, **kwargs)
        told = {name: kwargs.pop(name) for name in self._told & kwargs.keys()}
        kwargs["cache"] = kwargs[CACHE] = INSIDE
        _thread.entered = cache.attend, self._number, told
        try:
            return self._forward(module, *args, **kwargs)
        finally:
            _thread.entered = None
