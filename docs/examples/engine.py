"""An engine in one file, to copy: a queue, continuous batching, CUDA graphs, and prefixes that are reused on rows.

    engine = Engine(Model(LlamaForCausalLM.from_pretrained(...), max_seq_len=8192), max_sequences=256)
    requests = [engine.add(token_ids, new_tokens=100, stop=2) for token_ids in prompts]
    engine.run()  # or step() in a loop: requests may come at any time, and their tokens grow

Without a GPU attention is torch's, a sequence at a time. Answers are greedy: to sample, change the end of `compute`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu
from transformers import LlamaConfig, LlamaForCausalLM

from vmmkv import KVCache, KVLayout, OutOfPagesError
from vmmkv.kernels import RotateHalf, append, decode, mixed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADROOM = 16  # tokens left free for each running request when another one starts: fewer are preempted soon after


class Model:
    """A Llama or a Qwen3 of transformers, with fewer and larger matrix products."""

    def __init__(self, model: Any, max_seq_len: int) -> None:
        self.config, c, state = model.config, model.config, dict(model.state_dict())
        self.shape, self.eps = (c.num_attention_heads, c.num_key_value_heads, c.head_dim), c.rms_norm_eps

        def take(*names: str) -> torch.Tensor:
            return torch.cat([state.pop(f"{name}.weight") for name in names]).to(DEVICE)

        its = [["input_layernorm"], [f"self_attn.{each}_proj" for each in "qkv"]]
        its += [[f"self_attn.{each}_norm"] for each in "qk" if c.model_type == "qwen3"]
        its += [["self_attn.o_proj"], ["post_attention_layernorm"], ["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]
        layers = [f"model.layers.{layer}" for layer in range(c.num_hidden_layers)]
        self.layers = [[take(*(f"{layer}.{name}" for name in names)) for names in its] for layer in layers]
        self.embed, self.last_norm, self.head = take("model.embed_tokens"), take("model.norm"), take("lm_head")
        usual = c.hidden_act == "silu" and c.rope_parameters["rope_type"] in ("default", "llama3") and not state
        if c.model_type not in ("llama", "qwen3") or getattr(c, "use_sliding_window", False) or not usual:
            raise ValueError(f"this engine cannot run a model with this configuration: {c}")
        angles = torch.outer(torch.arange(max_seq_len).float(), model.model.rotary_emb.inv_freq.cpu()).repeat(1, 2)
        self.angles = torch.stack([angles.cos(), angles.sin()]).to(self.embed)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
        x, angles = embedding(ids, self.embed), self.angles[:, positions]
        for layer, weights in enumerate(self.layers):
            x = self.finish(x, attend(layer, *self.begin(x, *weights[:-4]), *angles), *weights[-4:])
        return self.norm(x, self.last_norm)

    @torch.compile(disable=DEVICE == "cpu")
    def begin(self, x: Any, norm: Any, qkv: Any, *qk_norm: Any) -> Any:
        """q, k and v `[tokens, heads, head_dim]`, not rotated."""
        heads, kv_heads, head_dim = self.shape
        states = linear(self.norm(x, norm), qkv).view(len(x), -1, head_dim)
        q, k, v = torch.split(states, [heads, kv_heads, kv_heads], 1)
        return (self.norm(q, qk_norm[0]), self.norm(k, qk_norm[1]), v) if qk_norm else (q, k, v)

    @torch.compile(disable=DEVICE == "cpu")
    def finish(self, x: Any, out: Any, o: Any, norm: Any, gate_up: Any, down: Any) -> Any:
        x = x + linear(out.flatten(1), o)
        gate, up = linear(self.norm(x, norm), gate_up).chunk(2, -1)
        return x + linear(silu(gate) * up, down)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight.shape, weight, self.eps)


@dataclass(eq=False)
class Request:
    tokens: list[int]  # of the prompt, and then of the answer
    total: int  # how many there will be
    stop: int | None  # a token that ends the answer
    known: int = 0  # how many there are, with one that the device may have yet to sample
    computed: int = 0  # K and V of how many are in the cache, or will be when the device is done
    sequence: Any = None  # its `index` is its row


class Engine:
    """Runs requests, the oldest first. The host is a step ahead of the device, and reads tokens a step late."""

    def __init__(self, model: Model, max_sequences: int, chunk: int = 2048, **options: Any) -> None:
        c, self.model, self.max_sequences, self.chunk = model.config, model, max_sequences, chunk
        layout = KVLayout(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, model.embed.dtype)
        self.cache = KVCache(layout, max_sequences, model.angles.shape[1], device=DEVICE, **options)
        self.waiting, self.running, self.flying = list[Request](), list[Request](), list[Any]()
        self.inputs = torch.zeros(8, chunk + max_sequences + 8, dtype=torch.int32, device=DEVICE)
        self.last = torch.zeros(max_sequences + 1, dtype=torch.int64, device=DEVICE)  # tokens by row; the last is waste
        self.graphs = self.capture() if DEVICE == "cuda" else {}

    def add(self, prompt: list[int], new_tokens: int, stop: int | None = None) -> Request:
        total, most = len(prompt) + new_tokens, self.cache.stats().budget_bytes // self.cache.layout.token_bytes
        if not 0 < len(prompt) < total <= min(most, self.cache.max_seq_len):
            raise ValueError(f"there is no room for a prompt of {len(prompt)} tokens and {new_tokens} new ones")
        self.waiting.append(Request([*prompt], total, stop))
        return self.waiting[-1]

    def run(self) -> None:
        while self.waiting or self.running or self.flying:
            self.step()

    @torch.inference_mode()
    def step(self) -> None:
        """Launches a step, and reads the tokens of the one before."""
        self.admit()
        self.grow()
        if launched := bool(self.running):
            self.launch()
        while len(self.flying) > launched:
            self.land()

    # --8<-- [start:admit]
    def admit(self) -> None:
        """Starts requests while there is memory for their tokens, and the step has some left for their prompts."""
        lacking, cache = sum(request.known - request.computed - 1 for request in self.running), self.cache
        while self.waiting and len(self.running) < self.max_sequences and lacking < self.chunk:
            request, ids = self.waiting[0], np.array(self.waiting[0].tokens)
            wanted = (len(ids) + HEADROOM * (len(self.running) + 1)) * cache.layout.token_bytes
            if self.running and wanted > (cache.available_pages + cache.shared_pages(ids)) * cache.page_size:
                return
            try:
                request.sequence = cache.sequence(token_ids=ids)  # it begins with K and V that others have left
            except OutOfPagesError:
                if self.running or cache.trim():
                    return
                raise
            request.known, request.computed = len(ids), request.sequence.cached_tokens
            self.running.append(self.waiting.pop(0))
            lacking += request.known - request.computed - 1

    def grow(self) -> None:
        """Makes room for a token of each request that decodes. Where there is none for all of them, the newest goes
        back to wait, and finds what is left of its K and V when it comes again."""
        while sequences := [each.sequence for each in self.running if each.known > each.sequence.length]:
            try:
                self.cache.extend(sequences, 1)
                return
            except OutOfPagesError:
                if self.flying:
                    self.land()
                elif len(self.running) == 1:
                    raise
                else:
                    self.waiting.insert(0, self.running[-1])
                    self.end(self.running[-1:])

    # --8<-- [end:admit]
    def launch(self) -> None:
        """Gives the device a step: a token of each request, and chunks of prompts; as a graph where one fits."""
        rows, starts, known = np.array([(r.sequence.index, r.computed, r.known) for r in self.running]).T
        left, counts, ids = self.chunk, np.ones_like(rows), list[int]()
        for number, request in enumerate(self.running):
            counts[number] = count = min(request.known - request.computed, left + 1)
            left -= count - 1  # a token that the device has yet to sample is named by its row:
            ids += request.tokens[request.computed : request.computed + count] or [-1 - request.sequence.index]
            request.computed += count
        is_sampled, prompts, ends = starts + counts == known, len(ids) > len(rows), counts.cumsum()
        fitting = [step for step in self.graphs if step[0] == prompts and step[1] >= len(ids)]
        step = min(fitting, default=(prompts, len(ids), len(rows)))
        packed = torch.zeros(8, max(step[1], step[2] + 1), dtype=torch.int32, pin_memory=DEVICE == "cuda")
        packed[6], packed[7] = self.max_sequences, len(ids)  # where tokens of padding go, and where it ends
        positions = np.arange(len(ids)) + np.repeat(starts - ends + counts, counts)
        fields = ids, positions, rows, starts, starts + counts, ends - 1, rows, np.append(0, ends)
        for place, field in zip(packed.numpy(), fields):
            place[: len(field)] = field
        self.inputs[:, : packed.shape[1]].copy_(packed, non_blocking=True)
        self.graphs[step].replay() if fitting else self.compute(*step)
        last = self.last.to("cpu", non_blocking=True, copy=True)
        sampled = [self.running[number] for number in np.flatnonzero(is_sampled)]
        self.flying.append((torch.cuda.current_stream().record_event() if DEVICE == "cuda" else None, last, sampled))
        for request in (self.running[number] for number in np.flatnonzero(counts > 1)):
            request.sequence.commit(np.array(request.tokens[: request.computed]))  # others may begin with it now
        for request in sampled:
            request.known += 1
        self.end([request for request in sampled if request.known == request.total])

    def compute(self, prompts: bool, size: int, slots: int) -> None:
        """What the device does in a step. All numbers are in `inputs`, so that a graph of it serves many steps."""
        ids, positions = self.inputs[:2, :size]
        rows, starts, lengths, ends, targets = self.inputs[2:7, :slots]
        cu_seqlens = self.inputs[7, : slots + 1]

        def attend(layer: int, q: Any, k: Any, v: Any, cos: Any, sin: Any) -> Any:
            kv = self.cache.kv(layer)
            if DEVICE == "cpu":
                return attend_on_host(q, k, v, cos, sin, *kv, rows, starts, cu_seqlens)
            append(k, v, *kv, rows, starts, cu_seqlens, rotary=RotateHalf(q, q, cos, sin))
            return mixed(q, *kv, cu_seqlens, lengths, rows) if prompts else decode(q[:, None], *kv, lengths, rows)[:, 0]

        ids = torch.where(ids < 0, self.last[(-1 - ids).clamp(min=0)], ids)
        self.last[targets] = linear(self.model.forward(ids, positions, attend)[ends], self.model.head).argmax(-1)

    def land(self) -> None:
        """Waits for the oldest step, and reads its tokens."""
        event, last, sampled = self.flying.pop(0)
        if event:
            event.synchronize()
        for request, token in zip(sampled, last[[request.sequence.index for request in sampled]].tolist()):
            if len(request.tokens) < request.total:
                request.tokens.append(token)
                if token == request.stop:
                    request.total = len(request.tokens)
                    self.end([request] if request in self.running else [])

    def end(self, requests: list[Request]) -> None:
        for request in requests:
            request.sequence.commit(np.array(request.tokens[: request.computed], np.int64))
            self.running.remove(request)
        self.cache.free([request.sequence for request in requests])

    @torch.inference_mode()
    def capture(self) -> dict[tuple[bool, int, int], torch.cuda.CUDAGraph]:
        """Graphs by number of tokens, of padding alone: what they do depends on their inputs."""
        graphs, pool, slots = {}, torch.cuda.graph_pool_handle(), self.max_sequences
        steps = [(False, size, size) for size in {2, 4, 8, *range(16, slots, 16), max(slots, 2)}]
        steps += [(True, size, slots) for size in {*range(64, self.chunk + slots, 64), self.chunk + slots}]
        for step in sorted(steps, reverse=True):
            self.compute(*step)  # compiles
            torch.cuda.synchronize()
            graphs[step] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[step], pool=pool):
                self.compute(*step)
        return graphs


def attend_on_host(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, *indices: Any) -> torch.Tensor:
    """Stores K and V of new tokens, and computes attention, a sequence at a time."""
    outs, (rows, starts, ends) = [], (index.tolist() for index in indices)
    q, k = (x * cos[:, None] + torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1) * sin[:, None] for x in (q, k))
    for row, start, begin, end in zip(rows, starts, ends, ends[1:]):
        length = start + end - begin
        keys[row, start:length], values[row, start:length] = k[begin:end], v[begin:end]
        sees = torch.ones(end - begin, length, dtype=torch.bool).tril(start)
        heads, *kv = (x.transpose(0, 1) for x in (q[begin:end], keys[row, :length], values[row, :length]))
        outs.append(scaled_dot_product_attention(heads, kv[0], kv[1], sees, enable_gqa=True).transpose(0, 1))
    return torch.cat(outs)


def main() -> None:
    config = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4)
    engine = Engine(Model(LlamaForCausalLM(config), max_seq_len=512), max_sequences=8, max_bytes="10MiB")
    requests = [engine.add([*range(300), *range(n)], new_tokens=30) for n in range(1, 160, 10)]
    engine.run()
    print(f"{len(requests)} answers; {engine.cache.stats().cached_tokens} tokens of prompts were found")


if __name__ == "__main__":
    main()
