"""The compiled books as machine code, interpreted, and with bounds checks: the same, for the same operations."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from random import Random

from conftest import ROUNDS, run_python

MODES = {"machine code": {}, "interpreted": {"VMMKV_INTERPRET": "1"}, "checked": {"NUMBA_BOUNDSCHECK": "1"}}

LIVES = """
    import gc
    from random import Random
    from core_machine import Machine

    gc.freeze()
    for seed in range(int(sys.argv[1]), int(sys.argv[1]) + int(sys.argv[2])):
        machine = Machine(Random(seed), faults=seed % 2 == 0)
        for _ in range(100):
            machine.step()
            machine.device._raised.clear()
            gc.collect()  # errors hold sequences that could not be started, which are freed behind them
            for cache in machine.caches:
                cache.sweep()
            words = "created used committed small larges fresh serial steps done clock hungry settled".split()
            print(*(machine.pool.word(name) for name in words), *(len(each.tokens) for each in sum(machine.models, [])))
        print(sorted(machine.done.items()))
        machine.run(0)
"""


def test_machine_code_does_what_the_source_says() -> None:
    """With bounds checks only where there are rounds: Numba compiles all of it then, which takes a minute."""
    seed = str(Random().randrange(1 << 32))

    def live(switches: dict[str, str]) -> str:
        child = run_python(LIVES, seed, str(4 * ROUNDS), env=os.environ | switches, fresh=True)
        assert child.returncode == 0, f"{switches}, seed {seed}: {child.stderr}"
        return child.stdout

    modes = {mode: switches for mode, switches in MODES.items() if mode != "checked" or ROUNDS > 1}
    with ThreadPoolExecutor(2) as pool:
        told = dict(zip(modes, pool.map(live, modes.values())))
    assert told["machine code"].count("\n") == 4 * ROUNDS * 101
    for mode in modes:
        assert told[mode] == told["machine code"], f"{mode} differs, seed {seed}"
