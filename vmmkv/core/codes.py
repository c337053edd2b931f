"""What compiled calls return: a number from 0 on, or a reason for which less was done than was asked."""

DONE, RING = 0, 1
"""The call is done; the call is done and the mapper is to be woken."""
(
    BROKEN, NEEDS, GONE, TOO_LONG, TWICE, NO_PAGES, NO_ROWS, SHORT, WAIT, FAILED, STALE, CHANGED, PART, CAPTURED,
    NO_TOKEN, FULL, DEAD, NO_LIMIT, TAKEN, SUSPENDED,
) = range(-20, 0)  # fmt: skip
"""Reasons for which a call does less than was asked."""
