"""Samples of one prompt: its sequence is forked, and full pages lie in memory once."""

import torch
from torch.nn.functional import scaled_dot_product_attention

import vmmkv

# --8<-- [start:prompt]
layout = vmmkv.KVLayout(num_layers=4, num_kv_heads=8, head_dim=64, dtype=torch.float32)  # 128 tokens in a page
cache = vmmkv.KVCache(layout, max_sequences=64, max_seq_len=131_072, max_bytes="256MiB")

prompt = cache.sequence(2100)  # 17 pages: a large frame of 16, and one that 52 tokens lie in
k, v = torch.randn(2, 2100, 8, 64, device=cache.device)
prompt.write(layer=0, k=k, v=v)
# --8<-- [end:prompt]

# --8<-- [start:fork]
samples = cache.fork_many(prompt, 7)  # all of them or none; one alone is prompt.fork()
assert all(torch.equal(sample.k(0), k) for sample in samples)

pages = cache.stats().pages["used"]
assert pages == 16 + 8  # full pages once, the last page for each
assert (cache.page_map() == vmmkv.SHARED_PAGE).sum() == 16
# --8<-- [end:fork]

# --8<-- [start:decode]
family = [prompt, *samples]
for _ in range(20):  # the prompt's own sequence is one sample more
    cache.extend(family, 1)
    k_new, v_new = torch.randn(2, 8, 8, 64, device=cache.device)  # a token of K and V for each
    for index, sample in enumerate(family):
        sample.write(layer=0, k=k_new[index, None], v=v_new[index, None])
assert cache.stats().pages["used"] == pages  # 72 tokens lie in each one's own page
# --8<-- [end:decode]

q = torch.randn(1, 8, 1, 64, device=cache.device)
sample = samples[0]  # its row has no holes, and no table: any kernel reads it
out = scaled_dot_product_attention(q, sample.k(0).transpose(0, 1)[None], sample.v(0).transpose(0, 1)[None])
assert out.shape == (1, 8, 1, 64)

sample.truncate(1000)  # into shared pages: it only reads less
assert cache.stats().pages["used"] == pages - 1

sample.extend(1)  # before it may write there, it gets a copy of the page
sample.k(0)[1000] = 0.0
assert torch.equal(sample.k(0)[:1000], k[:1000])
assert torch.equal(prompt.k(0)[:2100], k)  # other sequences do not see it

# --8<-- [start:unshare]
cache.unshare([sample], start=500)  # before old tokens are written over
sample.k(0)[500:] = 1.0
assert torch.equal(prompt.k(0)[:2100], k)
# --8<-- [end:unshare]

# --8<-- [start:reorder]
beams = [prompt, *samples[1:4]]
before = [beam.k(0).clone() for beam in beams]
cache.reorder(beams, [2, 0, 0, 3])  # beam i holds the tokens of the named one; rows stay
assert all(torch.equal(beam.k(0), before[index]) for beam, index in zip(beams, [2, 0, 0, 3]))
# --8<-- [end:reorder]

stats = cache.stats()
print(f"{stats.tokens:,} tokens of {stats.rows['live']} sequences take {stats.token_bytes >> 20} MiB row by row,")
print(f"and lie in {stats.pages['used'] * cache.page_size >> 20} MiB: each page counts once")
assert stats.token_bytes > stats.pages["used"] * cache.page_size

prompt.free()  # pages that others share stay
assert torch.equal(samples[1].k(0)[:2100], k)
cache.free(samples)  # the last one frees the page
assert cache.stats().pages["used"] == 0
cache.check()
cache.close()
