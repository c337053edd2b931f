"""One call of torch's SDPA for a batch of rows, as they lie in the cache: nothing is copied, padded or gathered."""

import torch
from torch.nn.functional import scaled_dot_product_attention

import vmmkv

HEADS, KV_HEADS, HEAD_DIM, MARGIN = 8, 2, 64, 128
layout = vmmkv.KVLayout(num_layers=2, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32)

# --8<-- [start:cache]
# MARGIN tokens behind each sequence's end are mapped, and no NaN of another sequence lies there.
cache = vmmkv.KVCache(layout, 64, 4096, max_bytes="64MiB", overread=MARGIN, scrub=True, int32_strides=True)
sequences = [cache.sequence(length, row=row) for row, length in enumerate((200, 317, 261))]  # rows side by side
# --8<-- [end:cache]

for sequence in sequences:
    for layer in range(layout.num_layers):
        sequence.write(layer, *torch.randn(2, sequence.length, KV_HEADS, HEAD_DIM, device=cache.device))


# --8<-- [start:attend]
def attend(q: torch.Tensor, layer: int, lengths: torch.Tensor) -> torch.Tensor:
    """Attention of a new token of each of the first rows, `[batch, HEADS, 1, HEAD_DIM]`."""
    shortest, longest = lengths.min(), lengths.max()
    if longest - shortest > MARGIN:
        raise ValueError("there may be no memory that far behind a sequence: batch those of similar lengths")
    k, v = (whole[: len(q), :longest].transpose(1, 2) for whole in cache.kv(layer))  # views
    seen = torch.arange(int(longest), device=q.device) < lengths[:, None, None, None]
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


lengths = torch.tensor([sequence.length for sequence in sequences], device=cache.device)
q = torch.randn(len(sequences), HEADS, 1, HEAD_DIM, device=cache.device)
out = attend(q, 0, lengths)
# --8<-- [end:attend]

for sequence, query, found in zip(sequences, q, out):
    k, v = (states.transpose(0, 1) for states in (sequence.k(0), sequence.v(0)))
    torch.testing.assert_close(found, scaled_dot_product_attention(query, k, v, enable_gqa=True))
print("One call of SDPA for", [sequence.length for sequence in sequences], "tokens; memory:", cache)
