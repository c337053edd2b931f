"""The library of the books, each function under its name: loaded, or compiled, at first use."""

import threading
from typing import Any

from ..compiled.code import link
from . import accounts, ahead, copying, growth, guests, journal, parting, reclaim, sharing, starting, streams

ENTRIES = [
    journal.run,
    journal.commit,
    growth.grow,
    growth.grow_one,
    growth.plan_growth,
    starting.adopt,
    starting.adopt_kept,
    starting.kept,
    starting.plan_empty,
    starting.free,
    starting.keep,
    starting.expect,
    streams.record_stream,
    sharing.plan_share,
    parting.can_part,
    parting.plan_part,
    parting.fence,
    parting.plan_swap,
    parting.plan_unstage,
    parting.plan_repair,
    copying.copy_rows,
    reclaim.plan_limit,
    reclaim.plan_trim,
    reclaim.plan_retired,
    reclaim.plan_stock,
    reclaim.lease,
    accounts.open_account,
    accounts.close_account,
    accounts.open_cache,
    accounts.plan_close,
    ahead.plan_ahead,
    guests.join,
    guests.notes,
    guests.hold,
    guests.drop,
    guests.pin,
]
MODULES = "tables streams rows frames journal reclaim accounts growth starting sharing parting copying ahead guests"
SOURCES = [f"core/{name}.py" for name in (*MODULES.split(), "entries")] + [
    f"driver/{name}.py" for name in ("table", "running", "fencing")
]
_loading = threading.Lock()
NAMES = [function.__name__ for function in ENTRIES]


def __getattr__(name: str) -> Any:
    """Loads all entries when the first is needed, so that importing the package stays fast."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _loading:
        if name not in globals():  # a second copy would have its own `static` words
            globals().update(zip(NAMES, link(__name__, ENTRIES, SOURCES)))
    return globals()[name]
