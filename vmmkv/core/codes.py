"""What compiled calls return: a number from 0 on, or a reason for which less was done than was asked."""

from ..driver.fencing import FAILED as FAILED
from ..driver.fencing import FULL as FULL
from ..driver.running import CAPTURED as CAPTURED

DONE, RING = 0, 1
"""The call is done; the call is done and the mapper is to be woken."""
(
    BROKEN, NEEDS, GONE, TOO_LONG, TWICE, NO_PAGES, NO_ROWS, SHORT, WAIT, STALE, CHANGED, PART, NO_TOKEN, DEAD,
    NO_LIMIT, TAKEN, SUSPENDED,
) = range(-21, -4)  # fmt: skip
"""Reasons for which a call does less than was asked, beside those of fences."""
