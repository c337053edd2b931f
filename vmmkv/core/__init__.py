"""The compiled books of a pool and its caches: see `vmmkv.core.tables`."""
