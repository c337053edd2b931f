"""Debugging with `VMMKV_DEBUG=1`: whether it is on, and who made what."""

from __future__ import annotations

import os
import sys
import threading
from itertools import islice
from pathlib import Path
from traceback import walk_stack

OURS = str(Path(__file__).parent) + os.sep, threading.__file__
"""Code that nobody asks for: of this package, and what begins a thread."""
FRAMES = 4


def is_on() -> bool:
    """Whether pools made now are to be debugged."""
    return os.environ.get("VMMKV_DEBUG", "0") not in ("", "0")


def caller() -> str:
    """Where the user's code is that called us: the innermost places first. Equal places are one string."""
    codes = ((frame.f_code, line) for frame, line in walk_stack(sys._getframe(1)))
    places = (
        f"{code.co_filename}:{line} in {code.co_name}" for code, line in codes if not code.co_filename.startswith(OURS)
    )
    return sys.intern(" < ".join(islice(places, FRAMES)) or "an unknown place")
