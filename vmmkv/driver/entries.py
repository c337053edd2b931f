"""The library of compiled functions around memory systems, each under its name: loaded, or compiled, at first use."""

from ..compiled import entries_of
from ..compiled.code import on_first_use

MODULES = "table running fencing mapping"
ENTRIES = entries_of("vmmkv.driver", MODULES)
SOURCES = [f"driver/{name}.py" for name in (*MODULES.split(), "entries")]
__getattr__ = on_first_use(__name__, ENTRIES, SOURCES)
