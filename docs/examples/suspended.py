"""A suspended sequence: its tokens wait in host memory, and other sequences use its pages."""

import torch

import vmmkv

# --8<-- [start:suspend]
layout = vmmkv.KVLayout(num_layers=4, num_kv_heads=8, head_dim=64, dtype=torch.float32)  # 128 tokens in a page
cache = vmmkv.KVCache(layout, max_sequences=8, max_seq_len=131_072, max_bytes="64MiB", host_bytes="256MiB")

waiting = cache.sequence(4000)  # all of the 32 pages
k, v = torch.randn(2, 4000, 8, 64, device=cache.device)
waiting.write(layer=0, k=k, v=v)
address = waiting.k(0).data_ptr()

waiting.suspend()
assert waiting.is_suspended
# --8<-- [end:suspend]

urgent = cache.sequence(4000)  # which gets the pages
urgent.free()

# --8<-- [start:resume]
waiting.resume()
assert waiting.k(0).data_ptr() == address  # views and graphs stay valid
assert torch.equal(waiting.k(0), k)
# --8<-- [end:resume]
