"""The library of the books, each function under its name: loaded, or compiled, at first use."""

from ..compiled import entries_of
from ..compiled.code import on_first_use

MODULES = "tables codes access pages streams rows frames journal booking reclaim accounts"
MODULES += " growth starting sharing parting copying ahead"
ENTRIES = entries_of("vmmkv.core", MODULES)
SOURCES = [f"core/{name}.py" for name in (*MODULES.split(), "entries")]
SOURCES += [f"driver/{name}.py" for name in ("table", "running", "fencing")]
__getattr__ = on_first_use(__name__, ENTRIES, SOURCES)
