"""Events: what routers are told of the prefixes that can be reused, in vLLM's words."""

import hashlib

import msgspec
import torch
import zmq

import vmmkv
from vmmkv.events import EventLog, Removed, Stored, salt_of
from vmmkv.events.publisher import EventPublisher

layout = vmmkv.KVLayout(num_layers=8, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)

# --8<-- [start:cache]
log = EventLog(block_size=16)
cache = vmmkv.KVCache(layout, 64, 8192, max_bytes="256MiB", page_size=512 << 10, device="cpu", event_log=log)

prompt = list(range(100))
with cache.sequence(token_ids=prompt, salt="tenant-1") as seq:
    # compute K and V of prompt[seq.cached_tokens :]
    seq.commit(prompt)  # six blocks, and four tokens of a page that is not full
# --8<-- [end:cache]

# --8<-- [start:drain]
for event in cache.events(timeout=1.0):  # waits a second at most; None: for as long as it takes
    if isinstance(event, Stored):
        print(len(event.blocks.hashes), "blocks stored behind", event.blocks.parent)
    elif isinstance(event, Removed):
        print(len(event.hashes), "removed")
# --8<-- [end:drain]


# --8<-- [start:tenant]
with cache.sequence(token_ids=prompt, tenant="acme", salt="chat") as seq:
    seq.commit(prompt)
salt = salt_of("chat", tenant="acme")  # what the router hears, and needs for a request of theirs
# --8<-- [end:tenant]
assert salt == '["acme", "chat"]'
(blocks,) = (event.blocks for event in cache.events() if isinstance(event, Stored))
assert (blocks.salt, blocks.tenant) == ("chat", "acme")


# --8<-- [start:names]
def field(value: str | int | None) -> bytes:
    kind, data = ("n", b"") if value is None else ("s" if isinstance(value, str) else "i", str(value).encode())
    return f"{kind}{len(data)}:".encode() + data


def names(
    ids: list[int], salt: str | None, adapter: str | int | None, tenant: str | int | None, size: int
) -> list[int]:
    digest = hashlib.sha256(b"vmmkv" + field(salt) + field(adapter) + field(tenant) + field(size)).digest()
    found = []
    for end in range(size, len(ids) + 1, size):
        block = b"".join(each.to_bytes(8, "little") for each in ids[end - size : end])
        digest = hashlib.sha256(digest + block).digest()
        found.append(int.from_bytes(digest[-8:], "big"))
    return found


print(names(prompt, salt="chat", adapter=None, tenant="acme", size=16))
# --8<-- [end:names]
assert blocks.hashes == tuple(names(prompt, "chat", None, "acme", 16))

with cache.sequence(token_ids=range(1000, 1064)) as seq:
    seq.commit(range(1000, 1064))
# --8<-- [start:publish]
local = "tcp://127.0.0.1:*"  # a free port; other hosts could read token ids at "tcp://*:5557"
publisher = EventPublisher(log, local, topic="kv@pod-1@llama", replay_endpoint=local)
# --8<-- [end:publish]

# --8<-- [start:subscribe]
router = zmq.Socket(zmq.Context.instance(), zmq.DEALER)
router.connect(str(publisher.replay_endpoint))
batch = b""
while not batch:  # an empty one ends a replay: then nothing has been published so far
    router.send_multipart([b"", (0).to_bytes(8, "big")])  # all from message 0 on; live ones come to a SUB socket
    _, topic, number, batch = router.recv_multipart()
moment, events, rank = msgspec.msgpack.decode(batch)
print(topic, int.from_bytes(number, "big"), [(event["type"], len(event["block_hashes"])) for event in events])
# --8<-- [end:subscribe]
assert [(event["type"], len(event["block_hashes"])) for event in events] == [("BlockStored", 4)]

publisher.close()
cache.close()
router.close(linger=0)
