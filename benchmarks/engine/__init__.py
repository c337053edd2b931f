"""A small serving engine whose KV cache is a parameter: rows of vmmkv, blocks of a block table, or static slots.

model.py      a Llama-type model in plain torch
schedule.py   who runs: admission, chunks of prompts, preemption; numpy only
vmm, paged, static    the KV backends, all of them a `backend.KVBackend`
attention.py  the kernels over what a backend holds
engine.py     the loop: a schedule's steps on the device
"""
