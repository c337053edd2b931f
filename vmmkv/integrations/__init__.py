"""What connects rows to transformers: `VmmCache`, continuous batching, the server."""

from importlib.util import find_spec

if find_spec("transformers") is None:
    raise ModuleNotFoundError('vmmkv.integrations needs transformers: pip install "vmmkv[hf]"', name="transformers")
