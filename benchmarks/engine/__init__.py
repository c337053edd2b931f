"""A small serving engine whose KV cache is a parameter: rows of vmmkv, blocks of a block table, or static slots.

model                 a Llama-type model in plain torch
backend               what is asked of a KV cache; `vmm`, `paged` and `static` are one each
schedule              who runs: admission, chunks of prompts, preemption; arithmetic on the host
attention             the kernels over what a backend holds
engine                the loop: a schedule's steps on the device
run                   the record of what happened
"""
