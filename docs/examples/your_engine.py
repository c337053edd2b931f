"""Continuous batching in your own engine: requests start while there is memory, grow together, and make room."""

from collections import deque
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from vmmkv import KVCache, KVLayout, OutOfPagesError, OutOfRowsError, Sequence

VOCABULARY, LAYERS, HEADS, HEAD_DIM = 256, 2, 4, 32
LAYOUT = KVLayout(LAYERS, HEADS, HEAD_DIM, torch.float32)  # 2 KiB a token


class Model:
    """A decoder with random weights, one sequence at a time."""

    def __init__(self) -> None:
        width = HEADS * HEAD_DIM
        self.embedding = torch.randn(VOCABULARY, width)
        self.layers = [(torch.randn(width, 3 * width) / width, torch.randn(width, width) / 8) for _ in range(LAYERS)]

    # --8<-- [start:forward]
    def next_token(self, tokens: list[int], sequence: Sequence) -> int:
        """Writes K and V of `tokens`, the last ones of `sequence`, and says which token follows."""
        x = self.embedding[tokens]
        sees = torch.ones(len(tokens), sequence.length, dtype=torch.bool).tril(sequence.length - len(tokens))
        for layer, (to_qkv, to_output) in enumerate(self.layers):
            q, k, v = (x @ to_qkv).view(-1, 3, HEADS, HEAD_DIM).unbind(1)
            sequence.write(layer, k, v)
            q, k, v = (states.transpose(0, 1) for states in (q, sequence.k(layer), sequence.v(layer)))
            x = x + scaled_dot_product_attention(q, k, v, attn_mask=sees).transpose(0, 1).flatten(1) @ to_output
        return int((x[-1] @ self.embedding.T).argmax())

    # --8<-- [end:forward]


@dataclass
class Request:
    """Tokens so far, first those of the prompt, and how many there will be."""

    tokens: list[int]
    total: int

    @property
    def is_done(self) -> bool:
        return len(self.tokens) >= self.total


# --8<-- [start:engine]
class Engine:
    """Serves requests, the oldest first. Preempted ones wait at the front, and are computed again."""

    def __init__(self, model: Model, cache: KVCache, requests: list[Request]) -> None:
        self.model, self.cache = model, cache
        self.waiting = deque(requests)
        self.running: list[tuple[Request, Sequence]] = []
        self.preemptions = 0

    def run(self) -> None:
        while self.waiting or self.running:
            self.admit()
            self.retire()
            self.decode()

    def admit(self) -> None:
        """Starts requests until memory, or rows, are short: the cache itself says when."""
        while self.waiting:
            request = self.waiting[0]
            try:
                sequence = self.cache.sequence(len(request.tokens))
            except (OutOfPagesError, OutOfRowsError):
                if not self.running:
                    raise  # this one will never fit
                return
            self.running.append((self.waiting.popleft(), sequence))
            request.tokens.append(self.model.next_token(request.tokens, sequence))

    def retire(self) -> None:
        """One call, and one fence, for all that are done. Their rows stay mapped for those that wait."""
        self.cache.free([sequence for request, sequence in self.running if request.is_done])
        self.running = [pair for pair in self.running if not pair[0].is_done]

    def decode(self) -> None:
        """A token for each: room for all of them or for none, and then the newest goes back to wait."""
        while True:
            try:
                self.cache.extend([sequence for _, sequence in self.running], 1)
                break
            except OutOfPagesError:
                if len(self.running) == 1:
                    raise
                request, sequence = self.running.pop()
                sequence.free()
                self.waiting.appendleft(request)
                self.preemptions += 1
        for request, sequence in self.running:
            request.tokens.append(self.model.next_token(request.tokens[-1:], sequence))


# --8<-- [end:engine]


def make_requests() -> list[Request]:
    lengths = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCABULARY, (n,), generator=lengths).tolist() for n in range(20, 120, 5)]
    return [Request(tokens, len(tokens) + 40) for tokens in prompts]


def main() -> None:
    torch.manual_seed(0)
    model = Model()
    # Small pages, which only the host has: 16 tokens each, like those of an 8B model on a GPU.
    scarce = KVCache(LAYOUT, max_sequences=16, max_seq_len=4096, max_tokens=500, device="cpu", page_size=32 << 10)
    ample = KVCache(LAYOUT, max_sequences=1, max_seq_len=4096, max_bytes="16MiB", device="cpu")

    requests, alone = make_requests(), make_requests()
    engine = Engine(model, scarce, requests)
    engine.run()
    for request in alone:
        Engine(model, ample, [request]).run()
    assert [request.tokens for request in requests] == [request.tokens for request in alone]

    stats = scarce.stats()
    print(f"{len(requests)} requests, {engine.preemptions} preemptions: the same tokens as one at a time")
    print(f"{stats.pages_created} pages, each used {stats.reuse_factor:.1f} times; {stats.adoptions} rows adopted")


if __name__ == "__main__":
    main()
