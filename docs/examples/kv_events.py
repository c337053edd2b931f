"""Events: what routers are told of the prefixes that can be reused, in vLLM's and in TensorRT-LLM's words."""

import asyncio

import msgspec
import zmq

from vmmkv.events import EventLog, Removed, Stored, tensorrt_llm
from vmmkv.events.publisher import EventPublisher

# --8<-- [start:produce]
log = EventLog(block_size=16)
log.created(device_blocks=4096, host_blocks=16_384)

prompt = log.stored(log.root(salt="tenant-1"), 0, range(100))  # six blocks, and four tokens of a seventh
answer = log.stored(prompt, 100, [*range(96, 100), *range(500, 540)])  # ids from the beginning of the block on
log.removed(answer, 120)  # tokens 120 to 139: what was a block that ended there is none now
# --8<-- [end:produce]

# --8<-- [start:drain]
for event in log.events(timeout=1.0):  # waits a second at most; None: for as long as it takes
    if isinstance(event, Stored):
        print(len(event.blocks.hashes), "blocks stored behind", event.blocks.parent)
    elif isinstance(event, Removed):
        print(len(event.hashes), "removed")
# --8<-- [end:drain]


# --8<-- [start:follow]
async def follow() -> None:
    async for event in log:
        print(event)


# --8<-- [end:follow]

# --8<-- [start:dictionaries]
encoder = tensorrt_llm.Encoder(window_size=8192)  # attention looks this far back: all of `max_seq_len`
log.updated(prompt, 0, range(32), tier=("device", "host"))
for dictionary in encoder.encode(log.events()):
    print(dictionary["event_id"], dictionary["data"]["type"], dictionary["data"]["cache_level"])
# --8<-- [end:dictionaries]

log.stored(log.root(), 0, range(64))
# --8<-- [start:publish]
local = "tcp://127.0.0.1:*"  # a free port; for other hosts, "tcp://*:5557"
publisher = EventPublisher(log, local, topic="kv@pod-1@llama", replay_endpoint=local)
# --8<-- [end:publish]

# --8<-- [start:subscribe]
router = zmq.Socket(zmq.Context.instance(), zmq.DEALER)
router.connect(str(publisher.replay_endpoint))
router.send_multipart([b"", (0).to_bytes(8, "big")])  # all from message 0 on; live ones come to a SUB socket
_, topic, number, batch = router.recv_multipart()
moment, events, rank = msgspec.msgpack.decode(batch)
print(topic, int.from_bytes(number, "big"), [(event["type"], len(event["block_hashes"])) for event in events])
# --8<-- [end:subscribe]
assert [(event["type"], len(event["block_hashes"])) for event in events] == [("BlockStored", 4)]

# --8<-- [start:close]
publisher.close()
log.close()
# --8<-- [end:close]
router.close(linger=0)
asyncio.run(follow())  # ends at once
