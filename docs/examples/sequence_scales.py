"""K and V in 8 bits with scales of whole sequences, made of a prompt."""

import torch

import vmmkv
from vmmkv.kernels import append, decode, sequence_scales
from vmmkv.kernels.compiler import SIMULATED

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 8, 2, 64, 2
DEVICE = "cpu" if SIMULATED else "cuda"


def main() -> None:
    if not (SIMULATED or torch.cuda.is_available()):
        print("There is no NVIDIA GPU here; kernels run with NUMBA_ENABLE_CUDASIM=1, slowly")
        return
    torch.manual_seed(0)
    # --8<-- [start:cache]
    layout = vmmkv.KVLayout(LAYERS, KV_HEADS, HEAD_DIM, torch.float8_e4m3fn, scales="sequence_head")
    cache = vmmkv.KVCache(layout, max_sequences=16, max_seq_len=131_072, max_bytes="64MiB", device=DEVICE)
    # --8<-- [end:cache]
    sequences = [cache.sequence(length) for length in (5, 9)]
    prompts = random(LAYERS, 2, 14, KV_HEADS, HEAD_DIM)  # K and V of both, one after the other
    q = random(2, 1, HEADS, HEAD_DIM)
    rows, starts, ends = int32([sequence.row for sequence in sequences]), int32([0, 0]), int32([0, 5, 14])
    lengths = int32([5, 9])
    for layer, (k, v) in enumerate(prompts):
        # --8<-- [start:write]
        k_scales, v_scales = cache.sequence_scales(layer)  # [max_sequences, num_kv_heads], 1 where a sequence is new
        for sequence, new_k, new_v in zip(sequences, k.split([5, 9]), v.split([5, 9])):
            k_scales[sequence.row] = 2 * sequence_scales(new_k, layout.dtype)  # room for greater ones to come
            v_scales[sequence.row] = 2 * sequence_scales(new_v, layout.dtype)
        held = cache.scaled_kv(layer)
        append(k, v, held.k, held.v, rows, starts, ends, k_scales=k_scales, v_scales=v_scales)
        out = decode(q, held.k, held.v, lengths, rows, k_scales=held.k_scales, v_scales=held.v_scales)
        # --8<-- [end:write]
        for number, (new_k, new_v) in enumerate(zip(k.split([5, 9]), v.split([5, 9]))):
            one, new_k, new_v = (x.transpose(0, 1).double() for x in (q[number], new_k, new_v))
            exact = torch.nn.functional.scaled_dot_product_attention(one, new_k, new_v, enable_gqa=True)
            assert (out[number].transpose(0, 1) - exact).norm() <= 0.1 * exact.norm()
    print(cache)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16()


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


if __name__ == "__main__":
    main()
