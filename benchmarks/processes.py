"""Processes that measure something: several together, or another program."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any


def run_processes(count: int, work: Callable[..., None], *args: Any) -> None:
    """Runs `work(rank, *args)` in so many processes that are made for it, and waits for them. Where one fails, or we
    are interrupted, the others are killed, as they may wait for it for ever.

    Raises:
        RuntimeError: one of them failed.
    """
    spawn = get_context("spawn")
    processes = [spawn.Process(target=work, args=(rank, *args)) for rank in range(count)]
    try:
        for process in processes:
            process.start()
        while not any(codes := [process.exitcode for process in processes]) and None in codes:
            wait([process.sentinel for process, code in zip(processes, codes) if code is None])
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    if any(codes):
        raise RuntimeError(f"the processes ended with {codes}; see above")


def run_command(
    command: list[str],
    seconds: float,
    *,
    stdout: int,
    stderr: int | None = None,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    grace: float = 0.0,
) -> int | None:
    """Runs a command for so long at most, and ends all that it has started; returns its status, None if it was stopped.

    Args:
        grace: the last of these seconds, before which it is interrupted as by ctrl-C: it may write what it has.
        stdout, stderr: as of `subprocess.Popen`; without `stderr` it is ours.
        folder: where it runs; None: where we do.
        environment: None: ours.
    """
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=stdout, stderr=stderr, start_new_session=True
    )
    try:
        return process.wait(max(seconds - grace, 0.0))
    except subprocess.TimeoutExpired:
        if grace:
            os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace)
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
