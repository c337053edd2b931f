"""A tensor that grows in place: a log of activations, far larger in shape than in memory."""

import torch

import vmmkv
from vmmkv.torch import GrowableTensor, memory_allocated

# --8<-- [start:grow]
log = GrowableTensor((1 << 30, 1024), torch.float32, max_bytes="64MiB")  # 4 TiB of addresses, no memory
log.append(torch.randn(1000, 1024, device=log.device))
first = log.tensor  # [1000, 1024]

log.append(torch.randn(5000, 1024, device=log.device))
assert log.tensor.data_ptr() == first.data_ptr()  # it never moves: older views stay valid
print(log, log.stats())
# --8<-- [end:grow]

# --8<-- [start:shrink]
log.resize(100)  # the pages behind stay mapped, to be grown into again
held = memory_allocated(log.device)
returned = log.trim()  # and go back to the system here
assert memory_allocated(log.device) == held - returned
# --8<-- [end:shrink]

try:
    log.resize(1 << 20)  # 4 GiB
except vmmkv.OutOfPagesError as error:
    print(error)
assert len(log) == 100  # as before
