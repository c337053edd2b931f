"""Sequences on several streams, whose work runs much later: nobody sees another's bytes, or loses its own."""

from __future__ import annotations

from random import Random

import pytest
from conftest import ROUNDS
from random_machine import Machine


@pytest.mark.parametrize("policy", [{}, {"scrub": True}, {"zero_tail": True}], ids=str)
def test_streams_that_run_late_see_their_own_bytes(policy: dict[str, bool]) -> None:
    for _ in range((7 if policy else 20) * ROUNDS):
        seed = Random().randrange(1 << 32)
        try:
            Machine(Random(seed), **policy).run()
        except BaseException as error:
            error.add_note(f"Machine(Random({seed}), **{policy}).run()")
            raise
