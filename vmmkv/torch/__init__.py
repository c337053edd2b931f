"""What torch users hold: a memory pool and a growable tensor on pages, and accounts of who holds how many.

Nothing here is a compiled extension, and Numba is imported only when a memory pool is made.
"""

from .accounting import MemoryStats, memory_allocated, memory_stats
from .growable_tensor import GrowableTensor, GrowableTensorStats
from .pool import MemoryPool, MemoryPoolStats, memory_pool

__all__ = [
    "GrowableTensor",
    "GrowableTensorStats",
    "MemoryPool",
    "MemoryPoolStats",
    "MemoryStats",
    "memory_allocated",
    "memory_pool",
    "memory_stats",
]
