"""Forks the child processes of `run_python`. It has imported torch and loaded machine code, which would take most of
their time. With the argument `bare` it has not imported vmmkv.

A line of standard input is a child: code, arguments, environment, and the files that take its output. A line of
standard output is how it ended.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import types
import warnings
from typing import Any

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch

if "bare" not in sys.argv:
    from vmmkv.core import entries as core
    from vmmkv.driver import entries as driver
    from vmmkv.prefix import entries as prefix

    for library in (driver, core, prefix):
        getattr(library, library.ENTRIES[0].__name__)  # loads all of the library
    assert "numba" not in sys.modules  # children choose whether its simulator runs

torch.set_num_threads(1)  # as in the tests; and threads would not be there in a child

gc.collect()
gc.freeze()  # children need not look through what torch is made of, nor copy its pages for that


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of fork() beside numpy's threads
        return os.fork()


def begin_child() -> dict[str, Any]:
    """Returns in each child, with what it is to do."""
    for line in sys.stdin:
        if (child := fork()) == 0:
            return json.loads(line)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    os._exit(0)


child = begin_child()
for number, name in enumerate((os.devnull, *child["output"])):
    file = os.open(name, os.O_RDWR)
    os.dup2(file, number)
    os.close(file)
os.environ.clear()
os.environ.update(child["environment"])
sys.argv = ["-c", *child["arguments"]]
sys.modules["__main__"] = main = types.ModuleType("__main__")
exec(child["code"], main.__dict__)
