"""Two models on one GPU: two caches on one frame pool, and memory that follows the requests."""

import torch

import vmmkv
from vmmkv.torch import GrowableTensor

CHAT = vmmkv.KVLayout(num_layers=4, num_kv_heads=8, head_dim=64, dtype=torch.float32)  # 16 KiB a token
DRAFT = vmmkv.KVLayout(num_layers=2, num_kv_heads=4, head_dim=64, dtype=torch.float32)  # 4 KiB a token

# --8<-- [start:pool]
pool = vmmkv.FramePool("256MiB")  # a limit; memory is taken when tokens come
chat = vmmkv.KVCache(CHAT, max_sequences=64, max_seq_len=131_072, pool=pool, reserved="64MiB")
draft = vmmkv.KVCache(DRAFT, max_sequences=256, max_seq_len=8192, pool=pool)
# --8<-- [end:pool]

# --8<-- [start:bursts]
burst = chat.sequence(12_000)  # 188 MiB, which the other model does not need now
burst.free()  # its pages stay mapped, ready for the next request of this model

drafts = [draft.sequence(8192) for _ in range(6)]  # 192 MiB, from the first model
print(chat.stats().physical_bytes >> 20, "and", draft.stats().physical_bytes >> 20, "MiB of", pool)
# --8<-- [end:bursts]

# --8<-- [start:reserved]
try:
    draft.sequence(8192)  # 32 MiB more, but they are reserved
except vmmkv.OutOfPagesError as error:
    print(error)
else:
    raise AssertionError("the memory was not reserved")
prompt = chat.sequence(4096)  # the reserved 64 MiB
# --8<-- [end:reserved]
prompt.k(0).fill_(1.0)

for account in pool.stats().accounts:
    mib = [size >> 20 for size in (account.used_bytes, account.mapped_bytes, account.reserved_bytes)]
    print(f"{account.name}: {mib[0]} MiB used of {mib[1]} mapped, {mib[2]} reserved")

# --8<-- [start:limit]
try:
    pool.set_limit("128MiB")
except vmmkv.OutOfPagesError as error:  # live tokens take more: nothing has changed
    print(error)
assert pool.stats().limit_bytes == 256 << 20

draft.free(drafts)
pool.set_limit("128MiB")  # surplus goes back to the system before this returns
assert pool.stats().physical_bytes <= 128 << 20
# --8<-- [end:limit]
assert (prompt.k(0) == 1).all()

returned = pool.trim(keep="80MiB")  # surplus goes back to the system, until this is left
stats = pool.stats()
print(f"{returned >> 20} MiB went; {stats.physical_bytes >> 20} are left, {stats.free_bytes >> 20} of them free")
assert returned > 0

log = GrowableTensor((1 << 30, 1024), torch.float32, pool=pool, max_bytes="16MiB")  # at most so much of the pool
log.append(torch.randn(1000, 1024, device=log.device))
assert pool.stats().holders == 3

for holder in (log, draft, chat):
    holder.close()
pool.close()  # refused (BudgetError) while anything lies on it
