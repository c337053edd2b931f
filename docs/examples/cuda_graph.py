"""One CUDA graph for every length: captured once, replayed while sequences grow onto new pages."""

import torch
from torch.nn.functional import scaled_dot_product_attention

import vmmkv
import vmmkv.kernels

HEADS, KV_HEADS, HEAD_DIM, LAYERS, STEPS = 32, 8, 128, 2, 300


def main() -> None:
    if not torch.cuda.is_available():
        print("There is no NVIDIA GPU here, and so nothing to capture")
        return
    torch.manual_seed(0)
    layout = vmmkv.KVLayout(LAYERS, KV_HEADS, HEAD_DIM, torch.bfloat16)  # 8 KiB a token, 256 tokens a page
    cache = vmmkv.KVCache(layout, max_sequences=16, max_seq_len=131_072, max_bytes="1GiB")
    sequences = [cache.sequence(length) for length in (250, 600)]
    for sequence in sequences:
        for layer in range(LAYERS):
            sequence.write(layer, *random(2, sequence.length, KV_HEADS, HEAD_DIM))

    # --8<-- [start:step]
    rows = torch.tensor([sequence.row for sequence in sequences], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([sequence.length for sequence in sequences], dtype=torch.int32, device="cuda")
    q = random(2, 1, HEADS, HEAD_DIM)  # what a model computes from the newest tokens
    k, v = random(2, 2, KV_HEADS, HEAD_DIM)
    out = torch.empty(LAYERS, *q.shape, dtype=q.dtype, device="cuda")

    def step() -> None:
        """One token for each sequence. Lengths are data: the graph is the same for all of them."""
        for layer in range(LAYERS):
            keys, values = cache.kv(layer)  # the whole virtual tensor: its address never changes
            vmmkv.kernels.append(k, v, keys, values, rows, lengths)
            vmmkv.kernels.decode(q, keys, values, lengths + 1, rows, out=out[layer])
        lengths.add_(1)

    # --8<-- [end:step]

    # --8<-- [start:capture]
    cache.extend(sequences, 1)
    step()  # kernels compile before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    for _ in range(STEPS):
        cache.extend(sequences, 1)  # the host maps pages, where they are needed
        for tensor in (q, k, v):
            tensor.normal_()
        graph.replay()
    # --8<-- [end:capture]

    assert lengths.tolist() == [sequence.length for sequence in sequences]
    for index, sequence in enumerate(sequences):
        for layer in range(LAYERS):
            seen = [x.transpose(0, 1)[None].double() for x in (q[index], sequence.k(layer), sequence.v(layer))]
            expected = scaled_dot_product_attention(seen[0], seen[1], seen[2], enable_gqa=True)[0].transpose(0, 1)
            torch.testing.assert_close(out[layer, index].double(), expected, atol=2e-2, rtol=2e-2)
    print(f"One graph, {STEPS} replays, sequences of {lengths.tolist()} tokens now: {cache}")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


if __name__ == "__main__":
    main()
