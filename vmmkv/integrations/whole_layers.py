"""Compiled layers that are one program each: attention on rows is an operation in it.

A call that the compiler goes around splits a layer into several programs, each with guards that are evaluated in each
pass. So a layer is entered by a frame that the compiler skips: it keeps the keywords for attention, and the operation
finds them there. The layer does not get them, so that all layers are the same program.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Collection
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.decorators import skip

from .left_to_attention import CACHE, LeftToAttention

Attend = Callable[..., Any]
"""Takes a layer's number, query, key, value, the keywords for attention, scale, soft cap and sinks."""


class Entered(NamedTuple):
    """The layer that a thread runs."""

    attend: Attend
    number: int
    told: dict[str, Any]
    """The keywords for attention alone."""


class _Thread(threading.local):
    entered: Entered | None = None


_thread = _Thread()


class Inside(LeftToAttention):
    """The cache that a layer gets once it was entered."""


INSIDE = Inside()


def attend_inside(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attention of the layer that was entered, `[1, tokens, heads, v_head_dim]`; an operation where it is compiled."""
    run = _operation if torch.compiler.is_compiling() else _attend
    output: Tensor = run(query, key, value, sinks, scale, softcap, window)
    return output


def _attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float, softcap: float, window: int | None
) -> Tensor:
    entered = _thread.entered
    assert entered is not None
    told = entered.told | {"sliding_window": window}
    output: Tensor = entered.attend(entered.number, query, key, value, told, scale, softcap, sinks)
    return output.contiguous()


_operation = torch.library.custom_op("vmmkv::attend_inside", _attend, mutates_args=())


@_operation.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


# ---------------------------------------------------------------------- in a model


def make_layers_whole(model: torch.nn.Module, layers: type, cache: Any, told: Collection[str]) -> None:
    """Makes a model's layers whole, in forward passes with such a `cache`; not layers with attention of several
    numbers, or with a `forward` that was replaced already.

    Args:
        layers: their class.
        cache: a class, with an `attend` that is an `Attend`.
        told: the keywords that are for attention alone.
    """
    for module in model.modules():
        forward = type(module).forward
        if isinstance(module, layers) and isinstance(forward, FunctionType) and "forward" not in vars(module):
            numbers: set[Any] = {getattr(each, "layer_idx", None) for each in module.modules()} - {None}
            if len(numbers) == 1:
                forward = _with_code_of_its_own(forward)
                vars(module)["forward"] = MethodType(_Forward(forward, numbers.pop(), cache, told), module)


def split_layers(model: torch.nn.Module) -> None:
    """Undoes `make_layers_whole`."""
    for module in model.modules():
        if isinstance(getattr(vars(module).get("forward"), "__func__", None), _Forward):
            del vars(module)["forward"]


@functools.cache
def _with_code_of_its_own(forward: FunctionType) -> FunctionType:
    """The same function with a copy of its code: compilers keep a bounded number of programs with each code, and layers
    of all classes share the code that checkpoints them."""
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
        _thread.entered = Entered(cache.attend, self._number, told)
        try:
            return self._forward(module, *args, **kwargs)
        finally:
            _thread.entered = None
