"""The benchmark of transformers' `generate`: `python -m benchmarks.generate`."""
