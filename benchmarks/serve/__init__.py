"""The serving benchmark: `python -m benchmarks.serve`."""
