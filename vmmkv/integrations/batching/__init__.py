"""All that knows the insides of transformers' continuous batching: a module for each thing of theirs that is replaced.

    manager     chooses attention, and makes a processor        RowManager
    processor   makes what offloads, and what runs the model    RowProcessor
    runner      pads batches, and makes graphs of them          RowRunner
    inputs      hold what a forward pass reads                  RowBatch, RowBatchesAhead
    scheduler   chooses requests                                RowScheduler
    cache       admits, writes, forks, finds prefixes           RowCache
    offloading  moves tokens to the host                        RowOffloading

Each is a subclass that is put in the place of the name in their functions' globals, for these functions alone (`model`
puts the first). Beside them are what a model calls for `attention`, what a `config` means, the processes of a group
(`ranks`), and requests of one batch that are sampled each in its own way (`sampling`). A table of blocks has one column
here, the row of each request: so one captured graph serves every length.
"""

from __future__ import annotations

import transformers

from ...errors import UnsupportedError

TESTED = ("5.23", "5.24")
"""Versions of transformers whose continuous batching is known here."""


def check_version() -> None:
    """Raises `UnsupportedError` where continuous batching is not what is known here."""
    if not transformers.__version__.startswith(tuple(f"{version}." for version in TESTED)):
        raise UnsupportedError(
            f"transformers {transformers.__version__} is not among the versions whose continuous batching is known "
            f"here: {', '.join(TESTED)}. Install one of these, or a later vmmkv"
        )


try:
    from . import model as model
except ImportError as error:
    raise UnsupportedError(
        f"transformers {transformers.__version__} has no continuous batching that is known here ({error}); "
        f"install one of {', '.join(TESTED)}"
    ) from error
