"""transformers' `generate` on a cache that grows in place, with a tiny Llama of random weights.

Before transformers 5.24 the argument `cache` is called `past_key_values`.
"""

import copy
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import vmmkv
from vmmkv.integrations.transformers import VmmCache

config = LlamaConfig(
    vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
torch.manual_seed(0)
model: Any = LlamaForCausalLM(config)  # Any: transformers' annotations of generate do not hold
model.eval()
prompt = torch.randint(1, 128, (2, 40))
options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 20, "do_sample": False}
expected = model.generate(prompt, **options)

# --8<-- [start:generate]
cache = VmmCache(model.config, max_seq_len=131_072)  # addresses, no memory
output = model.generate(prompt, past_key_values=cache, **options)
assert torch.equal(output, expected)
# --8<-- [end:generate]

# --8<-- [start:reset]
(kv_cache,) = cache.kv_caches  # one for full attention, and one for each sliding window
calls = kv_cache.stats().driver_calls
cache.reset()
assert torch.equal(model.generate(prompt, past_key_values=cache, **options), expected)
assert kv_cache.stats().driver_calls == calls  # the next batch is on the pages of the last
# --8<-- [end:reset]

pool = vmmkv.FramePool("50%")  # of the memory that is free now
target, draft = (VmmCache(each.config, max_seq_len=131_072, pool=pool) for each in (model, model))
for shared in (target, draft):
    assert torch.equal(model.generate(prompt, past_key_values=shared, **options), expected)
assert pool.stats().holders == 2

# --8<-- [start:copy]
cache.reset()
with torch.no_grad():
    model(prompt[:, :-1], past_key_values=cache)  # the prompt, once
for _ in range(3):
    answer = model.generate(prompt, past_key_values=copy.deepcopy(cache), **options)
    assert torch.equal(answer, expected)
# --8<-- [end:copy]

# --8<-- [start:samples]
cache.reset()
with torch.no_grad():
    model(prompt[:1, :-1], past_key_values=cache)  # one prompt, once
cache.batch_repeat_interleave(8)  # eight forks of it
samples = model.generate(
    prompt[:1], past_key_values=cache, num_return_sequences=8, do_sample=True, max_new_tokens=20
)  # or num_beams=8
assert samples.shape == (8, 60)
# --8<-- [end:samples]

# --8<-- [start:compile]
model.set_attn_implementation("vmmkv")  # our kernels; on the CPU a warning says that there are none
compiled = VmmCache(model.config, max_seq_len=256, compile=True)  # on a GPU, generate compiles by itself now
assert torch.equal(model.generate(prompt, past_key_values=compiled, **options), expected)
# --8<-- [end:compile]

# --8<-- [start:eight_bits]
small = VmmCache(model.config, max_seq_len=131_072, kv_dtype="int8")  # or "fp8"
answer = model.generate(prompt, past_key_values=small, **options)  # its first choices may differ where they are close
# --8<-- [end:eight_bits]
assert answer.shape == expected.shape
print(kv_cache)
