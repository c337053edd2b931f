"""Debugging with `VMMKV_DEBUG=1`: whether it is on, and who took what."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import FrameType

PACKAGE = str(Path(__file__).parents[1]) + os.sep
FRAMES = 4


def is_on() -> bool:
    """Whether pools made now are to be debugged."""
    return os.environ.get("VMMKV_DEBUG", "0") not in ("", "0")


def caller() -> str:
    """Where the user's code is that called us: the innermost places first."""
    return " < ".join(islice(_places(), FRAMES))


def _places() -> Iterator[str]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            yield f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
