"""Kernels over ordinary strided tensors; installed as `vmmkv.kernels`.

They know nothing of vmmkv: a row of a `vmmkv.KVCache` is a strided tensor like any other.

Nothing is imported before it is used. In this repository the folder can also be imported as a top-level `kernels`,
which is the name of Hugging Face's package, and transformers imports whatever has that name.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .row_append import append
    from .row_copy import copy_tokens
    from .row_decode import decode
    from .row_prefill import prefill

__all__ = ["append", "copy_tokens", "decode", "prefill"]

_MODULES = {
    "append": "row_append",
    "copy_tokens": "row_copy",
    "decode": "row_decode",
    "prefill": "row_prefill",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
