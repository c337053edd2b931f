"""A checker for attention kernels: `check_attention` gives one rows of every awkward kind.

checking    what users call: it decides what is asked next, and makes the report; the process that calls the kernel
probes      the calls, one for each kind of rows
rows        K and V of these kinds
answers     what a call answered, and float64 attention
targets     kernels by name, and adapters for common ones
"""

from .answers import Verdict
from .checking import Finding, Report, check_attention
from .targets import TARGETS

__all__ = ["TARGETS", "Finding", "Report", "Verdict", "check_attention"]
