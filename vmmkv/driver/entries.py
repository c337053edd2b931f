"""The library of compiled functions around memory systems, each under its name: loaded, or compiled, at first use."""

from ..compiled.code import on_first_use
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
__getattr__ = on_first_use(__name__, ENTRIES, SOURCES)
