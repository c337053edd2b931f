"""The compiled core does what the second house does: the same operations on both, and on a plain model."""

from __future__ import annotations

import inspect
from random import Random

import core_parity
import core_twins
import pytest
from conftest import ROUNDS
from core_parity import DIFFERENCES, Parity


@pytest.mark.parametrize("large", [False, True], ids=["pages", "large frames"])
@pytest.mark.parametrize("faults", [False, True], ids=["without faults", "with faults"])
@pytest.mark.usefixtures("undebugged")
def test_any_operations_in_both_houses(faults: bool, large: bool) -> None:
    for _ in range(5 * ROUNDS):
        seed = Random().randrange(1 << 32)
        try:
            Parity(Random(seed), faults=faults, large=large).run(80)
        except BaseException as error:
            error.add_note(f"Parity(Random({seed}), faults={faults}, large={large}).run(80)")
            raise


def test_each_difference_is_allowed_for_somewhere() -> None:
    source = inspect.getsource(core_parity) + inspect.getsource(core_twins)
    assert all(f'DIFFERENCES["{name}"]' in source for name in DIFFERENCES)
