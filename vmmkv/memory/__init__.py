"""Physical memory: frames, the pool and its accounts, fences, and the driver."""
