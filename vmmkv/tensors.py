"""Zero-copy torch tensors over a virtual range.

The range enters torch once, as bytes, through DLPack: the only way that takes any address, mapped or not.
Everything else is a view of that tensor. A view keeps its arena alive (the whole cache's memory, that is, but not the
sequence that it was made for).

torch copies, saves and shares a view by copying all of its storage, here the whole range, most of which has no memory.
So that is refused, as far as an object can: `repr` of a storage, and what reads it item by item, are faults.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, NoReturn

import torch
import torch.serialization
import torch.utils.dlpack

from .errors import ArgumentError, DeviceError, DtypeError

# https://dmlc.github.io/dlpack/latest/c_api.html
KDLCPU, KDLCUDA, KDLUINT = 1, 2, 1


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [
        ("tensor", _DLTensor),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("length", ctypes.c_int64),  # not DLPack's: what the shape points to
    ]


_malloc = ctypes.pythonapi.PyMem_RawMalloc
_malloc.restype = ctypes.c_void_p
_malloc.argtypes = [ctypes.c_size_t]
_free = ctypes.cast(ctypes.pythonapi.PyMem_RawFree, ctypes.c_void_p)

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


COPYING = ("__deepcopy__", "clone", "tolist", "_share_fd_cpu_", "_share_filename_cpu_", "_share_cuda_")
"""Methods of a storage that copy, read or hand on all of it."""


def export_range(address: int, nbytes: int, device: torch.device, owner: object) -> torch.Tensor:
    """A uint8 tensor `[nbytes]` over a range, mapped or not; its storage keeps `owner` alive."""
    # torch calls the deleter from any thread, with an exception pending, or after Python's end. So it is `free`, not
    # Python code, and the owner hangs on the storage's Python object, which torch drops as Python would.
    memory = _malloc(ctypes.sizeof(_DLManagedTensor))
    managed = _DLManagedTensor.from_address(memory)
    managed.length = nbytes
    shape = ctypes.pointer(ctypes.c_int64.from_address(memory + _DLManagedTensor.length.offset))
    kind = KDLCUDA if device.type == "cuda" else KDLCPU
    managed.tensor = _DLTensor(address, kind, device.index or 0, 1, KDLUINT, 8, 1, shape, None, 0)
    managed.manager, managed.deleter = None, _free
    tensor = torch.utils.dlpack.from_dlpack(_new_capsule(memory, b"dltensor", None))
    storage: Any = tensor.untyped_storage()
    storage.vmmkv_owner = owner
    for name in COPYING:
        setattr(storage, name, _refuse_copy)
    if device.type == "cpu":  # elsewhere it does nothing
        storage.share_memory_ = _refuse_copy
    return tensor


def _refuse_copy(*_: object) -> NoReturn:
    raise TypeError(
        "this is a view of a virtual tensor, and torch would copy all of that, memory or none. clone() the view, and "
        "copy, save or share the clone"
    )


def _tag(storage: Any) -> None:
    """What torch asks before it pickles or saves a storage."""
    if hasattr(storage, "vmmkv_owner"):
        _refuse_copy()


torch.serialization.register_package(0, _tag, lambda storage, location: None)


def check_source(tensor: torch.Tensor, name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raises `ArgumentError` for what cannot be copied from as it is: what is no tensor, is sparse, or has no data; and
    `DtypeError` or `DeviceError` for what has another dtype or device."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"got {name} as {type(tensor).__name__}; it must be a torch.Tensor: see torch.as_tensor()")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise ArgumentError(f"got {name} as {type(tensor).__name__}, which only stands for a tensor; give a plain one")
    if tensor.layout is not torch.strided:
        raise ArgumentError(f"got {name} as {tensor.layout}; it must be strided. Convert with .to_dense()")
    if tensor.dtype != dtype:
        raise DtypeError(f"got {name} of {tensor.dtype}; it must be {dtype}. Convert with .to()")
    if tensor.device != device:
        raise DeviceError(f"got {name} on {tensor.device}; it must be on {device}")


class ScaledKV(NamedTuple):
    """K and V of a layer as 8-bit numbers, and their scales: K is `k * k_scales[..., None]`, and V likewise.

    Attributes:
        k: e4m3fn or int8 `[max_sequences, max_seq_len, num_kv_heads, head_dim]`.
        v: likewise, with its own width.
        k_scales: fp32 `[max_sequences, max_seq_len, num_kv_heads]`.
        v_scales: likewise.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor
    v_scales: torch.Tensor
