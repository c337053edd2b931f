"""The library of the prefix tree, each function under its name: loaded, or compiled, at first use."""

from ..compiled.code import on_first_use
from ..core.entries import SOURCES as CORE
from . import committing, finding, holders, telling

ENTRIES = [
    finding.look_up,
    finding.plan_hit,
    committing.commit,
    committing.evict,
    committing.pin,
    committing.clear,
    holders.adopted,
    holders.inherit,
    holders.forget,
    telling.drain,
]
SOURCES = [
    *CORE,
    *[f"prefix/{name}.py" for name in ("tables", "order", "nodes", "holders", "telling", "finding", "committing")],
    "prefix/entries.py",
]
__getattr__ = on_first_use(__name__, ENTRIES, SOURCES)
