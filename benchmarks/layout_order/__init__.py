"""The benchmark of the order of a page: `python -m benchmarks.layout_order`."""
