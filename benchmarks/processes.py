"""Processes that measure something together."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from typing import Any


def run_processes(count: int, work: Callable[..., None], *args: Any) -> None:
    """Runs `work(rank, *args)` in so many processes that are made for it, and waits for them.

    Raises:
        RuntimeError: one of them failed.
    """
    spawn = get_context("spawn")
    processes = [spawn.Process(target=work, args=(rank, *args)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"the processes ended with {[process.exitcode for process in processes]}; see above")
