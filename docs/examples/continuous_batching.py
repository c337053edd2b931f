"""transformers' continuous batching on rows, with a tiny Llama of random weights."""

from typing import Any

import torch
from transformers import ContinuousBatchingConfig, LlamaConfig, LlamaForCausalLM

import vmmkv
import vmmkv.integrations.continuous_batching as rows

config = LlamaConfig(
    vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=16,
    num_key_value_heads=8, eos_token_id=None, pad_token_id=0, max_position_embeddings=4096,
)  # fmt: skip
torch.manual_seed(0)
model: Any = LlamaForCausalLM(config)  # Any: transformers' annotations of generate do not hold
model.eval()
prompts = [torch.randint(1, 128, (length,)).tolist() for length in (40, 7, 90)]
model.generation_config.update(max_new_tokens=20, do_sample=False, eos_token_id=-1)
expected = []
for prompt in prompts:
    tokens = torch.tensor([prompt])
    answer = model.generate(tokens, attention_mask=torch.ones_like(tokens), eos_token_id=1000)
    expected.append(answer[0, len(prompt) :].tolist())

# --8<-- [start:enable]
rows.enable(model, max_bytes="1GiB")  # of K and V; all else is as always
results = model.generate_batch(prompts)
# --8<-- [end:enable]
assert [result.generated_tokens for result in results.values()] == expected

# --8<-- [start:manager]
batching = ContinuousBatchingConfig(max_batch_tokens=256, cpu_offload_space=1.0)  # GiB of host memory
manager = model.init_continuous_batching(continuous_batching_config=batching)
manager.start()
names = manager.add_requests(prompts)
answers: dict[str, list[int]] = {}
while len(answers) < len(names):
    result = manager.get_result(timeout=1)
    if result is not None and result.is_finished():
        answers[result.request_id] = result.generated_tokens
manager.stop()
# --8<-- [end:manager]
assert [answers[name] for name in names] == expected

# --8<-- [start:pool]
pool = vmmkv.FramePool("4GiB")
for each in (model, LlamaForCausalLM(config)):
    rows.enable(each, pool=pool)  # what one does not use the other can have
# --8<-- [end:pool]

rows.disable(model)
