"""Advantages: check values of the design, a plain loop over groups, and refusals."""

import math
import statistics
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrun.advantages import ADVANTAGES, RewardGroups, advantages, token_advantages
from rlrun.config.algorithm.tables import ADVANTAGE_ENTRIES, Option
from rlrun.environments.bounds import MAX_REWARD
from rlrun.local.judge import GROUP_BASELINES

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
        ("qae", [0.5, -0.5, 0.0, -1.0, 0.0, 0.0]),
        ("reinforce_pp", [1.25698, -1.25698, 0.0, -1.25698, 1.25698, 1.25698]),
        ("reinforce_pp_baseline", [1.43539, -1.21456, 0.11041, -1.65622, 0.99373, 0.99373]),
        ("reward", REWARDS),
    ],
)
def test_advantages_match_check_values(name: str, expected: list[float]) -> None:
    result = advantages(name, np.array(REWARDS), group_size=3, lengths=LENGTHS)
    assert result.dtype == np.float32
    assert result.tolist() == pytest.approx(expected, abs=1e-5)


def test_group_std_of_single_rollout_group_is_zero() -> None:
    result = advantages("grpo", [1.0, 0.0, 0.5, 7.0], group_ids=[4, 4, 4, 9], std="group")
    assert result.tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-5)


def test_equal_rewards_give_zero_after_std_division() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("grpo", {"std": "group"}),
        ("rloo", {"global_std": True}),
        ("opo", {"global_std": True}),
    ]
    for name, options in cases:
        result = advantages(name, [0.1] * 7, group_size=7, lengths=[3, 1, 4, 1, 5, 9, 2], **options)
        assert np.abs(result).max() < 1e-6


def test_single_rollout_groups_use_defined_baselines() -> None:
    rewards = [0.25, 1.0]
    assert advantages("grpo", rewards, group_size=1).tolist() == [0.0, 0.0]
    assert advantages("rloo", rewards, group_size=1).tolist() == rewards
    assert advantages("opo", rewards, group_size=1, lengths=[3, 4]).tolist() == [0.0, 0.0]
    assert advantages("opo", rewards, group_size=1, lengths=[3, 4], leave_one_out=True).tolist() == rewards


def test_empty_answer_has_no_weight_in_length_baseline() -> None:
    rewards, lengths = [1.0, 0.0, 0.5], [0, 10, 30]
    assert advantages("opo", rewards, group_size=3, lengths=lengths).tolist() == [0.625, -0.375, 0.125]
    assert advantages("opo", rewards, group_size=3, lengths=lengths, leave_one_out=True).tolist() == [0.625, -0.5, 0.5]
    nothing = [0, 0, 0]
    assert advantages("opo", rewards, group_size=3, lengths=nothing).tolist() == [0.5, -0.5, 0.0]
    assert advantages("opo", rewards, group_size=3, lengths=nothing, leave_one_out=True).tolist() == [0.5, -0.5, 0.0]


def test_empty_batch_gives_empty_advantages() -> None:
    assert advantages("grpo", [], group_ids=[]).shape == (0,)
    assert advantages("opo", np.empty(0), group_size=4, lengths=[]).shape == (0,)


def _by_hand(name: str, rewards: list[float], lengths: list[int], options: dict[str, Any]) -> list[float]:
    """Compute one group directly from the table of definitions."""
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
            largest = max(abs(other - mean) for other in rewards)
            a = (r - mean) / max(mean, largest / (size - 1 or 1)) if mean > 0 else 0.0
        elif name == "qae":
            share = options["quantile"]
            a = r - min(b for b in rewards if sum(other <= b for other in rewards) >= share * size)
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
    ("qae", {"quantile": 0.25}),
    ("qae", {"quantile": 0.5}),
    ("qae", {"quantile": 1.0}),
    ("reward", {}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@settings(max_examples=20, deadline=None)
@given(batch=_batches(), neg_clipped=st.booleans(), global_std=st.booleans())
def test_advantages_match_a_loop_over_groups(
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
            r"unknown option of advantage grpo 'leave_one_out'; known: adv_mean, adv_std, global_std, length_penalty, mean, neg_",
        ),
        ({"std": "run"}, r"std must be one of 'none', 'group', 'batch', got 'run'"),
        ({"mean": None}, r'mean must not be null; remove it to use the default \("group"\)'),
        ({"adv_mean": "batch"}, "lengths must be given for advantage grpo with adv_mean batch and adv_std none"),
        (
            {"name": "reinforce_pp"},
            "lengths must be given for advantage reinforce_pp .*, which normalize over loss tokens",
        ),
        (
            {"name": "reinforce_pp", "lengths": [1, 2], "gamma": 0.9},
            r"gamma \(0.9\) needs an advantage per token; call token_advantages",
        ),
        ({"std": "batch", "global_std": True}, "std and global_std both"),
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
        ({"length_penalty": 0.1}, "lengths must be given if length_penalty > 0"),
        ({"length_penalty": -1.0}, r"length_penalty must be at least 0 and at most 1e\+09, got -1.0"),
        ({"turn_discount": 0.0}, "turn_discount must be greater than 0 and at most 1, got 0.0"),
        ({"name": "qae", "quantile": 0}, "quantile must be greater than 0 and at most 1, got 0"),
        ({"name": "reinforce_pp", "global_std": True}, "unknown option of advantage reinforce_pp 'global_std'"),
    ],
)
def test_invalid_argument_is_named_in_error(arguments: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"name": "grpo", "rewards": [1.0, 0.0], "group_size": 2} | arguments
    with pytest.raises(ValueError, match=message):
        advantages(call.pop("name"), call.pop("rewards"), **call)


def test_length_penalty_and_turn_discount_precede_the_baseline() -> None:
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


def test_max_rl_is_zero_without_positive_mean() -> None:
    rewards = [1.0, -1.0, -2.0, -1.0, 3.0, 1.0]
    assert advantages("max_rl", rewards, group_size=2).tolist() == [0, 0, 0, 0, 0.5, -0.5]


def test_max_rl_is_bounded_for_mixed_rewards() -> None:
    """One success of G gives (R - mean)/mean = G - 1; if rewards cancel, the mean is almost 0 and the quotient is
    unbounded.
    """
    for scale in (1.0, 1e-300, 1e9):
        one_of_four = [scale, 0.0, 0.0, 0.0]
        assert advantages("max_rl", one_of_four, group_size=4).tolist() == [3, -1, -1, -1]
    mixed = [1.0, 1.0, -0.5, 0.5]
    assert advantages("max_rl", mixed, group_size=4).tolist() == [1, 1, -2, 0]  # the plain quotient
    for rewards in ([1e9, -1e9, 1e-300], [1e-300, -1e9, 1e9], [0.1, 0.2, -0.3]):  # their sum is 0 except for rounding
        assert advantages("max_rl", rewards, group_size=3).tolist() == [0, 0, 0]
    assert advantages("max_rl", [1e9, -1e9 + 10, 0.0], group_size=3).tolist() == pytest.approx([2, -2, 0], abs=1e-6)


@pytest.mark.parametrize(
    ("successes", "expected"),
    [(0, [0] * 5), (3, [1, 1, 1, 0, 0]), (4, [0, 0, 0, 0, -1]), (5, [0] * 5)],
)
def test_qae_gates_by_success_rate(successes: int, expected: list[int]) -> None:
    """Wu et al. 2025: up to a success rate of 1 - K only successes count, above it only failures."""
    rewards = [1.0] * successes + [0.0] * (5 - successes)
    assert advantages("qae", rewards, group_size=5, quantile=0.4).tolist() == expected


def test_qae_ignores_size_of_an_outlier() -> None:
    for outlier in (2.0, 1e9):
        assert advantages("qae", [0.0, 0.25, 0.5, 0.5, outlier], group_size=5).tolist()[:4] == [-0.5, -0.25, 0, 0]


def test_qae_rank_is_exact_for_decimal_shares() -> None:
    """0.55·100 is 55.00000000000001: the 55th reward is the baseline, not the 56th."""
    rewards = [float(n) for n in range(1, 101)]
    assert advantages("qae", rewards, group_size=100, quantile=0.55)[54] == 0


_EXTREMES = st.sampled_from([1e9, -1e9, 0.0, 1e-300, -1e-300, 5e-324, 1e-9, 1.0, math.nextafter(1e9, 0)])
_ACCEPTED_REWARDS = st.one_of(_EXTREMES, st.floats(-MAX_REWARD, MAX_REWARD))


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - {"gae"}))
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_accepted_rewards_give_finite_advantages(name: str, data: st.DataObject) -> None:
    """For every option, the advantages and their float32 sum over the batch's tokens are finite in float32."""
    rewards = data.draw(st.lists(_ACCEPTED_REWARDS, min_size=1, max_size=12))
    several = {"min_size": len(rewards), "max_size": len(rewards)}
    ids = data.draw(st.lists(st.integers(0, 2), **several))
    lengths = data.draw(st.lists(st.sampled_from([0, 1, 7, 400]), **several))
    turns = data.draw(st.lists(st.integers(1, 50), **several))
    options = {key: data.draw(_option(option)) for key, option in ADVANTAGE_ENTRIES[name].options.items()}
    if options.get("global_std") and options.get("std", "none") != "none":
        options["global_std"] = False  # both together are refused
    found = token_advantages(name, rewards, group_ids=ids, lengths=lengths, turns=turns, **options)
    tokens = np.concatenate(found)
    assert np.isfinite(tokens).all()
    assert np.isfinite(np.abs(tokens).sum(dtype=np.float32))
    if name == "max_rl" and not (options["global_std"] or options["length_penalty"]) and options["adv_std"] == "none":
        assert np.abs(tokens).max(initial=0) <= 2 * len(rewards)


def _option(option: Option) -> st.SearchStrategy[Any]:
    """Draw accepted values, including the extreme ones."""
    if option.choices:
        return st.sampled_from(option.choices)
    if isinstance(option.default, bool):
        return st.booleans()
    largest = sys.float_info.max
    low = math.nextafter(option.low, math.inf) if option.low_excluded else option.low
    ends = [value for value in (low, option.high, option.default, largest) if option.find_problem(value) is None]
    return st.one_of(st.sampled_from(ends), st.floats(low, min(option.high, largest)))


@pytest.mark.parametrize("name", ["rloo", *sorted(GROUP_BASELINES)])
@settings(max_examples=40, deadline=None)
@given(reward=_ACCEPTED_REWARDS, count=st.integers(2, 23))
def test_equal_rewards_of_any_size_give_zero(name: str, reward: float, count: int) -> None:
    spreads: list[dict[str, Any]] = [{}, {"std": "group"}] if name == "grpo" else [{}]
    spreads += [{"global_std": True}] if name != "reinforce_pp_baseline" else []
    for options in spreads:
        found = advantages(name, [reward] * count, group_size=count, lengths=[3, *[5] * (count - 1)], **options)
        assert np.abs(found).max() < 1e-6, options


def test_reinforce_pp_whitens_over_loss_tokens() -> None:
    """Check value of the design; verl 0.9.1 gives 0.3147870 and -3.1478710 for the same batch."""
    found = advantages("reinforce_pp", [1.0, 0.0], group_size=1, lengths=[100, 10])
    assert found.tolist() == pytest.approx([0.3147870, -3.1478710], abs=2e-5)
    assert advantages("reinforce_pp", [7.0], group_size=1, lengths=[1]).tolist() == [0.0]
    assert advantages("reinforce_pp", [2.0] * 5, group_size=5, lengths=[4] * 5).tolist() == [0.0] * 5
    assert advantages("reinforce_pp", [2.0, 1.0], group_size=1, lengths=[0, 0]).tolist() == [
        2.0,
        1.0,
    ]  # no tokens


def test_reinforce_pp_baseline_uses_group_mean_over_rollouts() -> None:
    """Group means [1/3, 1/2], then whitened over 3 + 5 + 2 + 7 + 4 tokens. Check values of verl 0.9.1."""
    found = advantages(
        "reinforce_pp_baseline", [1.0, 0.0, 0.0, 1.0, 0.0], group_ids=[0, 0, 0, 1, 1], lengths=[3, 5, 2, 7, 4]
    )
    assert found.tolist() == pytest.approx([1.24791, -0.79412, -0.79412, 0.90757, -1.13446], abs=1e-5)


def test_discounted_return_is_whitened_over_all_tokens() -> None:
    """Check values of verl 0.9.1 for rewards [1, 0.5], lengths [3, 2], γ 0.5: returns [.25, .5, 1 | .25, .5]."""
    first, second = token_advantages("reinforce_pp", [1.0, 0.5], lengths=[3, 2], group_size=1, gamma=0.5)
    assert [*first, *second] == pytest.approx([-0.81650, 0, 1.63299, -0.81650, 0], abs=1e-5)
    raw = token_advantages(
        "reinforce_pp", [1.0, 0.5], lengths=[3, 2], group_size=1, gamma=0.5, adv_mean="none", adv_std="none"
    )
    assert [part.tolist() for part in raw] == [[0.25, 0.5, 1.0], [0.25, 0.5]]
    baseline = token_advantages(
        "reinforce_pp_baseline", [1.0, 0.0], lengths=[2, 2], group_size=2, gamma=0.5, adv_mean="none", adv_std="none"
    )
    assert [part.tolist() for part in baseline] == [[0.25, 0.5], [-0.25, -0.5]]


def test_untrained_tokens_count_only_for_the_baseline() -> None:
    rewards, lengths = [1.0, 0.0, 0.5, 0.25], [3, 5, 7, 2]
    trained = [True, False, True, True]
    for gamma in (1.0, 0.5):
        without, with_it = (
            token_advantages("reinforce_pp", r, lengths=n, group_size=1, gamma=gamma, trained=kept)
            for r, n, kept in (([1.0, 0.5, 0.25], [3, 7, 2], None), (rewards, lengths, trained))
        )
        for mine, theirs in zip([with_it[0], *with_it[2:]], without, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    found = token_advantages("grpo", rewards, lengths=lengths, group_size=4, trained=trained)
    assert found[0].tolist() == [0.5625] * 3  # the mean of all four
    with pytest.raises(ValueError, match=r"trained must have shape \[4\], got \[1\]"):
        token_advantages("grpo", rewards, lengths=lengths, group_size=4, trained=[True])
    with pytest.raises(ValueError, match=r"lengths must be whole numbers, got 0.5"):
        token_advantages("grpo", [1.0], lengths=[0.5], group_size=1)


@settings(max_examples=30, deadline=None)
@given(batch=_batches(), data=st.data())
def test_undiscounted_tokens_share_their_rollout_advantage(
    batch: tuple[list[int], list[float], list[int]], data: st.DataObject
) -> None:
    ids, rewards, lengths = batch
    name = data.draw(st.sampled_from([name for name in ADVANTAGES if name != "gae"]))
    lengths[data.draw(st.integers(0, len(lengths) - 1))] = 0
    per_rollout = advantages(name, rewards, group_ids=ids, lengths=lengths)
    per_token = token_advantages(name, rewards, group_ids=ids, lengths=lengths)
    assert [part.tolist() for part in per_token] == [
        [v] * n for v, n in zip(per_rollout.tolist(), lengths, strict=True)
    ]


LEVELS = ("none", "group", "batch")


def _at_levels(values: list[float], ids: list[int], mean: str, std: str) -> list[float]:
    """Compute AReaL's Normalization, group by group: the deviation is measured from the subtracted mean."""

    def of(group: int, level: str, numbers: list[float]) -> list[float]:
        return [x for x, own in zip(numbers, ids, strict=True) if level == "batch" or own == group]

    shift = {group: 0.0 if mean == "none" else statistics.fmean(of(group, mean, values)) for group in set(ids)}
    centred = [value - shift[group] for value, group in zip(values, ids, strict=True)]
    scale = {}
    for group in set(ids):
        own = of(group, std, centred)
        scale[group] = 1.0
        if std != "none" and len(own) > 1:
            scale[group] = math.sqrt(sum(x * x for x in own) / (len(own) - 1)) + 1e-6
    return [value / scale[group] for value, group in zip(centred, ids, strict=True)]


@pytest.mark.parametrize("mean", LEVELS)
@pytest.mark.parametrize("std", LEVELS)
@settings(max_examples=15, deadline=None)
@given(batch=_batches())
def test_mean_and_std_match_each_level(mean: str, std: str, batch: tuple[list[int], list[float], list[int]]) -> None:
    ids, rewards, lengths = batch
    over_rollouts = advantages("grpo", rewards, group_ids=ids, mean=mean, std=std)
    np.testing.assert_allclose(over_rollouts, _at_levels(rewards, ids, mean, std), rtol=1e-4, atol=1e-4)

    tokens = [k for k, length in enumerate(lengths) for _ in range(length)]
    for name, before in (("reward", rewards), ("rloo", advantages("rloo", rewards, group_ids=ids).tolist())):
        found = advantages(name, rewards, group_ids=ids, lengths=lengths, adv_mean=mean, adv_std=std)
        expected = _at_levels([before[k] for k in tokens], [ids[k] for k in tokens], mean, std)
        np.testing.assert_allclose(found[tokens], expected, rtol=1e-4, atol=1e-4)


def test_reward_and_advantage_normalization_combine() -> None:
    """AReaL's usual recipe normalizes rewards over groups and then advantages over the batch's tokens."""
    grouped = advantages("grpo", REWARDS, group_size=3, std="group")
    found = advantages("grpo", REWARDS, group_size=3, lengths=LENGTHS, std="group", adv_mean="batch", adv_std="batch")
    tokens = np.repeat(grouped.astype(np.float64), LENGTHS)
    np.testing.assert_allclose(found, (grouped - tokens.mean()) / tokens.std(ddof=1), rtol=1e-4)
    clipped = advantages("reinforce_pp", REWARDS, group_size=3, lengths=LENGTHS, neg_clipped=True)
    assert clipped.tolist() == pytest.approx([1.25698, 0, 0, 0, 1.25698, 1.25698], abs=1e-5)


def best_of_group(groups: RewardGroups, *, bonus: float = 1.0) -> npt.NDArray[np.float64]:
    return np.where(groups.centred > 0, bonus, 0.0)


def wrong_shape(groups: RewardGroups) -> npt.NDArray[np.float64]:
    return groups.rewards[:1]


def test_custom_advantage_is_loaded_by_import_path() -> None:
    path = f"{__name__}:best_of_group"
    assert advantages(path, REWARDS, group_size=3, bonus=2.0).tolist() == [2, 0, 0, 0, 2, 2]
    with pytest.raises(ValueError, match=r"unknown option of advantage .* 'bonsu' \(did you mean bonus\?\)"):
        advantages(path, REWARDS, group_size=3, bonsu=2.0)
    with pytest.raises(ValueError, match="must return 6 finite numbers"):
        advantages(f"{__name__}:wrong_shape", REWARDS, group_size=3)


def test_every_advantage_runs_with_its_defaults() -> None:
    for name, algorithm in ADVANTAGES.items():
        if name == "gae":
            with pytest.raises(ValueError, match=r"per token, from a critic's values: call rlrun\.algorithms\.gae"):
                advantages(name, REWARDS, group_size=3)
            continue
        defaults = {option: spec.default for option, spec in algorithm.options.items()}
        given_all = advantages(name, REWARDS, group_size=3, lengths=LENGTHS, **defaults)
        assert np.array_equal(given_all, advantages(name, REWARDS, group_size=3, lengths=LENGTHS))
