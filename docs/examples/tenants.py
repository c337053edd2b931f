"""Several customers on one cache: what keeps their prompts, adapters and bytes apart."""

import torch

import vmmkv

layout = vmmkv.KVLayout(num_layers=4, num_kv_heads=8, head_dim=64, dtype=torch.float32)  # 128 tokens in a page
cache = vmmkv.KVCache(layout, max_sequences=16, max_seq_len=4096, max_bytes="64MiB")


def compute(sequence: vmmkv.Sequence) -> None:
    """Stands for a model: computes K and V of the tokens that are not cached."""
    for layer in range(4):
        new = torch.randn(sequence.length - sequence.cached_tokens, 8, 64, device=cache.device)
        sequence.write(layer, new, new)


prompt = list(range(1000))
with cache.sequence(token_ids=prompt, salt="customer 7") as first:
    compute(first)
    first.commit(prompt)
with cache.sequence(token_ids=prompt, salt="customer 8") as other:
    assert other.cached_tokens == 0
with cache.sequence(token_ids=prompt, salt="customer 7") as again:
    assert again.cached_tokens == 999  # the last token is always computed

with cache.sequence(token_ids=prompt, salt="customer 7", adapter="legal-lora") as adapted:
    assert adapted.cached_tokens == 0  # other K and V: another model

# --8<-- [start:tenant]
with cache.sequence(token_ids=prompt, tenant="company A") as confidential:
    compute(confidential)
    confidential.commit(prompt)
    row = confidential.row
with cache.sequence(1000, tenant="company B") as other_tenant:
    assert not other_tenant.k(0).any()  # pages of company A are filled with zeros first
with cache.sequence(token_ids=prompt, tenant="company A") as back:
    assert back.cached_tokens == 999
# --8<-- [end:tenant]

with cache.sequence(token_ids=prompt, tenant="company A", reuse=False) as once:
    assert once.cached_tokens == 0
    compute(once)
    try:
        once.commit(prompt)
    except vmmkv.ArgumentError as error:
        print(error)

clean = vmmkv.KVCache(layout, max_sequences=4, max_seq_len=4096, max_bytes="16MiB", scrub=True)
with clean.sequence(300) as before:
    for layer in range(4):
        before.k(layer).fill_(7)
with clean.sequence(300) as after:
    assert not after.k(0).any()  # zeros
cache.check()
cache.close()
clean.close()
