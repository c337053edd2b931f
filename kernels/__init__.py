"""Kernels over ordinary strided tensors; installed as `vmmkv.kernels`.

They know nothing of vmmkv: a row of a `vmmkv.KVCache` is a strided tensor like any other.

Words, each with one meaning in all of these files:

    heads_per_kv    query heads that share a KV head
    group           sequences that begin with the same tokens, in `cascade`
    tile            tokens whose K or V prefill works on at a time: its keys
    job             queries of a head that a block of threads works on at a time, and the keys that they see
    ring, slot      a ring in shared memory, and one of its places for tiles, which take turns in them
    box, panel      tokens that the copy engine copies at a time; 64 of their elements, 128 bytes a token
    unit            16 tokens: what decode's work is counted in
    octet           up to eight queries that share a KV head: the columns of a product in decode
    bundle          the octets that a block of threads works on at a time, a warp or more on some of them
    share, piece    the units of a block of threads; those of one sequence and bundle in it
    part            the sums of a piece which is not a whole bundle; of a prefix, those of some of its tokens
    prefix          the first tokens of some sequences, which are the same: a group's
    home            where a token is: the number of its row, or of its block
    live            the tokens from the first that may be read to the last
    block           of a block table; CUDA's are blocks of threads
    warpgroup       four warps, which multiply together on Hopper

Nothing is imported before it is used. In this repository the folder can also be imported as a top-level `kernels`,
which is the name of Hugging Face's package, and transformers imports whatever has that name.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .quantized import dequantize as dequantize, quantize as quantize, sequence_scales as sequence_scales
    from .row_append import RotateHalf as RotateHalf, append as append
    from .row_copy import copy_tokens as copy_tokens
    from .row_decode import decode as decode
    from .row_prefill import cascade as cascade, mixed as mixed, prefill as prefill

_NAMES = {
    "quantized": ("dequantize", "quantize", "sequence_scales"),
    "row_append": ("RotateHalf", "append"),
    "row_copy": ("copy_tokens",),
    "row_decode": ("decode",),
    "row_prefill": ("cascade", "mixed", "prefill"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
