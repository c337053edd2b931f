"""Rotary position embedding that waits for attention: the kernel that writes K applies it.

A model's attention calls `apply_rotary_pos_emb`, and hands the results on. In a pass on rows it gets `Unrotated`
queries and keys instead, which attention on rows takes apart. Any other operation on them computes what
`apply_rotary_pos_emb` gives, and works with that. A model's function is tried out on random numbers first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...errors import UnsupportedAttentionError
from ..with_names import with_names
from .whole_layers import CACHE, own_forwards, restore_forwards

NAME = "apply_rotary_pos_emb"

Apply = Callable[..., tuple[Tensor, Tensor]]
"""Of query and key `[batch, heads, tokens, head_dim]`, cos and sin `[batch, tokens, rotary_dim]`."""


class Rotation:
    """Queries and keys of a layer, and the angles to turn them by, as the model's function was given them."""

    def __init__(self, apply: Apply, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor):
        self.query, self.key, self.cos, self.sin = query, key, cos, sin
        self._apply = apply
        self._result: tuple[Tensor, Tensor] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether no operation has seen the result, and perhaps changed it."""
        return self._result is None

    def result(self) -> tuple[Tensor, Tensor]:
        """The rotated query and key, computed once, by the model's own function."""
        if self._result is None:
            self._result = self._apply(self.query, self.key, self.cos, self.sin)
        return self._result


class Unrotated(Tensor):
    """The query (place 0) or key (1) of a `Rotation`, without memory: to all operations of torch it is the rotated
    one, and code that reads its memory without torch gets an error."""

    rotation: Rotation
    place: int

    @staticmethod
    def __new__(cls, rotation: Rotation, place: int) -> Unrotated:
        make: Callable[..., Unrotated] = torch.Tensor._make_wrapper_subclass
        states = (rotation.query, rotation.key)[place]
        return make(cls, states.shape, dtype=states.dtype, device=states.device)

    def __init__(self, rotation: Rotation, place: int) -> None:
        self.rotation, self.place = rotation, place

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in ALIKE:
            return super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]
        args, kwargs = tree_map_only(Unrotated, as_rotated, (args, kwargs or {}))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        raise UnsupportedAttentionError(
            f"{operation} was called from outside of Python on queries or keys whose rotary embedding waits for "
            "attention; vmmkv.integrations.continuous_batching.disable(model) leaves the model to transformers"
        )


ALIKE = {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device")}
"""Attributes that rotation does not change."""


def as_rotated(states: Tensor) -> Tensor:
    """The rotated states, of `Unrotated` ones as well."""
    return states.rotation.result()[states.place] if type(states) is Unrotated else states


def rotation_of(query: Tensor, key: Tensor) -> Rotation | None:
    """The pending rotation that a query and a key are of; None: there is none of both."""
    if type(query) is not Unrotated or type(key) is not Unrotated:
        return None
    alike = key.rotation is query.rotation and (query.place, key.place) == (0, 1)
    return query.rotation if alike and query.rotation.is_pending else None


# ---------------------------------------------------------------------- the model's function


def deferring(apply: Apply) -> Callable[..., Any]:
    """A function like `apply` that leaves rotation to attention where `vmmkv.kernels.RotateHalf` does the same."""

    def defer(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling() or kwargs or len(args) != 4 or not _can_wait(apply, *args):
            return apply(*args, **kwargs)
        rotation = Rotation(apply, *args)
        return Unrotated(rotation, 0), Unrotated(rotation, 1)

    return defer


def _can_wait(apply: Apply, query: Any, key: Any, cos: Any, sin: Any) -> bool:
    states = query, key, cos, sin
    if any(type(each) is not Tensor or each.dtype != query.dtype or each.device != query.device for each in states):
        return False
    if query.dim() != 4 or key.dim() != 4 or cos.dim() != 3:
        return False
    (batch, _, tokens, head_dim), rotary_dim = query.shape, cos.shape[2]
    if batch != 1 or key.shape != (1, key.shape[1], tokens, head_dim):
        return False
    if not cos.shape == sin.shape == (1, tokens, rotary_dim) or rotary_dim > head_dim:
        return False
    return rotates_halves(apply, head_dim, rotary_dim, query.dtype)


@functools.lru_cache(256)
def rotates_halves(apply: Apply, head_dim: int, rotary_dim: int, dtype: torch.dtype) -> bool:
    """Whether a function does what `RotateHalf` does, to the last bits in fp32, and as well as `dtype` has it."""
    generator = torch.Generator("cpu").manual_seed(head_dim)
    shapes = (1, 4, 3, head_dim), (1, 2, 3, head_dim), (1, 3, rotary_dim), (1, 3, rotary_dim)
    # Unlike a model's, the halves of cos and of sin differ: so it shows which of them is used where.
    given = [torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32) for shape in shapes]
    return all(_rotates_halves(apply, [states.to(each) for states in given]) for each in (torch.float32, dtype))


def _rotates_halves(apply: Apply, given: list[Tensor]) -> bool:
    tolerance = 32 * torch.finfo(given[0].dtype).eps
    cos, sin = (angles.double().unsqueeze(1) for angles in given[2:])
    try:
        with torch.no_grad():
            pairs = list(zip(apply(*(states.clone() for states in given)), given[:2], strict=True))
    except Exception:  # a function of another kind
        return False
    for found, states in pairs:
        turned, passed = states.double().tensor_split((cos.shape[-1],), -1)
        first, second = turned.chunk(2, -1)
        expected = torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, passed], -1)
        if (found.dtype, found.shape) != (states.dtype, states.shape):
            return False
        if not torch.allclose(found.double(), expected, tolerance, tolerance):
            return False
    return True


# ---------------------------------------------------------------------- the attention of a model


def defer_rotation(model: torch.nn.Module, cache: Any) -> None:
    """Have the layers that call `apply_rotary_pos_emb` leave it to attention, in passes with a cache of such a class.
    Layers whose `forward` other code has replaced stay as they are."""
    restore_rotation(model)
    layer_forward = functools.cache(functools.partial(_Forward, cache=cache))  # one for all layers: it is compiled once
    for module, forward in own_forwards(model):
        if NAME in _undeprecated(forward).__code__.co_names:
            vars(module)["forward"] = MethodType(layer_forward(forward), module)


def restore_rotation(model: torch.nn.Module) -> None:
    """Undo `defer_rotation`."""
    restore_forwards(model, _Forward)


def _undeprecated(forward: FunctionType) -> FunctionType:
    """A `forward` without the wrapper that renames deprecated keywords."""
    while forward.__globals__["__name__"] == "transformers.utils.deprecation":
        forward = vars(forward)["__wrapped__"]
    return forward


class _Forward:
    """The `forward` of a layer, and the same with rotation deferred."""

    def __init__(self, forward: FunctionType, cache: Any) -> None:
        functools.update_wrapper(self, forward)
        self._forward, self._cache = forward, cache
        forward = _undeprecated(forward)
        self._deferring = with_names(forward, **{NAME: deferring(forward.__globals__[NAME])})

    def __call__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        waits = isinstance(kwargs.get(CACHE), self._cache) and not torch.compiler.is_compiling()
        return (self._deferring if waits else self._forward)(module, *args, **kwargs)
