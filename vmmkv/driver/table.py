"""The contract of a memory system: a table of C functions by address, and of the arguments that they take.

The functions have the signatures of the CUDA driver's, with words of 64 bits, and return 0 or a status. Each is one
call of the memory system, so that a test can put a function of its own in the place of any of them.

 1. `reserve` returns addresses that belong to nobody else and that fault on any access.
 2. `create` returns physical memory, of a page or of several. It has no address. What it holds is nobody's secret:
    zeros, as far as has been seen, but a driver need not promise that.
 3. `map` puts all of it under an address; an access still faults until `set_access`.
    It may be mapped at many addresses; they all see the same bytes.
 4. `unmap` takes the pages away from an address range, wherever there are some; accesses fault again. The bytes
    stay in the pages until `release`, and a page mapped again elsewhere shows them there.
 5. A call either does what it says or returns a status and does nothing.
 6. Only the process that made a driver has a part in its pages and addresses: in a forked child `push`, with which
    each use of these functions begins, returns `FORKED`.
 7. No call of these waits for work on the device, and none checks whether work still uses a page: that is the caller's
    part (see `vmmkv.driver.fencing`).
 8. A call is made with the device's context current, and in relaxed capture mode, so that another thread's CUDA graph
    capture is neither broken nor in the way (see `vmmkv.driver.running`). A stream is named by its handle.
"""

from __future__ import annotations

import numpy as np

FUNCTIONS = {
    "reserve": 5,  # (out, bytes, alignment, 0, 0)
    "free": 2,  # (address, bytes)
    "create": 4,  # (out, bytes, property, 0)
    "release": 1,  # (handle)
    "map": 5,  # (address, bytes, 0, handle, 0)
    "set_access": 4,  # (address, bytes, access, 1)
    "unmap": 2,  # (address, bytes)
    "fill": 4,  # (address, value, bytes, stream)
    "copy": 4,  # (destination, source, bytes, stream)
    "make_event": 2,  # (out, flags)
    "record": 2,  # (event, stream)
    "query": 1,  # (event)
    "wait": 3,  # (stream, event, 0): the stream waits
    "wait_for": 1,  # (event): the host waits
    "is_capturing": 2,  # (stream, out)
    "push": 1,  # (context)
    "pop": 1,  # (out)
    "capture_mode": 1,  # (in and out)
    "allocate": 2,  # (out, bytes)
    "deallocate": 1,  # (address); waits for all work on the device
    "synchronize": 0,
}
"""Names of the functions, and how many arguments they take."""
ARGUMENTS = ("context", "property", "access", "read_access")
"""What the functions are given: the device's context, what `create` makes, and what `set_access` allows."""
FENCES = ("tick", "streams_at", "ticks_at", "events_at")
"""See `vmmkv.driver.fencing`."""

DRIVER = np.dtype([(name, np.int64) for name in (*FUNCTIONS, *ARGUMENTS, "clock", *FENCES)])
"""`clock` is `clock_gettime`."""

UNMAP, MAP, SET_ACCESS, CREATE, RELEASE, SET_READ_ACCESS, RESERVE, FREE, WAIT_FOR, FILL, COPY, SYNCHRONIZE = range(12)
"""Kinds of steps. A meter counts those up to `RELEASE`, and `SET_READ_ACCESS` as `SET_ACCESS`."""
VACANT = -1
"""The handle of a frame that does not exist."""

OUT_OF_MEMORY, NOT_READY, CAPTURED_IMPLICITLY = 2, 600, 906
"""Statuses of the CUDA driver's that compiled code knows; other memory systems use the same."""
FORKED = -1
"""A status of ours: the driver is the parent's."""

STATUS, CELL, MODE, TIME = 0, 1, 2, 3
"""Words of a scratch of the caller's: a status, what a function writes, a capture mode, a `timespec`."""
SCRATCH = 5
"""Words of a scratch."""
