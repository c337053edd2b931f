"""A first cache: sequences grow, their addresses stay, and ordinary attention reads them where they lie."""

import torch
from torch.nn.functional import scaled_dot_product_attention

import vmmkv

# --8<-- [start:first]
layout = vmmkv.KVLayout(num_layers=4, num_kv_heads=8, head_dim=64, dtype=torch.float32)
cache = vmmkv.KVCache(layout, max_sequences=64, max_seq_len=131_072, max_bytes="64MiB")

seq = cache.sequence(1000)  # pages appear under 1,000 tokens
k, v = torch.randn(2, 1000, 8, 64, device=cache.device)
seq.write(layer=0, k=k, v=v)

seq.extend(1)  # room for one more
print(seq.k(0).shape)  # [1001, 8, 64]: a view of the row, not a copy
print(cache.stats().physical_bytes, "bytes of", cache.kv(0)[0].shape)
# --8<-- [end:first]

# --8<-- [start:stable]
address = seq.k(0).data_ptr()
seq.extend(1000)  # more pages
assert seq.k(0).data_ptr() == address
assert torch.equal(seq.k(0)[:1000], k)
# --8<-- [end:stable]

seq.truncate(1000)
q = torch.randn(1, 8, 1, 64, device=cache.device)
on_row = scaled_dot_product_attention(q, seq.k(0).transpose(0, 1)[None], seq.v(0).transpose(0, 1)[None])
on_copy = scaled_dot_product_attention(q, k.transpose(0, 1)[None], v.transpose(0, 1)[None])
torch.testing.assert_close(on_row, on_copy)

# --8<-- [start:adopt]
calls = cache.stats().driver_calls
seq.free()  # the row stays mapped: it is parked
with cache.sequence(800) as another:  # and is adopted whole
    assert another.k(0).data_ptr() == address
    assert cache.stats().driver_calls == calls
# --8<-- [end:adopt]
print(cache)
