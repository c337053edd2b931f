"""Two processes of one group, for tests: a function that both run."""

from __future__ import annotations

import gc
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from conftest import ROOT, run_python

TIMEOUT = timedelta(minutes=5)
"""After which whoever waits for a process that is gone, and is not told so, has an error."""


def together(role: Callable[..., None], *args: str | int, backend: str = "gloo") -> str:
    """Runs `role(rank, *args)` in two processes at a time; returns what they print. Where one fails the other, which
    loses it, does, too."""
    with TemporaryDirectory() as folder:
        place = str(Path(folder) / "store"), backend, role.__module__, role.__name__
        if backend == "gloo":
            done = [run_python(f"import pair; pair.be_two({place!r}, {args!r})")]
        else:  # who has used a GPU cannot be forked
            with ThreadPoolExecutor() as threads:
                one = lambda rank: run_python(f"import pair; pair.run({rank}, {place!r}, {args!r})", fresh=True)  # noqa: E731
                done = list(threads.map(one, range(2)))
    assert all(each.returncode == 0 for each in done), "".join(each.stdout + each.stderr for each in done)
    return "".join(each.stdout for each in done)


def be_two(place: tuple[str, str, str, str], args: tuple[str | int, ...]) -> None:
    """Forks, and has both processes run a role: in a process that has used neither a GPU nor threads."""
    sys.path.append(str(ROOT))  # roles may use benchmarks
    import_module(place[2])  # once for both
    gc.freeze()  # and not looked through for garbage by both
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        other = os.fork()
    try:
        run(0 if other else 1, place, args)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    if other:
        assert os.waitpid(other, 0)[1] == 0
    os._exit(0)


def run(rank: int, place: tuple[str, str, str, str], args: tuple[str | int, ...]) -> None:
    """Runs a role, as one of the two."""
    import torch
    import torch.distributed as dist

    store, backend, module, role = place
    sys.path.append(str(ROOT))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2, timeout=TIMEOUT)
    dist.barrier()  # who ends at once would otherwise end while the other one still connects
    getattr(import_module(module), role)(rank, *args)
    dist.barrier()
    dist.destroy_process_group()
