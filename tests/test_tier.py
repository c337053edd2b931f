"""The host tier against a plain model, on a device whose work runs late, with calls that fail."""

from __future__ import annotations

from random import Random

import pytest
from conftest import ROUNDS
from tier_machine import TierMachine, host_memory  # noqa: F401


@pytest.mark.usefixtures("host_memory")
@pytest.mark.parametrize("faults", [False, True], ids=["without faults", "with faults"])
def test_any_operations_in_any_order(faults: bool) -> None:
    for _ in range(30 * ROUNDS):
        seed = Random().randrange(1 << 32)
        try:
            TierMachine(Random(seed), faults=faults).run(100)
        except BaseException as error:
            error.add_note(f"TierMachine(Random({seed}), faults={faults}).run(100)")
            raise
