"""A prefix that is evicted, waits in host memory, and comes back."""

import numpy as np
import torch

import vmmkv

layout = vmmkv.KVLayout(num_layers=4, num_kv_heads=8, head_dim=64, dtype=torch.float32)  # 128 tokens in a page
# --8<-- [start:cache]
cache = vmmkv.KVCache(layout, max_sequences=8, max_seq_len=131_072, max_bytes="64MiB", host_bytes="256MiB")
# --8<-- [end:cache]

# --8<-- [start:evict]
document = np.arange(3000)
with cache.sequence(token_ids=document) as reader:
    k, v = torch.randn(2, 3000, 8, 64, device=cache.device)
    reader.write(layer=0, k=k, v=v)
    reader.commit(document)

with cache.sequence(token_ids=np.arange(5000, 9000)):  # needs all 32 pages
    stats = cache.stats()
    assert stats.prefix_pages == 0
    assert stats.host_prefix_pages == 23
    print(f"{stats.host_bytes >> 20} MiB are on the host")
# --8<-- [end:evict]

# --8<-- [start:back]
question = np.append(document, [9001, 9002])
sequence = cache.sequence(token_ids=question)
assert sequence.cached_tokens == 2944  # all that fills pages
assert torch.equal(sequence.k(0)[:2944], k[:2944])
# --8<-- [end:back]
