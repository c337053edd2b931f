"""Everything that can go wrong, as types: what was asked, what there was, what would help.

After any of these the cache is as it was before the call. It is usable, too, unless the error says that it is not:
`InvariantError`, `ForkError`, `InterruptedChangeError`, and `UseAfterFreeError` of a closed cache. All of them can be
pickled: they cross from process to process.
"""


class VmmkvError(Exception):
    """Base class of every error that vmmkv raises on purpose."""


class LayoutError(VmmkvError, ValueError):
    """A geometry that cannot be: a bad size, a range over the address limit, a stride over 32 bits."""


class BudgetError(VmmkvError, ValueError):
    """A budget that cannot be: not a size, below one page, or larger than the device's memory."""


class DeviceError(VmmkvError, ValueError):
    """A device that is not there, or a tensor or stream on another device than the cache."""


class DtypeError(VmmkvError, TypeError):
    """A dtype that the cache cannot hold, or another one than it holds."""


class ShapeError(VmmkvError, ValueError):
    """A tensor whose shape does not fit the tokens that it is written to."""


class ArgumentError(VmmkvError, TypeError):
    """An argument of another kind than the one that is asked for, or none at all."""


class OutOfRangeError(VmmkvError, IndexError):
    """A layer or a row that the cache has not, or a sequence that its batch has not."""


class UnsupportedError(VmmkvError, NotImplementedError):
    """What this cache cannot do, while others of the same interface can."""


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
    """The host tier has no room for what was to be suspended."""


class SuspendedError(VmmkvError):
    """A sequence was used while its tokens are in host memory."""


class TransferError(VmmkvError, RuntimeError):
    """A sequence was not sent, or not received: the other process is gone or late, or says something else. Messages of
    the two may be out of step now: make a new process group."""


class TransferRefusedError(TransferError):
    """The process that a sequence was sent to has refused it, and says why. No K or V has moved, and both can go on.

    Attributes:
        reason: the name of the error that was raised there, such as `"OutOfPagesError"`.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class RankFailedError(VmmkvError, RuntimeError):
    """Another process of a tensor parallel group failed at what all have to do alike; its own error says why."""


class OutOfRowsError(VmmkvError):
    """Every row of the cache belongs to a live sequence."""


class SequenceTooLongError(VmmkvError, ValueError):
    """More tokens than a row is long."""


class UseAfterFreeError(VmmkvError):
    """A sequence was used after `free`, or a cache after `close`."""


class RetentionError(VmmkvError, ValueError):
    """How long tokens are to be kept cannot be: a range that is reversed or overlaps another, no priority, no time."""


class StaleMatchError(VmmkvError, RuntimeError):
    """What matched a sequence's beginning was evicted, or has moved, before it was locked."""


class ReleasedTokensError(VmmkvError, RuntimeError):
    """Tokens are needed again that a sliding window has left behind."""


class UnfinishedPassError(VmmkvError, RuntimeError):
    """A forward pass ended in the middle (an error, Ctrl-C), so that the layers of a cache hold different tokens."""


class AutogradError(VmmkvError, RuntimeError):
    """Autograd would record K and V that go into a cache; caches are for inference."""


class UnsupportedAttentionError(UnsupportedError):
    """A model asks its attention for something that `attn_implementation="vmmkv"` neither knows nor can hand on."""


class ForkError(VmmkvError):
    """A cache, a growable tensor or a driver was used in a forked child; its memory belongs to the parent."""


class StreamCaptureError(VmmkvError):
    """An operation that needs a CUDA event or a memset was called while a graph is captured, on the current stream or
    on one whose work has to be waited for."""


class BusyError(VmmkvError, RuntimeError):
    """A cache, or a growable tensor, was used in the middle of another operation of the same thread, by a finalizer or
    a signal handler; or a sequence was extended in two threads at a time."""


class InterruptedChangeError(VmmkvError, RuntimeError):
    """A cache was interrupted (Ctrl-C) at a moment after which nobody can say what the memory system has done."""


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
    """The device has no physical page left, or a limit was met before (others may use what the budget allows)."""


class DeviceLostError(DriverError):
    """An earlier failure (an illegal access, say) has ended the device's context, and all memory in it."""


class StrideLimitWarning(UserWarning):
    """A view is longer than kernels with 32-bit strides can address; they would read wrong tokens."""


class KeptLayersWarning(UserWarning):
    """Layers of a model whose K and V stay where transformers keeps them: they have no rows of virtual memory."""


class LeakWarning(UserWarning):
    """With `VMMKV_DEBUG=1`: a cache was closed with live sequences, or never; the message says who started these, and
    who took their pages."""
