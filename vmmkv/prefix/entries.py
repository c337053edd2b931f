"""The library of the prefix tree, each function under its name: loaded, or compiled, at first use."""

from ..compiled import entries_of
from ..compiled.code import on_first_use
from ..core.entries import SOURCES as CORE

MODULES = "tables containers nodes holders telling finding committing hosted evicting"
ENTRIES = entries_of("vmmkv.prefix", MODULES)
SOURCES = [*CORE, *[f"prefix/{name}.py" for name in (*MODULES.split(), "entries")]]
__getattr__ = on_first_use(__name__, ENTRIES, SOURCES)
