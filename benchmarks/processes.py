"""Programs that run for so long at most."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


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
