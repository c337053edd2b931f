"""The compiled books against a plain model, on a device whose work runs late, with calls that fail."""

from __future__ import annotations

import pytest
from conftest import randoms
from core_machine import Machine


@pytest.mark.parametrize("faults", [False, True], ids=["without faults", "with faults"])
def test_any_operations_in_any_order(faults: bool) -> None:
    for random in randoms(30):
        Machine(random, faults=faults).run(100)
