"""vmmkv: a KV cache that is one contiguous tensor, backed by memory only where tokens are."""

from .cache import KVCache
from .errors import (
    ArgumentError,
    AutogradError,
    BudgetError,
    BusyError,
    DeviceError,
    DeviceLostError,
    DriverError,
    DriverOutOfMemoryError,
    DtypeError,
    ForkError,
    InterruptedChangeError,
    InvariantError,
    KeptLayersWarning,
    LayoutError,
    OutOfPagesError,
    OutOfRangeError,
    OutOfRowsError,
    ReleasedTokensError,
    SequenceTooLongError,
    ShapeError,
    StreamCaptureError,
    StrideLimitWarning,
    UnsupportedError,
    UseAfterFreeError,
    VmmkvError,
)
from .layout import KVLayout, LayerLayout
from .rows import FREE_PAGE, SURPLUS_PAGE, VACANT_PAGE, ZERO_PAGE
from .sequence import Sequence
from .stats import CacheStats, CallStats

__version__ = "0.1.0"

__all__ = [
    "FREE_PAGE",
    "SURPLUS_PAGE",
    "VACANT_PAGE",
    "ZERO_PAGE",
    "ArgumentError",
    "AutogradError",
    "BudgetError",
    "BusyError",
    "CacheStats",
    "CallStats",
    "DeviceError",
    "DeviceLostError",
    "DriverError",
    "DriverOutOfMemoryError",
    "DtypeError",
    "ForkError",
    "InterruptedChangeError",
    "InvariantError",
    "KVCache",
    "KVLayout",
    "KeptLayersWarning",
    "LayerLayout",
    "LayoutError",
    "OutOfPagesError",
    "OutOfRangeError",
    "OutOfRowsError",
    "ReleasedTokensError",
    "Sequence",
    "SequenceTooLongError",
    "ShapeError",
    "StreamCaptureError",
    "StrideLimitWarning",
    "UnsupportedError",
    "UseAfterFreeError",
    "VmmkvError",
]
