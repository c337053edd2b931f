"""Several customers on one cache: what keeps their prompts, their models and their bytes apart."""

import torch

import vmmkv

# --8<-- [start:cache]
layout = vmmkv.KVLayout(num_layers=4, num_kv_heads=8, head_dim=64, dtype=torch.float32)  # 128 tokens in a page
cache = vmmkv.KVCache(layout, max_sequences=16, max_seq_len=4096, max_bytes="64MiB")
# --8<-- [end:cache]


def compute(sequence: vmmkv.Sequence) -> None:
    """A model's part: K and V of the tokens that are not there."""
    for layer in range(4):
        new = torch.randn(sequence.length - sequence.cached_tokens, 8, 64, device=cache.device)
        sequence.write(layer, new, new)


# --8<-- [start:salt]
prompt = list(range(1000))
with cache.sequence(token_ids=prompt, salt="customer 7") as first:
    compute(first)
    first.commit(prompt)
with cache.sequence(token_ids=prompt, salt="customer 8") as other:
    assert other.cached_tokens == 0
with cache.sequence(token_ids=prompt, salt="customer 7") as again:
    assert again.cached_tokens == 999  # but for the last, of which the next token is computed
# --8<-- [end:salt]

# --8<-- [start:adapter]
with cache.sequence(token_ids=prompt, salt="customer 7", adapter="legal-lora") as adapted:
    assert adapted.cached_tokens == 0  # other K and V: another model
# --8<-- [end:adapter]

# --8<-- [start:tenant]
with cache.sequence(token_ids=prompt, tenant="company A") as confidential:
    compute(confidential)
    confidential.commit(prompt)
    row = confidential.row
with cache.sequence(1000, tenant="company B") as stranger:
    assert not stranger.k(0).any()  # what company A has had in its pages is zeroed before
with cache.sequence(token_ids=prompt, tenant="company A") as back:
    assert back.cached_tokens == 999
# --8<-- [end:tenant]

# --8<-- [start:reuse]
with cache.sequence(token_ids=prompt, tenant="company A", reuse=False) as once:
    assert once.cached_tokens == 0
    compute(once)
    try:
        once.commit(prompt)
    except vmmkv.ArgumentError as error:
        print(error)
# --8<-- [end:reuse]

# --8<-- [start:scrub]
clean = vmmkv.KVCache(layout, max_sequences=4, max_seq_len=4096, max_bytes="16MiB", scrub=True)
with clean.sequence(300) as before:
    for layer in range(4):
        before.k(layer).fill_(7)
with clean.sequence(300) as after:
    assert not after.k(0).any()  # zeros, whoever had the pages
# --8<-- [end:scrub]
cache.check()
cache.close()
clean.close()
