"""Events of KV cache reuse, for routers that send a request where its prefix lies: a bounded log and its encodings.

`vllm` says the same in the words of that engine, and `publisher` sends it by ZeroMQ. Both need the extra
`vmmkv[events]`.
"""

from .log import Blocks, Cleared, Created, Dropped, Event, EventLog, Removed, Stored
from .naming import salt_of

__all__ = ["Blocks", "Cleared", "Created", "Dropped", "Event", "EventLog", "Removed", "Stored", "salt_of"]
