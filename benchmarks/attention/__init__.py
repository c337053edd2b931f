"""The attention benchmark: `python -m benchmarks.attention`."""
