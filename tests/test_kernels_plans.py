"""Plans of kernels' calls: what is found at a look is what would be made."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from vmmkv.kernels.checks import keys
from vmmkv.kernels.plans import Plans

MAKE = (
    lambda: torch.empty(4, 3, 8),
    lambda: torch.empty(4, 3, 8, dtype=torch.float16),
    lambda: torch.empty(4, 3, 8, device="meta"),
    lambda: torch.empty(3, 4, 8).transpose(0, 1),
    lambda: torch.empty(4, 6, 8)[:, ::2],
    lambda: torch.empty(4, 1, 8).expand(4, 3, 8),
    lambda: torch.empty(5, 3, 8)[:4],
    lambda: torch.empty(5, 3, 8),
    lambda: torch.empty(4, 24),
    lambda: torch.nn.Parameter(torch.empty(4, 3, 8)),
    lambda: None,
)


def addresses(tensors: tuple[torch.Tensor | None, ...]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors if tensor is not None]


def test_any_calls_in_any_order() -> None:
    """Whatever differs makes another plan: shapes, strides, dtypes, devices, what is missing or the same, options."""
    made: list[Any] = []

    def make(*given: Any) -> Any:
        made.append(given)
        return given

    plans: Plans[Any] = Plans(make)
    kinds = random.sample(MAKE, 4)  # few, so that calls come again
    for _ in range(300):
        some = [random.choice(kinds)() for _ in range(2)]
        tensors = *some, random.choice([*some, None])
        option, mode = random.random() < 0.1, random.choice([torch.no_grad, torch.inference_mode, torch.enable_grad])
        with mode():
            if any(each is not None and each.is_meta for each in tensors):
                with pytest.raises(TypeError, match="without memory"):
                    plans.find(tensors, option)
            else:
                assert plans.find(tensors, option) == ((option, keys(tensors)), addresses(tensors))
    assert len(made) < 300, "nothing was found"


class Wrapper(torch.Tensor):
    """A tensor whose numbers are another's, as a DTensor's are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, *arguments: Any) -> Any:
        raise NotImplementedError


def test_a_tensor_without_memory_is_refused() -> None:
    """Not taken for one that is not given: also after one that looks like it. An empty one has nothing to be read."""
    plans = Plans(str)
    plain, empty = torch.empty(2, 3), torch.empty(2, 0)
    for _ in range(2):
        assert plans.find((plain, plain, empty))[1] == [plain.data_ptr(), plain.data_ptr(), 0]
        assert plans.find((plain, torch.empty(2, 3), empty))
        with pytest.raises(TypeError, match="got Wrapper"):
            plans.find((plain, Wrapper(plain), empty))


@pytest.mark.parametrize("option", [torch.tensor(0.5), [1]])
def test_what_may_change_unseen_is_no_option(option: Any) -> None:
    with pytest.raises(TypeError, match="must be a number"):
        Plans(str).find((torch.empty(2, 3), torch.empty(2, 3)), "auto", option)
