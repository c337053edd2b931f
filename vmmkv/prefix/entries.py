"""The library of the prefix tree, each function under its name: loaded, or compiled, at first use."""

from ..compiled.code import on_first_use
from ..core.entries import SOURCES as CORE
from . import committing, evicting, finding, holders, hosted, telling

ENTRIES = [
    finding.look_up,
    finding.plan_hit,
    finding.shared_pages,
    committing.commit,
    evicting.evict,
    evicting.pin,
    evicting.clear,
    hosted.look_up_host,
    hosted.settle_copy,
    hosted.settle_moved,
    holders.adopted,
    holders.inherit,
    holders.known_ids,
    telling.drain,
]
MODULES = "tables containers order nodes holders telling finding committing hosted evicting entries"
SOURCES = [
    *CORE,
    *[f"prefix/{name}.py" for name in MODULES.split()],
]
__getattr__ = on_first_use(__name__, ENTRIES, SOURCES)
