"""Zero-copy torch tensors over a virtual range.

The range enters torch once, as bytes, through DLPack: the only way that takes any address, mapped or not,
any dtype, and an owner. Everything else is a view of that tensor. A view keeps its arena alive (the whole
cache's memory, that is, but not the sequence that it was made for).
"""

from __future__ import annotations

import atexit
import ctypes
from typing import Any

import torch
import torch.utils.dlpack

from .layout import KVLayout

# https://dmlc.github.io/dlpack/latest/c_api.html
KDLCPU, KDLCUDA, KDLUINT = 1, 2, 1


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


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
        ("deleter", _Deleter),
    ]


_exports: dict[int, tuple[_DLManagedTensor, Any]] = {}
"""By address of the structure: what torch still points to, and the owner of the memory."""


def _forget(address: int) -> None:
    _exports.pop(address, None)


_forget_export = _Deleter(_forget)


@atexit.register
def _forget_exports() -> None:
    """Tensors that outlive the interpreter must not call back into it."""
    for managed, _ in _exports.values():
        managed.deleter = _Deleter()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(managed))


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def export_range(address: int, nbytes: int, device: torch.device, owner: object) -> torch.Tensor:
    """A uint8 tensor `[nbytes]` over a range, mapped or not; its storage keeps `owner` alive."""
    managed = _DLManagedTensor(deleter=_forget_export)
    shape = (ctypes.c_int64 * 1)(nbytes)
    kind = KDLCUDA if device.type == "cuda" else KDLCPU
    managed.tensor = _DLTensor(address, kind, device.index or 0, 1, KDLUINT, 8, 1, shape, None, 0)
    _exports[ctypes.addressof(managed)] = managed, (owner, shape)
    capsule = _new_capsule(ctypes.addressof(managed), b"dltensor", None)
    return torch.utils.dlpack.from_dlpack(capsule)


def kv_views(
    ranges: list[torch.Tensor], layout: KVLayout, num_rows: int, max_seq_len: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of every layer over all rows.

    Args:
        ranges: the elements of each range of the layout.

    Returns:
        per layer `(K, V)`, each `[num_rows, max_seq_len, num_kv_heads, width]` and strided.
    """
    views = []
    for layer in layout.layers:
        flat = ranges[layer.range]
        row, token = flat.numel() // num_rows, layout.record_bytes[layer.range] // layout.dtype.itemsize
        k, v = (
            flat.as_strided((num_rows, max_seq_len, layer.num_kv_heads, width), (row, token, width, 1), offset)
            for width, offset in ((layer.k_head_dim, layer.k_offset), (layer.v_head_dim, layer.v_offset))
        )
        views.append((k, v))
    return views
