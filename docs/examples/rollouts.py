"""Reinforcement learning with rollouts on rows: REINFORCE with a tiny Llama of random weights and a made-up reward."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import vmmkv
import vmmkv.integrations.continuous_batching as rows

config = LlamaConfig(
    vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, eos_token_id=None, pad_token_id=0, max_position_embeddings=1024,
)  # fmt: skip
torch.manual_seed(0)
model: Any = LlamaForCausalLM(config)
model.generation_config.update(max_new_tokens=16, do_sample=True, eos_token_id=-1)  # -1: no token ends an answer
prompts = [torch.randint(1, 128, (12,)).tolist() for _ in range(4)]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
pool = vmmkv.FramePool("1GiB")

# --8<-- [start:enable]
rows.enable(model, pool=pool, persistent=True, raise_errors=True)
# --8<-- [end:enable]


# --8<-- [start:loop]
def rollout(copies: int = 4) -> list[tuple[list[int], list[int]]]:
    """Prompts and answers: copies of a prompt share its pages."""
    asked = [prompt for prompt in prompts for _ in range(copies)]
    model.eval()
    results = model.generate_batch(asked, progress_bar=False)  # in the order of the prompts
    return list(zip(asked, (result.generated_tokens for result in results.values())))


for _ in range(2):
    answers = rollout()  # afterwards K and V take no memory
    assert pool.stats().physical_bytes == 0
    rewards = torch.tensor([sum(token < 64 for token in answer) / len(answer) for _, answer in answers])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    model.train()
    ids = torch.tensor([prompt + answer for prompt, answer in answers])
    logits = model(ids[:, :-1]).logits[:, 11:]
    chosen = logits.log_softmax(-1).gather(-1, ids[:, 12:, None]).squeeze(-1)
    (-(advantages[:, None] * chosen).mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
# --8<-- [end:loop]

rows.disable(model)
