"""A small serving engine whose KV cache is a parameter: rows of vmmkv, or blocks of a block table.

model                 a Llama-type model in plain torch
backend               the interface of a KV cache; `rows` and `blocks` implement it
schedule              which requests run: admission, chunks of prompts, preemption; arithmetic on the host
attention             the kernels over a backend's K and V
engine                the loop: a schedule's steps on the device
run                   the record of a run, and the steps in flight
"""
