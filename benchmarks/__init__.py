"""Benchmarks of vmmkv, each run as `python -m benchmarks.NAME`."""
