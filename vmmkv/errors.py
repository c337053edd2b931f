"""Everything that can go wrong, as types: what was asked, what there was, what would help.

After any of these the cache is as it was before the call. It is usable, too, unless the error says that it is not:
`InvariantError`, `ForkError`, and `UseAfterFreeError` of a closed cache. All of them can be pickled: they cross from
process to process.
"""


class VmmkvError(Exception):
    """Base class of every error that vmmkv raises on purpose."""


class LayoutError(VmmkvError, ValueError):
    """A geometry that cannot be: a bad size of a layout, a row or a page, a range over the address limit, a stride over
    32 bits; or the layout of another process's sequence, which is not this cache's."""


class BudgetError(VmmkvError, ValueError):
    """A budget, or another bound, that cannot be: not a size, below one page, larger than the device's memory, or less
    than what is reserved. From `FramePool.close`: something still lies on the pool."""


class DeviceError(VmmkvError, ValueError):
    """A device that is not there, or a tensor or stream on another device than the cache."""


class DtypeError(VmmkvError, TypeError):
    """A dtype that the cache cannot hold, or another one than it holds; or token ids that are no integers."""


class ShapeError(VmmkvError, ValueError):
    """A tensor whose shape does not fit the tokens that it is written to; token ids that are not `[tokens]`; more rows
    than a growable tensor can have."""


class ArgumentError(VmmkvError, TypeError):
    """An argument has the wrong type, is missing, or conflicts with another."""


class OutOfRangeError(VmmkvError, IndexError):
    """The number of a layer, range, row or sequence is out of range."""


class UnsupportedError(VmmkvError, NotImplementedError):
    """This cache does not support the operation, though others of the same interface do."""


class OutOfPagesError(VmmkvError, MemoryError):
    """The page pool cannot supply the pages that were asked for.

    Attributes:
        requested: pages asked for.
        available: pages that could have been had: free, still within the budget, or reclaimable. From
            `FramePool.set_limit`: the lowest limit that could have been set.
    """

    def __init__(self, message: str, *, requested: int = 0, available: int = 0) -> None:
        super().__init__(message)
        self.requested = requested
        self.available = available


class OutOfHostMemoryError(VmmkvError, MemoryError):
    """The host tier has no room for the sequence that was to be suspended."""


class SuspendedError(VmmkvError):
    """A sequence was used while its tokens are in host memory."""


class TransferError(VmmkvError, RuntimeError):
    """A sequence was not sent, or not received: the other process is gone or late, or sent something else. Messages of
    the two processes may be out of step now: make a new process group."""


class TransferRefusedError(TransferError):
    """The receiving process has refused a sequence, and says why. No K or V was sent, and both processes can go on.

    Attributes:
        reason: the name of the error that was raised there, such as `"OutOfPagesError"`.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class RankFailedError(VmmkvError, RuntimeError):
    """Another process of a tensor parallel group failed in a step that all have to take; its own error says why."""


class OutOfRowsError(VmmkvError):
    """Every row of the cache belongs to a live sequence, or the row that was asked for does, or too few are left."""


class SequenceTooLongError(VmmkvError, ValueError):
    """A sequence would have more tokens than a row has room for."""


class UseAfterFreeError(VmmkvError):
    """A sequence was used after `free`, or a cache, a growable tensor or a pool after `close`."""


class RetentionError(VmmkvError, ValueError):
    """A `Retention` is invalid: a range is reversed or overlaps another, or a priority or time is out of range."""


class ReleasedTokensError(VmmkvError, RuntimeError):
    """Tokens that a sliding window has released are needed again."""


class UnfinishedPassError(VmmkvError, RuntimeError):
    """A forward pass ended in the middle (an error, Ctrl-C), so that the layers of a cache hold different tokens."""


class AutogradError(VmmkvError, RuntimeError):
    """K or V to be cached requires gradients; caches are for inference."""


class UnsupportedAttentionError(UnsupportedError):
    """A model passes its attention something that `attn_implementation="vmmkv"` neither knows nor can hand on."""


class ForkError(VmmkvError):
    """A cache, a growable tensor or a driver was used in a forked child; its memory belongs to the parent."""


class StreamCaptureError(VmmkvError):
    """An operation that needs a CUDA event or a memset was called while a graph is being captured, on the current
    stream or on one whose work it has to wait for."""


class BusyError(VmmkvError, RuntimeError):
    """A finalizer or a signal handler has used a cache, or a growable tensor, in the middle of another operation of the
    same thread; or two threads have extended the same sequence at a time. Or a manager of continuous batching that
    runs was started, or warmed up."""


class StoppedError(VmmkvError, RuntimeError):
    """A request was added to a manager of continuous batching that was stopped, or has ended with an error."""


class InvariantError(VmmkvError, AssertionError):
    """The cache's own books do not add up: a bug in vmmkv."""


class DriverError(VmmkvError, RuntimeError):
    """A call of the memory system failed.

    Attributes:
        call: the function that failed, by the memory system's own name (`cuMemMap`, `mmap`).
        code: the error, by the memory system's own name (`CUDA_ERROR_INVALID_VALUE`, `ENOMEM`).
        detail: what was asked for, or what would help, as part of a sentence; may be empty.
    """

    def __init__(self, call: str, code: str, detail: str = "") -> None:
        super().__init__(call, code, detail)
        self.call = call
        self.code = code
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.call} failed with {self.code}" + (f": {self.detail}" if self.detail else "")


class DriverOutOfMemoryError(DriverError):
    """The memory system has no physical memory left, though the budget allows it: others use the device, too, or a
    limit of the system was met."""


class DeviceLostError(DriverError):
    """An earlier failure (an illegal access, say) has ended the device's context, and all memory in it."""


class StrideLimitWarning(UserWarning):
    """A view is longer than kernels with 32-bit strides can address; such kernels would read wrong tokens."""


class KeptLayersWarning(UserWarning):
    """K and V of some layers of a model stay where transformers keeps them, and not in rows of virtual memory."""


class LeakWarning(UserWarning):
    """With `VMMKV_DEBUG=1`: a cache was closed with a live sequence. Python adds where it was started if `tracemalloc`
    runs."""
