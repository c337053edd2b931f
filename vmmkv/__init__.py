"""vmmkv: a KV cache that is one contiguous tensor, backed by memory only where tokens are."""

from .cache import KVCache
from .errors import (
    AutogradError,
    BudgetError,
    DeviceError,
    DriverError,
    DriverOutOfMemoryError,
    DtypeError,
    ForkError,
    InvariantError,
    LayoutError,
    OutOfPagesError,
    OutOfRowsError,
    ReleasedTokensError,
    SequenceTooLongError,
    ShapeError,
    StreamCaptureError,
    StrideLimitWarning,
    UnsupportedAttentionError,
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
    "AutogradError",
    "BudgetError",
    "CacheStats",
    "CallStats",
    "DeviceError",
    "DriverError",
    "DriverOutOfMemoryError",
    "DtypeError",
    "ForkError",
    "InvariantError",
    "KVCache",
    "KVLayout",
    "LayerLayout",
    "LayoutError",
    "OutOfPagesError",
    "OutOfRowsError",
    "ReleasedTokensError",
    "Sequence",
    "SequenceTooLongError",
    "ShapeError",
    "StreamCaptureError",
    "StrideLimitWarning",
    "UnsupportedAttentionError",
    "UseAfterFreeError",
    "VmmkvError",
]
