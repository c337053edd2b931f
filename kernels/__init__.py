"""Attention kernels over ordinary strided tensors; installed as `vmmkv.kernels`.

The directory is not a package of its own on purpose: a top-level module `kernels` is Hugging Face's.
"""
