"""Physical memory: the driver, pages and the budget, fences."""
