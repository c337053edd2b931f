"""Two processes: one computes prompts, and hands their sequences to one that decodes them. On two GPUs, or on none."""

from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from vmmkv import KVCache, KVLayout, OutOfPagesError, Sequence, TransferRefusedError

PREFILL, DECODE = 0, 1
VOCABULARY, LAYERS, HEADS, HEAD_DIM = 256, 2, 4, 32
LAYOUT = KVLayout(LAYERS, HEADS, HEAD_DIM, torch.float32)
NEW_TOKENS = 20


class Model:
    """A decoder with random weights, the same in each process."""

    def __init__(self, device: torch.device) -> None:
        random, width = torch.Generator().manual_seed(0), HEADS * HEAD_DIM
        shapes = [(VOCABULARY, width)] + [(width, 3 * width), (width, width)] * LAYERS
        weights = [torch.randn(shape, generator=random).to(device) / width**0.5 for shape in shapes]
        self.embedding, self.layers = weights[0], list(zip(weights[1::2], weights[2::2]))

    def next_token(self, tokens: list[int], sequence: Sequence) -> int:
        """Writes K and V of `tokens`, the last ones of `sequence`, and says which token follows."""
        x = self.embedding[tokens]
        sees = torch.ones(len(tokens), sequence.length, dtype=torch.bool, device=x.device)
        sees = sees.tril(sequence.length - len(tokens))
        for layer, (to_qkv, to_output) in enumerate(self.layers):
            q, k, v = (x @ to_qkv).view(-1, 3, HEADS, HEAD_DIM).unbind(1)
            sequence.write(layer, k, v)
            q, k, v = (states.transpose(0, 1) for states in (q, sequence.k(layer), sequence.v(layer)))
            x = x + scaled_dot_product_attention(q, k, v, attn_mask=sees).transpose(0, 1).flatten(1) @ to_output
        return int((x[-1] @ self.embedding.T).argmax())


# --8<-- [start:prefill]
def prefill(model: Model, cache: KVCache, prompts: list[list[int]]) -> None:
    """Computes prompts, and hands each over as soon as the other process has room for it."""
    for prompt in prompts:
        with cache.sequence(len(prompt)) as sequence:
            token = model.next_token(prompt, sequence)
            while not handed_over(sequence):
                pass
        first = torch.tensor([token], device=cache.device)
        dist.send(first, DECODE)  # what else there is to say goes beside it


def handed_over(sequence: Sequence) -> bool:
    try:
        sequence.send(DECODE)  # which waits until the other process has asked for it
    except TransferRefusedError as refusal:
        if refusal.reason != OutOfPagesError.__name__:
            raise
        return False  # it is here still; when the other one asks again there may be room
    return True  # with `with` it is freed behind what is on its way


# --8<-- [end:prefill]


# --8<-- [start:decode]
def decode(model: Model, cache: KVCache, count: int) -> list[list[int]]:
    """Continues so many sequences of the other process, all that there is room for at a time."""
    done: list[list[int]] = []
    running: list[tuple[Sequence, list[int]]] = []
    while len(done) < count:
        if len(done) + len(running) < count:
            try:
                sequence = cache.receive(PREFILL)
                first = torch.empty(1, dtype=torch.long, device=cache.device)
                dist.recv(first, PREFILL)
                running.append((sequence, [int(first)]))
            except OutOfPagesError:
                if not running:
                    raise  # it will never fit
        cache.extend([sequence for sequence, _ in running], 1)
        for sequence, tokens in running:
            tokens.append(model.next_token(tokens[-1:], sequence))
        cache.free([sequence for sequence, tokens in running if len(tokens) == NEW_TOKENS])
        done += [tokens for _, tokens in running if len(tokens) == NEW_TOKENS]
        running = [(sequence, tokens) for sequence, tokens in running if len(tokens) < NEW_TOKENS]
    return done


# --8<-- [end:decode]


def alone(model: Model, cache: KVCache, prompt: list[int]) -> list[int]:
    """The same in one process."""
    with cache.sequence(len(prompt)) as sequence:
        tokens = [model.next_token(prompt, sequence)]
        while len(tokens) < NEW_TOKENS:
            sequence.extend(1)
            tokens.append(model.next_token(tokens[-1:], sequence))
    return tokens


def serve(rank: int, store: str, on_gpus: bool) -> None:
    """What each process runs."""
    torch.set_num_threads(1)  # small matrices
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    backend, meet = "nccl" if on_gpus else "gloo", f"file://{store}"
    dist.init_process_group(backend, init_method=meet, rank=rank, world_size=2, timeout=timedelta(minutes=5))
    model, prompts = Model(device), make_prompts()
    if rank == PREFILL:
        prefill(model, KVCache(LAYOUT, 4, 4096, max_bytes="16MiB", device=device), prompts)
    else:
        cache = KVCache(LAYOUT, 16, 4096, max_bytes="12MiB", device=device)  # of 6 pages, in each of them 1,024 tokens
        found = decode(model, cache, len(prompts))
        assert found == [alone(model, cache, prompt) for prompt in prompts]
        print(f"{len(prompts)} prompts from {PREFILL} to {DECODE}: the same tokens as in one process")
    dist.barrier()
    dist.destroy_process_group()


def make_prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (length,), generator=random).tolist() for length in range(20, 120, 5)]


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        spawn, arguments = get_context("spawn"), (str(Path(folder) / "store"), torch.cuda.device_count() >= 2)
        processes = [spawn.Process(target=serve, args=(rank, *arguments)) for rank in (PREFILL, DECODE)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0, 0]
