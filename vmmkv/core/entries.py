"""The library of the books, each function under its name: loaded, or compiled, at first use."""

from ..compiled.code import on_first_use
from . import (
    accounts,
    ahead,
    booking,
    copying,
    counting,
    growth,
    guests,
    journal,
    parting,
    reclaim,
    sharing,
    starting,
    storing,
    streams,
    suspending,
)

ENTRIES = [
    journal.run,
    booking.commit,
    growth.grow,
    growth.grow_one,
    growth.plan_growth,
    starting.adopt,
    starting.adopt_kept,
    starting.kept,
    starting.plan_empty,
    starting.free,
    starting.keep,
    streams.record_stream,
    sharing.plan_share,
    parting.can_part,
    parting.plan_part,
    parting.fence,
    parting.plan_swap,
    parting.plan_unstage,
    parting.plan_repair,
    copying.copy_rows,
    counting.count,
    suspending.plan_suspend,
    suspending.plan_resume,
    storing.copy_frames,
    storing.plan_load,
    reclaim.plan_limit,
    reclaim.plan_trim,
    reclaim.plan_retired,
    reclaim.plan_trim_own,
    accounts.open_account,
    accounts.close_account,
    accounts.open_cache,
    accounts.forget_adoption,
    accounts.plan_close,
    ahead.plan_ahead,
    guests.join,
    guests.hold,
    guests.hold_again,
    guests.drop,
]
MODULES = (
    "tables streams rows frames journal booking reclaim accounts growth starting sharing parting copying suspending "
    "ahead guests poisoning storing counting"
)
SOURCES = [f"core/{name}.py" for name in (*MODULES.split(), "entries")] + [
    f"driver/{name}.py" for name in ("table", "running", "fencing")
]
__getattr__ = on_first_use(__name__, ENTRIES, SOURCES)
