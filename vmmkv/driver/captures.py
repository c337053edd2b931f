"""Trying out whether work can be captured as a CUDA graph.

A capture of `torch.cuda.graph` that fails leaves torch unusable: its generator of random numbers and its caching
allocator believe that it goes on, and its stream stays the current one. So torch is not told of this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import cuda.bindings.driver as cu
import torch

from .cuda import SUCCESS, check

THREAD_LOCAL = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


@contextmanager
def trial_capture(device: torch.device) -> Iterator[None]:
    """Captures what is launched on a stream of a device, the current one meanwhile: it is not run, and forgotten."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # else the caching allocator may ask for events, which a capture does not allow
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        try:  # from here on: else an interruption leaves a stream in capture that somebody else is given
            (status,) = cu.cuStreamBeginCapture(stream.cuda_stream, THREAD_LOCAL)
            check("cuStreamBeginCapture", status)
            yield
        finally:
            status, graph = cu.cuStreamEndCapture(stream.cuda_stream)
            if status == SUCCESS:
                cu.cuGraphDestroy(graph)
        check("cuStreamEndCapture", status)
