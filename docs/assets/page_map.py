"""Draws page_map.svg, the README's picture of a cache: `python docs/assets/page_map.py`."""

from __future__ import annotations

from pathlib import Path

import torch

import vmmkv


def picture() -> str:
    """Three sequences that grew in turns, the first from a prompt on a large frame, and one that expects more tokens,
    on the row of a fourth that had gone; on the host."""
    layout = vmmkv.KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    with vmmkv.KVCache(layout, 8, 131_072, max_bytes="160MiB", device="cpu") as cache:
        first, second = cache.sequence(300), cache.sequence(40)
        gone, last = cache.sequence(170), cache.sequence(100)
        gone.free()
        for _ in range(12):
            cache.extend([first, second, last], [11, 14, 3])
        heir = cache.sequence(75, expected_tokens=120)  # on the row that `gone` has left
        drawn = cache._repr_html_()
        assert heir.row >= 0
    return drawn.replace("<svg ", '<svg color="#777777" ', 1) + "\n"  # seen on a white page and on a black one


if __name__ == "__main__":
    Path(__file__).with_name("page_map.svg").write_text(picture())
