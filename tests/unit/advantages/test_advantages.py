"""Advantages: the check values of the design, a plain loop over groups, refusals."""

import math
import statistics
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrun.advantages import ADVANTAGES, RewardGroups, advantages

REWARDS = [1.0, 0.0, 0.5, 0.0, 1.0, 1.0]
LENGTHS = [10, 20, 30, 5, 5, 10]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [0.5, -0.5, 0.0, -0.66667, 0.33333, 0.33333]),
        ("rloo", [0.75, -0.75, 0.0, -1.0, 0.5, 0.5]),
        ("opo", [0.58333, -0.41667, 0.08333, -0.75, 0.25, 0.25]),
        ("dr_grpo", [0.5, -0.5, 0.0, -0.66667, 0.33333, 0.33333]),
        ("max_rl", [1.0, -1.0, 0.0, -1.0, 0.5, 0.5]),
        ("reinforce_pp", [0.84758, -1.18661, -0.16952, -1.18661, 0.84758, 0.84758]),
        ("reinforce_pp_baseline", [1.03510, -1.03510, 0.0, -1.38013, 0.69007, 0.69007]),
        ("reward", REWARDS),
    ],
)
def test_check_values(name: str, expected: list[float]) -> None:
    result = advantages(name, np.array(REWARDS), group_size=3, lengths=LENGTHS)
    assert result.dtype == np.float32
    assert result.tolist() == pytest.approx(expected, abs=1e-5)


def test_group_std_and_its_group_of_one() -> None:
    result = advantages("grpo", [1.0, 0.0, 0.5, 7.0], group_ids=[4, 4, 4, 9], std="group")
    assert result.tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-5)


def test_equal_rewards_give_zero_even_after_division_by_the_std() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("grpo", {"std": "group"}),
        ("rloo", {"global_std": True}),
        ("opo", {"global_std": True}),
    ]
    for name, options in cases:
        result = advantages(name, [0.1] * 7, group_size=7, lengths=[3, 1, 4, 1, 5, 9, 2], **options)
        assert np.abs(result).max() < 1e-6


def test_single_rollout_groups() -> None:
    rewards = [0.25, 1.0]
    assert advantages("grpo", rewards, group_size=1).tolist() == [0.0, 0.0]
    assert advantages("rloo", rewards, group_size=1).tolist() == rewards
    assert advantages("opo", rewards, group_size=1, lengths=[3, 4]).tolist() == [0.0, 0.0]
    assert advantages("opo", rewards, group_size=1, lengths=[3, 4], leave_one_out=True).tolist() == rewards


def test_an_empty_answer_weighs_nothing_in_a_length_weighted_baseline() -> None:
    rewards, lengths = [1.0, 0.0, 0.5], [0, 10, 30]
    assert advantages("opo", rewards, group_size=3, lengths=lengths).tolist() == [0.625, -0.375, 0.125]
    assert advantages("opo", rewards, group_size=3, lengths=lengths, leave_one_out=True).tolist() == [0.625, -0.5, 0.5]
    nothing = [0, 0, 0]
    assert advantages("opo", rewards, group_size=3, lengths=nothing).tolist() == [0.5, -0.5, 0.0]
    assert advantages("opo", rewards, group_size=3, lengths=nothing, leave_one_out=True).tolist() == [0.5, -0.5, 0.0]


def test_empty_batch() -> None:
    assert advantages("grpo", [], group_ids=[]).shape == (0,)
    assert advantages("opo", np.empty(0), group_size=4, lengths=[]).shape == (0,)


def _by_hand(name: str, rewards: list[float], lengths: list[int], options: dict[str, Any]) -> list[float]:
    """One group, straight from the table of definitions."""
    mean = sum(rewards) / len(rewards)
    total, size = sum(lengths), len(rewards)
    weighted = sum(r * n for r, n in zip(rewards, lengths, strict=True))
    result = []
    for r, n in zip(rewards, lengths, strict=True):
        if name == "grpo":
            a = r - mean
            if options.get("std") == "group" and size > 1:
                a /= statistics.stdev(rewards) + 1e-6
        elif name == "max_rl":
            a = (r - mean) / mean if mean > 0 else 0.0
        elif name == "reward":
            a = r
        elif name == "rloo":
            a = (r - mean) * size / (size - 1) if size > 1 else r
        elif options.get("leave_one_out"):
            a = r - (weighted - r * n) / (total - n) if size > 1 else r
        else:
            a = r - weighted / total
        result.append(a)
    return result


@st.composite
def _batches(draw: st.DrawFn) -> tuple[list[int], list[float], list[int]]:
    count = draw(st.integers(1, 24))
    ids = draw(st.lists(st.integers(-2, 5), min_size=count, max_size=count))
    quarter = st.integers(-8, 8).map(lambda n: n / 4)
    rewards = draw(st.lists(quarter, min_size=count, max_size=count))
    return ids, rewards, draw(st.lists(st.integers(1, 50), min_size=count, max_size=count))


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}),
    ("grpo", {"std": "group"}),
    ("rloo", {}),
    ("opo", {}),
    ("opo", {"leave_one_out": True}),
    ("max_rl", {}),
    ("reward", {}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@settings(max_examples=20, deadline=None)
@given(batch=_batches(), neg_clipped=st.booleans(), global_std=st.booleans())
def test_ragged_interleaved_groups_match_a_loop_over_groups(
    name: str,
    options: dict[str, Any],
    batch: tuple[list[int], list[float], list[int]],
    neg_clipped: bool,
    global_std: bool,
) -> None:
    ids, rewards, lengths = batch
    global_std = global_std and "std" not in options
    expected = [math.nan] * len(ids)
    for group in set(ids):
        members = [k for k, g in enumerate(ids) if g == group]
        values = _by_hand(name, [rewards[k] for k in members], [lengths[k] for k in members], options)
        for k, value in zip(members, values, strict=True):
            expected[k] = value
    if global_std and len(ids) > 1:
        expected = [value / (statistics.stdev(rewards) + 1e-6) for value in expected]
    if neg_clipped:
        expected = [max(value, 0.0) for value in expected]
    result = advantages(
        name, rewards, group_ids=ids, lengths=lengths, neg_clipped=neg_clipped, global_std=global_std, **options
    )
    assert result.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "grop"}, r"unknown advantage 'grop' \(did you mean grpo\?\); known: dr_grpo, gae, grpo"),
        (
            {"leave_one_out": True},
            r"unknown option of advantage grpo 'leave_one_out'; known: global_std, length_penalty, neg_clipped, std",
        ),
        ({"std": "batch"}, r"std must be one of 'none', 'group', got 'batch'"),
        ({"neg_clipped": 1}, "neg_clipped must be true or false, got 1"),
        ({"std": "group", "global_std": True}, "std and global_std both"),
        ({"rewards": [1.0, math.nan]}, "rewards is not finite: nan at 1"),
        ({"rewards": [[1.0, 2.0]]}, r"rewards must have shape \[N\]"),
        ({"group_size": None}, "either group_size"),
        ({"group_ids": [0, 0]}, "either group_size"),
        ({"group_size": 3}, r"group_size must divide the number of rewards \(2\), got 3"),
        ({"group_size": 0}, "group_size must divide"),
        ({"group_size": None, "group_ids": [1]}, r"group_ids must have shape \[2\], got \[1\]"),
        ({"group_size": None, "group_ids": [0.5, 1.0]}, "group_ids must be integers"),
        ({"name": "opo"}, "lengths must be given"),
        ({"lengths": [1]}, "lengths has 1 entries for 2 rewards"),
        ({"lengths": [1, -1]}, "lengths must be at least 0, got -1"),
        ({"turns": [1]}, "turns has 1 entries for 2 rewards"),
        ({"turns": [1, -1]}, "turns must be at least 1, got -1"),
        ({"length_penalty": 0.1}, "lengths must be given where length_penalty > 0"),
        ({"length_penalty": -1.0}, "length_penalty must be at least 0, got -1.0"),
        ({"turn_discount": 0.0}, "turn_discount must be greater than 0 and at most 1, got 0.0"),
        ({"name": "reinforce_pp", "global_std": True}, "unknown option of advantage reinforce_pp 'global_std'"),
    ],
)
def test_refusals_name_the_argument(arguments: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"name": "grpo", "rewards": [1.0, 0.0], "group_size": 2} | arguments
    with pytest.raises(ValueError, match=message):
        advantages(call.pop("name"), call.pop("rewards"), **call)


def test_a_length_penalty_and_a_turn_discount_change_the_rewards_before_the_baseline() -> None:
    shaped = [r * 0.5 ** (k - 1) - 0.01 * n for r, n, k in zip(REWARDS, LENGTHS, [1, 2, 3, 1, 2, 1], strict=True)]
    for name in ("grpo", "rloo", "opo", "reinforce_pp"):
        found = advantages(
            name,
            REWARDS,
            group_size=3,
            lengths=LENGTHS,
            turns=[1, 2, 3, 1, 2, 1],
            length_penalty=0.01,
            turn_discount=0.5,
        )
        np.testing.assert_allclose(found, advantages(name, shaped, group_size=3, lengths=LENGTHS), rtol=1e-6)


def test_max_rl_is_zero_where_the_mean_is_not_positive() -> None:
    rewards = [1.0, -1.0, -2.0, -1.0, 3.0, 1.0]
    assert advantages("max_rl", rewards, group_size=2).tolist() == [0, 0, 0, 0, 0.5, -0.5]


def test_whitening_is_over_the_whole_batch() -> None:
    found = advantages("reinforce_pp", [1.0, 0.0, 0.0, 5.0, -3.0], group_ids=[0, 0, 1, 1, 1])
    assert float(found.mean()) == pytest.approx(0, abs=1e-6)
    assert float(found.std(ddof=1)) == pytest.approx(1, abs=1e-5)
    assert advantages("reinforce_pp", [7.0], group_size=1).tolist() == [0.0]
    assert advantages("reinforce_pp", [2.0] * 5, group_size=5).tolist() == [0.0] * 5


def best_of_group(groups: RewardGroups, *, bonus: float = 1.0) -> npt.NDArray[np.float64]:
    return np.where(groups.centred > 0, bonus, 0.0)


def wrong_shape(groups: RewardGroups) -> npt.NDArray[np.float64]:
    return groups.rewards[:1]


def test_own_advantage_by_import_path() -> None:
    path = f"{__name__}:best_of_group"
    assert advantages(path, REWARDS, group_size=3, bonus=2.0).tolist() == [2, 0, 0, 0, 2, 2]
    with pytest.raises(ValueError, match=r"unknown option of advantage .* 'bonsu' \(did you mean bonus\?\)"):
        advantages(path, REWARDS, group_size=3, bonsu=2.0)
    with pytest.raises(ValueError, match="must return 6 finite numbers"):
        advantages(f"{__name__}:wrong_shape", REWARDS, group_size=3)


def test_every_known_advantage_runs_with_its_defaults() -> None:
    for name, algorithm in ADVANTAGES.items():
        if name == "gae":
            with pytest.raises(ValueError, match=r"per token, from a critic's values: call rlrun\.algorithms\.gae"):
                advantages(name, REWARDS, group_size=3)
            continue
        defaults = {option: spec.default for option, spec in algorithm.options.items()}
        given_all = advantages(name, REWARDS, group_size=3, lengths=LENGTHS, **defaults)
        assert np.array_equal(given_all, advantages(name, REWARDS, group_size=3, lengths=LENGTHS))
