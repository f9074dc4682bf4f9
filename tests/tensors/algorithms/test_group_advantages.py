"""Advantages of torch tensors, compared with those of NumPy arrays."""

import numpy as np
import pytest
import torch

from rlrun.advantages import advantages as on_arrays
from rlrun.algorithms import advantages

REWARDS = [1.0, 0.0, 0.5, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "max_rl", "qae", "reinforce_pp"])
def test_tensor_advantages_equal_array_advantages(name: str, dtype: torch.dtype) -> None:
    rewards = torch.tensor(REWARDS, dtype=dtype, requires_grad=True)
    found = advantages(name, rewards, group_size=3, lengths=torch.tensor([10, 20, 30, 5, 5, 10]))
    assert (found.dtype, found.requires_grad) == (torch.float32, False)
    assert found.tolist() == on_arrays(name, REWARDS, group_size=3, lengths=[10, 20, 30, 5, 5, 10]).tolist()


def test_advantages_use_group_ids_options_and_turns() -> None:
    ids, turns = [4, 9, 4, 9, 4, 4], [1, 2, 3, 1, 2, 1]
    options = {"std": "group", "turn_discount": 0.9, "neg_clipped": True}
    found = advantages("grpo", REWARDS, group_ids=torch.tensor(ids), turns=torch.tensor(turns), **options)
    expected = on_arrays("grpo", REWARDS, group_ids=ids, turns=turns, **options)
    assert np.array_equal(found.numpy(), expected)
    assert found.min() == 0 < found.max()


def test_invalid_argument_is_named_in_error() -> None:
    with pytest.raises(ValueError, match="rewards is not finite: nan at 1"):
        advantages("grpo", torch.tensor([1.0, float("nan")]), group_size=2)
    with pytest.raises(ValueError, match="group_ids must be integers"):
        advantages("grpo", torch.ones(2), group_ids=torch.ones(2))
    with pytest.raises(ValueError, match=r"rewards must have shape \[N\]"):
        advantages("grpo", torch.ones(1, 2), group_size=2)
