"""The library of compiled functions around memory systems, each under its name: loaded, or compiled, at first use."""

import threading
from typing import Any

from ..compiled.code import link
from . import fencing, mapping, running

ENTRIES = [
    running.run,
    running.queue,
    running.synchronize,
    fencing.record,
    fencing.pending,
    fencing.order,
    fencing.first_event,
    mapping.host_install,
    mapping.host_nothing,
    mapping.host_number,
    mapping.host_refuse,
    mapping.host_reserve,
    mapping.host_free,
    mapping.host_create,
    mapping.host_release,
    mapping.host_map,
    mapping.host_set_access,
    mapping.host_unmap,
    mapping.host_fill,
    mapping.host_copy,
]
SOURCES = [f"driver/{name}.py" for name in ("table", "running", "fencing", "mapping", "entries")]
_loading = threading.Lock()
NAMES = [function.__name__ for function in ENTRIES]


def __getattr__(name: str) -> Any:
    """Loads all entries when the first is needed: to import the package must not take as long."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _loading:
        if name not in globals():  # a second copy would have words of its own where functions share some
            globals().update(zip(NAMES, link(__name__, ENTRIES, SOURCES)))
    return globals()[name]
