"""transformers' continuous batching on rows, and all that knows its insides.

What is replaced is a subclass of transformers' class, put in the place of its name in the globals of one function:

    manager     ContinuousBatchingManager       starts and stops, takes requests, chooses attention
    processor   ContinuousBatchProcessor        makes one forward pass after another
                FIFOScheduler, PrefillFirst...  choose requests; managers on one pool take turns
    batches     ContinuousBatching[Async]IOs    hold what a pass reads; ModelRunner pads batches and captures graphs
    cache       PagedAttentionCache             admits, forks, finds prefixes; OffloadingManager has requests begin anew

`continuous_batching` puts the first in place. Beside these, `attention` is what models call, which writes and attends,
`model` finds what layers keep and tells weights apart, `requests` are sequences on rows, in all processes and on all
devices, `config` translates settings and checks requests.

transformers' table of blocks has one column here, the row of each request: so one captured graph serves every length.
"""

from __future__ import annotations

import transformers

from ...errors import UnsupportedError

TESTED = ("5.23", "5.24")  # versions of transformers that this package is tested with


def check_version() -> None:
    """Raise `UnsupportedError` for other versions of transformers."""
    if not transformers.__version__.startswith(tuple(f"{version}." for version in TESTED)):
        raise UnsupportedError(
            f"transformers {transformers.__version__} is not among the versions whose continuous batching is known "
            f"here: {', '.join(TESTED)}. Install one of these, or a later vmmkv"
        )


try:
    from . import manager as manager
except ImportError as error:
    raise UnsupportedError(
        f"transformers {transformers.__version__} has no continuous batching that is known here ({error}); "
        f"install one of {', '.join(TESTED)}"
    ) from error
