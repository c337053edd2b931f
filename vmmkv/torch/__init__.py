"""What torch users hold: a memory pool and a growable tensor on pages, and how many of them there are.

Nothing here is a compiled extension, and Numba is imported only when a memory pool is made.
"""

from .growable_tensor import GrowableTensor, GrowableTensorStats
from .pool import MemoryPool, MemoryPoolStats, memory_allocated, memory_pool

__all__ = ["GrowableTensor", "GrowableTensorStats", "MemoryPool", "MemoryPoolStats", "memory_allocated", "memory_pool"]
