"""Plans: what a call's tensors come to, prepared once and found again by one look at the tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Number
from operator import is_, itemgetter
from types import NoneType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch._C._dynamo.guards import TensorGuards

from .arguments import LATENT_DIM, LATENT_V_DIM, Maps
from .checks import (
    ALIGNMENT, Geometry, Key, check_attention, check_block_table, check_indices, check_integer, check_sinks, keys,
    refuse_alignment,
)  # fmt: skip
from .compiler import Kernel
from .launches import Launch, Workspace, index_of, maps_of
from .memory import LOG2E

Found = TypeVar("Found")
Tensors = tuple[torch.Tensor | None, ...]
Picker = Callable[[Tensors], tuple[torch.Tensor, ...]]

RECENT = 4  # plans that are found at one look: of layers that take turns there are few kinds


class Known(NamedTuple):
    """A plan, and how to see whether it is that of a call."""

    options: tuple[Any, ...]
    distinct: Picker  # the tensors that are given, each once: torch compares none that is there twice
    twins: list[tuple[int, int]]  # where one is again, and where it was first
    missing: Picker
    nones: tuple[None, ...]  # as many as are missing
    check: Callable[..., bool]  # whether distinct tensors look like those of the earlier call
    plan: Any


def pick(where: Sequence[int]) -> Picker:
    """A function that picks the items at some places, in a tuple."""
    if len(where) > 1:
        return itemgetter(*where)
    return lambda tensors: tuple([tensors[place] for place in where])  # type: ignore[misc]


def same(tensors: Tensors, twins: list[tuple[int, int]]) -> bool:
    """Whether tensors that were the same are again."""
    return all(tensors[again] is tensors[first] for again, first in twins)


def addresses_of(tensors: Tensors) -> list[int]:
    """The addresses of the tensors that are given."""
    return [each.data_ptr() for each in tensors if each is not None]


def check_memory(tensors: Tensors) -> None:
    """Raises `TypeError` for one that has numbers, and no address: to kernels it would be one that is not given."""
    for each in tensors:
        if each is not None and each.numel() and not each.data_ptr():
            raise TypeError(
                f"got {type(each).__name__} {list(each.shape)} without memory of its own; tensors must be plain ones: "
                "of a DTensor its to_local()"
            )


def know(tensors: Tensors, options: tuple[Any, ...], plan: Any) -> Known:
    """A plan, to be found for tensors like these."""
    names = [*map(id, (*tensors, None))]
    *firsts, nothing = map(names.index, names)  # where each tensor is first
    missing = [place for place, first in enumerate(firsts) if first == nothing]
    distinct = pick([place for place, first in enumerate(firsts) if first == place != nothing])
    twins = [(place, first) for place, first in enumerate(firsts) if first not in (place, nothing)]
    guards = TensorGuards(*distinct(tensors), dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return Known(options, distinct, twins, pick(missing), (None,) * len(missing), guards.check, plan)


class Plans(Generic[Found]):
    """The plans of a function's calls: `make` checks given options and `keys`, and makes their plan, or has it.

    To make the key of ten tensors takes longer than to launch a kernel. torch compares tensors with those of an earlier
    call, in all that a key says and more, in a fraction of the time. So the last few plans are tried that way first.
    """

    def __init__(self, make: Callable[..., Found]) -> None:
        self._make = make
        self._recent: tuple[Known, ...] = ()

    def find(self, tensors: Tensors, *options: Any) -> tuple[Found, list[int]]:
        """The plan for tensors, some of which may be missing, and options, which are numbers, strings and None; and the
        addresses of the tensors that are there. Raises what `make` does."""
        # Replaced as a whole: other threads see the old or the new.
        for known, distinct, twins, missing, nones, check, plan in self._recent:
            given = distinct(tensors)
            is_missing = map(is_, missing(tensors), nones)  # to ask torch whether a tensor equals None takes long
            if known == options and check(*given) and all(is_missing) and (not twins or same(tensors, twins)):
                return plan, addresses_of(tensors if twins else given)
        if not all(isinstance(option, (int, float, str, NoneType, Number)) for option in options):
            raise TypeError(f"got {options}; each must be a number or a string: others may change unseen")
        plan, addresses = self._make(*options, keys(tensors)), addresses_of(tensors)
        if not all(addresses):
            check_memory(tensors)
        self._recent = know(tensors, options, plan), *self._recent[: RECENT - 1]
        return plan, addresses


LARGEST_SOFTCAP = 10_000  # scores are this times a `tanh` that is exact to 2**-22: of larger ones too little is left
Keys = tuple[Key | None, ...]  # of what a call is given, in the order of `Geometries`


class Geometries(NamedTuple):
    """The tensors of a call, without data, in the order of `Addresses`."""

    q: Geometry
    k: Geometry
    v: Geometry
    out: Geometry
    cu_seqlens: Geometry | None
    seq_lens: Geometry
    rows: Geometry | None
    starts: Geometry | None
    block_table: Geometry | None
    sinks: Geometry | None
    k_scales: Geometry | None
    v_scales: Geometry | None


class Plan(NamedTuple):
    """The kernel for a call, its grid, and its workspace."""

    kernel: Kernel
    blocks: tuple[int, int]
    partial_bytes: int = 0
    counters: int = 0
    box_tokens: int = 0  # of a copy by tensor map; 0: the kernel takes no tensor maps


def choose_kernel(kernel: str, given: Geometries, best: tuple[str, ...]) -> str:
    """The kernel to use: what was asked for, or else the best that the device has; `ValueError` if it cannot be."""
    possible, dtype, device = ["plain"], given.q.dtype, given.q.device
    if dtype != torch.float32:  # tensor cores would round it
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
        if capability < (8, 0):
            raise ValueError(f"got {device} of compute capability {capability}; it must be 8.0 or later")
        possible = [name for name in best if name == "mma" or capability == (9, 0)] + possible
    if kernel == "auto":
        return possible[0]
    if kernel not in possible:
        raise ValueError(
            f"got kernel {kernel!r} for q of {dtype}, k of {given.k.dtype} on {device} and these strides; it must be "
            f"one of auto, {', '.join(possible)}"
        )
    return kernel


def check_call(keys: Keys) -> Geometries:
    """Raises `ValueError` or `TypeError` where tensors do not fit together."""
    geometries = Geometries(*[Geometry._make(key) if key else None for key in keys])  # type: ignore[arg-type]
    q, k, v, out, cu_seqlens, seq_lens, rows, starts, block_table, sinks, k_scales, v_scales = geometries
    check_attention(q, k, v, out, k_scales, v_scales)
    given = {"seq_lens": seq_lens, "rows": rows, "starts": starts}
    check_indices(q.device, seq_lens.shape[:1], **{name: tensor for name, tensor in given.items() if tensor})
    if cu_seqlens:
        check_indices(q.device, (seq_lens.shape[0] + 1,), cu_seqlens=cu_seqlens)
    if block_table:
        check_block_table(q.device, block_table, k)
    batch, there = seq_lens.shape[0], (block_table or k).shape[0]
    if rows is None and batch > there:
        raise ValueError(f"got {batch} sequences without rows, of which there are {there}; rows must be given")
    if batch == 0 and q.shape[0]:
        raise ValueError(f"got q {list(q.shape)} and no sequences; there must be one for each token")
    if sinks:
        check_sinks(sinks, q)
    return geometries


def output_like(q: torch.Tensor) -> torch.Tensor:
    """Room for the result: like `q`, but for latents, whose V is narrower than K."""
    return torch.empty_like(q) if q.shape[-1] != LATENT_DIM else q.new_empty(*q.shape[:-1], LATENT_V_DIM)


def sizes_of(given: Geometries) -> tuple[int, ...]:
    """The fields of `Sizes`."""
    q, k, v, out = given[:4]
    ragged = (0,) if given.cu_seqlens else ()  # then q has no dimension of sequences
    steps = (
        (q.dtype.itemsize, (*ragged, *q.strides[:-1])),
        (k.dtype.itemsize, (*k.strides[:3], *v.strides[:3])),
        (out.dtype.itemsize, (*ragged, *out.strides[:-1])),
        *((4, scales.strides if scales else (0, 0, 0)) for scales in (given.k_scales, given.v_scales)),
    )
    table = given.block_table.strides[0] * 4 if given.block_table else 0
    strides = [size * stride for size, strides in steps for stride in strides]
    return given.seq_lens.shape[0], k.shape[2], table, *strides


class Call(NamedTuple):
    """A plan with all its arguments but addresses."""

    launch: Launch
    workspace: Workspace | None  # where its parts and counters are, if it needs any
    maps: Callable[[int, int], Maps] | None  # tensor maps of K and V at two addresses, if the kernel takes them
    latents: bool  # V is a view of K


def prepare(
    plan: Plan, given: Geometries, scale: float | None, window: int, softcap: float, groups: tuple[int | None, ...] = ()
) -> Call:
    """A plan's launch for tensors of a geometry, with `Groups` if its kernel takes them; those that are None will be
    given."""
    head_dim, index = given.q.shape[-1], index_of(given.q.device)
    latents = head_dim == LATENT_DIM
    if latents and scale is None:
        raise ValueError("got no scale for latents; it follows from the width of the heads that they stand for")
    # Numbers of other types are equal to these, and would be rounded to theirs in a launch that all equal calls share.
    scale = head_dim**-0.5 if scale is None else float(scale)
    window, softcap = check_integer("window", window), float(softcap)
    inner, outer = scale / softcap if softcap else 1.0, (softcap or scale) * LOG2E
    least, most = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    if not (least <= inner <= most and least <= outer <= most and softcap <= LARGEST_SOFTCAP and 0 <= window < 1 << 63):
        raise ValueError(
            f"got scale {scale}, softcap {softcap} and window {window}; scale must be positive, the others not "
            f"negative, all finite, softcap at most {LARGEST_SOFTCAP}, and scale, or softcap and scale / softcap, "
            "must not be too small or too great for fp32, nor window for 64 bits"
        )
    maps = maps_of(given.k, given.v, plan.box_tokens) if plan.box_tokens else None
    addresses = [None if each else 0 for each in given]
    workspace = Workspace(index, plan.partial_bytes, plan.counters) if plan.counters else None
    room = (None, None) if workspace else (0, 0)
    fixed = *sizes_of(given), window, inner, outer
    arguments = (*[None] * (4 if maps else 0), *addresses, *room, *fixed, *groups)
    return Call(Launch(plan.kernel, plan.blocks, index, arguments), workspace, maps, latents)


def launch(call: Call, addresses: list[int], room: tuple[int, ...] | None = None, groups: tuple[int, ...] = ()) -> None:
    """Runs a call on the current stream, with the addresses of the tensors that are given.

    `room` has the addresses of its workspace, if another call's is to be used; `groups` those in `Groups`.
    """
    q, k, v, out, *_ = addresses
    if (q | k | v | out) % ALIGNMENT:
        refuse_alignment(q, k, v, out)
    if call.latents and k != v:
        raise ValueError(f"got latents k at {k:#x} and v at {v:#x}; v must be their view k[..., :{LATENT_V_DIM}]")
    if room is None:
        room = call.workspace.room() if call.workspace else ()
    maps = call.maps(k, v) if call.maps else ()
    call.launch.run(*maps, *addresses, *room, *groups)


TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor? cu_seqlens, Tensor seq_lens, Tensor? rows, Tensor? starts, "
    "Tensor? block_table, Tensor? sinks, Tensor? k_scales, Tensor? v_scales"
)


def define_operator(name: str, run: Callable[..., None], options: str) -> None:
    """Makes torch's operator `vmmkv::name`, opaque to `torch.compile`, of a function of `Geometries` and options."""
    schema = f"({TENSORS}, {options}) -> ()"
    torch.library.custom_op(f"vmmkv::{name}", run, mutates_args=("out",), schema=schema)
