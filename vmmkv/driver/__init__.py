"""Memory systems, as C functions by address with the CUDA driver's signatures (see `table`).

    table              the contract: which functions there are, and what they promise
    driver             what Python holds of a memory system: calls, times, errors
    cuda, host         the CUDA driver's virtual memory API; mmap on a memfd, and addresses without memory
    fence              what must have finished before memory is handed on

Compiled functions: `running` makes the calls, `fencing` keeps the events, `mapping` is the host's memory system;
`entries` loads them.
"""
