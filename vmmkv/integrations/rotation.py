"""Rotary position embedding that waits for attention: the kernel that writes K applies it on the way.

The `forward` of a model's attention calls `apply_rotary_pos_emb`, and hands its results on. In a forward pass on rows
it gets `Unrotated` queries and keys instead. Attention takes them apart; to whatever else looks at them they are what
`apply_rotary_pos_emb` makes of them, which is computed then. So nothing depends on what a model does in between; and
what its function computes is tried out before anything waits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map_only

from ..errors import UnsupportedAttentionError
from .left_to_attention import CACHE
from .with_names import with_names

NAME = "apply_rotary_pos_emb"
"""What models call it."""

Apply = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""It takes query and key `[batch, heads, tokens, head_dim]`, cos and sin `[batch, tokens, rotary_dim]`."""


class Rotation:
    """Queries and keys of one layer, and the angles that are to turn them.

    Attributes:
        query, key, cos, sin: as `apply_rotary_pos_emb` was given them; batch is 1.
        is_pending: whether nobody has looked at the result, and perhaps changed it.
    """

    def __init__(self, apply: Apply, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        self._apply = apply
        self.query, self.key, self.cos, self.sin = query, key, cos, sin
        self._result: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def is_pending(self) -> bool:
        return self._result is None

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotated query and key, computed once, by the model's own function."""
        if self._result is None:
            self._result = self._apply(self.query, self.key, self.cos, self.sin)
        return self._result


class Unrotated(torch.Tensor):
    """The query or key of a `Rotation`: whatever is done with it is done with the rotated one.

    It has no memory of its own: who reads that without asking torch gets an error, never what is not rotated.
    """

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


ALIKE = {getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device")}
"""What is the same of a rotated one."""


def as_rotated(states: torch.Tensor) -> torch.Tensor:
    """What others than attention on rows are to see."""
    return states.rotation.result()[states.place] if type(states) is Unrotated else states


def rotation_of(query: torch.Tensor, key: torch.Tensor) -> Rotation | None:
    """What is still to be done with a query and its key; None: nothing, or not with both."""
    if type(query) is not Unrotated or type(key) is not Unrotated:
        return None
    rotation = query.rotation
    alike = key.rotation is rotation and rotation.is_pending and (query.place, key.place) == (0, 1)
    return rotation if alike else None


# ---------------------------------------------------------------------- in the place of the model's function


def deferring(apply: Apply) -> Callable[..., Any]:
    """In the place of `apply`: what waits for attention where that is known to do the same."""

    def defer(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.compiler.is_compiling() or kwargs or len(args) != 4 or not _can_wait(apply, *args):
            return apply(*args, **kwargs)
        rotation = Rotation(apply, *args)
        return Unrotated(rotation, 0), Unrotated(rotation, 1)

    return defer


def _can_wait(apply: Apply, query: Any, key: Any, cos: Any, sin: Any) -> bool:
    states = query, key, cos, sin
    if any(type(each) is not torch.Tensor for each in states):
        return False
    if any(each.dtype != query.dtype or each.device != query.device for each in states):
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
    """Whether a function does what `vmmkv.kernels.RotateHalf` says, as far as random numbers can tell: to the last bits
    in fp32, and in a dtype as well as that has it."""
    generator = torch.Generator("cpu").manual_seed(head_dim)
    shapes = (1, 4, 3, head_dim), (1, 2, 3, head_dim), (1, 3, rotary_dim), (1, 3, rotary_dim)
    # Halves of cos, and of sin, differ, unlike a model's: so it is known which of them is used where.
    given = [torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32) for shape in shapes]
    return all(_rotates_halves(apply, [states.to(each) for states in given]) for each in (torch.float32, dtype))


def _rotates_halves(apply: Apply, given: list[torch.Tensor]) -> bool:
    tolerance = 32 * torch.finfo(given[0].dtype).eps
    query, key, *angles = given
    try:
        with torch.no_grad():
            pairs = list(zip(apply(*(states.clone() for states in given)), (query, key), strict=True))
    except Exception:  # whatever it does, it is not that
        return False
    return all(
        found.dtype == states.dtype
        and found.shape == states.shape
        and torch.allclose(found.double(), _rotate_halves(states, *angles), tolerance, tolerance)
        for found, states in pairs
    )


def _rotate_halves(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """In float64."""
    rotary_dim, cos, sin = cos.shape[-1], cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    turned, passed = states.double().tensor_split((rotary_dim,), -1)
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, passed], -1)


# ---------------------------------------------------------------------- in the attention of a model


def defer_rotation(model: torch.nn.Module, cache: Any) -> None:
    """Has all layers of a model that call `apply_rotary_pos_emb` leave it to attention, in forward passes that are told
    of such a `cache`; all others are as before. Layers whose `forward` somebody else has replaced stay as they are."""
    restore_rotation(model)
    layer_forward = functools.cache(functools.partial(_Forward, cache=cache))  # one for all, of which one is compiled
    for module in model.modules():
        forward = type(module).forward
        if "forward" in vars(module) or not isinstance(forward, FunctionType):
            continue
        if NAME in _of_names_today(forward).__code__.co_names:
            vars(module)["forward"] = MethodType(layer_forward(forward), module)


def restore_rotation(model: torch.nn.Module) -> None:
    """Undoes `defer_rotation`."""
    for module in model.modules():
        if isinstance(getattr(vars(module).get("forward"), "__func__", None), _Forward):
            del vars(module)["forward"]


def _of_names_today(forward: FunctionType) -> FunctionType:
    """A `forward` without what renames deprecated keywords: transformers itself, on rows, gives none."""
    while forward.__globals__["__name__"] == "transformers.utils.deprecation":
        forward = vars(forward)["__wrapped__"]
    return forward


class _Forward:
    """The `forward` of a layer, of two kinds."""

    def __init__(self, forward: FunctionType, cache: Any) -> None:
        functools.update_wrapper(self, forward)
        self._forward, self._cache = forward, cache
        forward = _of_names_today(forward)
        self._deferring = with_names(forward, **{NAME: deferring(forward.__globals__[NAME])})

    def __call__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        waits = isinstance(kwargs.get(CACHE), self._cache) and not torch.compiler.is_compiling()
        return (self._deferring if waits else self._forward)(module, *args, **kwargs)
