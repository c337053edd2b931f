"""Debugging with `VMMKV_DEBUG=1`: whether it is on, and who made what."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import FrameType

OURS = str(Path(__file__).parent) + os.sep, threading.__file__
"""Code that nobody asks for: of this package, and what begins a thread."""
FRAMES = 4


def is_on() -> bool:
    """Whether pools made now are to be debugged."""
    return os.environ.get("VMMKV_DEBUG", "0") not in ("", "0")


def caller() -> str:
    """Where the user's code is that called us: the innermost places first. Equal places are one string."""
    return sys.intern(" < ".join(islice(_places(), FRAMES)) or "an unknown place")


def _places() -> Iterator[str]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(OURS):
            yield f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
