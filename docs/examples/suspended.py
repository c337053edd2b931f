"""A sequence that is suspended: its tokens wait in host memory, and its pages serve others."""

import torch

import vmmkv

# --8<-- [start:suspend]
layout = vmmkv.KVLayout(num_layers=4, num_kv_heads=8, head_dim=64, dtype=torch.float32)  # 128 tokens in a page
cache = vmmkv.KVCache(layout, max_sequences=8, max_seq_len=131_072, max_bytes="64MiB", host_bytes="256MiB")

patient = cache.sequence(4000)  # all of the 32 pages
k, v = torch.randn(2, 4000, 8, 64, device=cache.device)
patient.write(layer=0, k=k, v=v)
address = patient.k(0).data_ptr()

patient.suspend()
assert patient.is_suspended
# --8<-- [end:suspend]

# --8<-- [start:others]
urgent = cache.sequence(4000)  # for which there would have been no page
urgent.free()
# --8<-- [end:others]

# --8<-- [start:resume]
patient.resume()
assert patient.k(0).data_ptr() == address  # whatever knew it knows it still: views, graphs, kernels
assert torch.equal(patient.k(0), k)
# --8<-- [end:resume]
