"""Advantages from rewards: shape the rewards, estimate, distribute over the loss tokens, normalize."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlrun.advantages.estimators import ADVANTAGES, STD_FLOOR, Floats, Integers, RewardGroups, normalize_values
from rlrun.config.algorithm.names import Options, is_import_path
from rlrun.custom import bind

SHARED_OPTIONS = ("turn_discount", "length_penalty", "global_std", "gamma", "adv_mean", "adv_std", "neg_clipped")
"""Options that this module applies before or after an estimator; they are not arguments of its function."""


@dataclass(frozen=True)
class _Estimated:
    """Estimate per rollout, before it is distributed over tokens and normalized."""

    name: str
    values: Floats
    groups: RewardGroups
    options: Options = field(default_factory=dict)
    """Options of the estimator from `SHARED_OPTIONS`."""

    @property
    def gamma(self) -> float:
        return float(self.options.get("gamma", 1.0))

    def normalize_and_check(
        self, values: Floats, weights: Floats | None, group_ids: Integers
    ) -> npt.NDArray[np.float32]:
        """Normalize over loss tokens at the levels `adv_mean` and `adv_std`, clip and check; all arrays are `[M]`."""
        mean, std = self.options.get("adv_mean", "none"), self.options.get("adv_std", "none")
        if (mean, std) != ("none", "none"):
            if weights is None:
                raise ValueError(
                    f"lengths must be given for advantage {self.name} with adv_mean {mean} and adv_std {std}, "
                    "which normalize over loss tokens"
                )
            values = normalize_values(
                values, weights=weights, group_ids=group_ids, num_groups=self.groups.num_groups, mean=mean, std=std
            )
        values = np.maximum(values, 0) if self.options.get("neg_clipped") else values
        return _check_result(self.name, values, len(values)).astype(np.float32)


def advantages(
    name: str,
    rewards: npt.ArrayLike,
    *,
    group_size: int | None = None,
    group_ids: npt.ArrayLike | None = None,
    lengths: npt.ArrayLike | None = None,
    turns: npt.ArrayLike | None = None,
    **options: object,
) -> npt.NDArray[np.float32]:
    """Return one advantage per rollout, `[N]` fp32.

    Args:
        name: key of `ADVANTAGES`, or `package.module:function`, which is called as `function(RewardGroups, **options)` and returns `[N]`
            numbers.
        rewards: rewards of the rollouts, `[N]`; they are the batch of batch-level options.
        group_size: size of contiguous groups; an alternative to `group_ids`.
        group_ids: group of each rollout, `[N]` integers; groups may have any size and be interleaved.
        lengths: loss tokens of each rollout, `[N]`, 0 for an empty answer; required by `opo`, `length_penalty`, `adv_mean` and `adv_std`,
            hence by `reinforce_pp` and `reinforce_pp_baseline`.
        turns: number of model turns of each rollout, `[N]` positive; used by `turn_discount`. Default: 1.
        options: options of the estimator, see `ADVANTAGES[name].options`.

    Raises:
        ValueError: an argument is misaligned, not finite, unknown or out of range, or `gamma` is below 1, which needs an advantage per
            token.
    """
    found = _estimate_rollouts(
        name, rewards, group_size=group_size, group_ids=group_ids, lengths=lengths, turns=turns, options=options
    )
    if found.gamma != 1:
        raise ValueError(
            f"advantage {name}: gamma ({found.gamma}) needs an advantage per token; "
            "call token_advantages, or set gamma to 1"
        )
    return found.normalize_and_check(found.values, found.groups.lengths, found.groups.group_ids)


def token_advantages(
    name: str,
    rewards: npt.ArrayLike,
    *,
    lengths: npt.ArrayLike,
    group_size: int | None = None,
    group_ids: npt.ArrayLike | None = None,
    turns: npt.ArrayLike | None = None,
    trained: npt.ArrayLike | None = None,
    **options: object,
) -> list[npt.NDArray[np.float32]]:
    """Return one advantage per loss token: N arrays; array n is `[L_n]` fp32 in the order of sampling.

    With discount γ, a token that is followed by k loss tokens has γ^k times the estimate: the return-to-go of a reward at the end.

    Args:
        lengths: loss tokens of each rollout, `[N]` integers.
        trained: trained rollouts, `[N]` bool; other rollouts count in the baseline of their group, but `adv_mean` and `adv_std` ignore
            their tokens. Default: all.
        name, rewards, group_size, group_ids, turns, options: see `advantages`.

    Raises:
        ValueError: an argument is misaligned, not finite, unknown or out of range; the message contains its name.
    """
    found = _estimate_rollouts(
        name, rewards, group_size=group_size, group_ids=group_ids, lengths=lengths, turns=turns, options=options
    )
    assert found.groups.lengths is not None
    counts = found.groups.lengths.astype(np.int64)
    if (counts != found.groups.lengths).any():
        raise ValueError(
            f"lengths must be whole numbers, got {found.groups.lengths[counts != found.groups.lengths][0]:g}"
        )
    kept = np.ones(len(counts), np.bool_) if trained is None else np.asarray(trained, np.bool_)
    if kept.shape != counts.shape:
        raise ValueError(f"trained must have shape [{len(counts)}], got {list(kept.shape)}")
    ends = np.cumsum(counts)[:-1]
    if found.gamma == 1:
        per_rollout = found.normalize_and_check(found.values, found.groups.lengths * kept, found.groups.group_ids)
        return np.split(np.repeat(per_rollout, counts), ends) if len(counts) else []
    left = np.concatenate([np.arange(count)[::-1] for count in counts]) if len(counts) else np.empty(0)
    spread = np.repeat(found.values, counts) * found.gamma**left
    weights, ids = np.repeat(kept, counts).astype(np.float64), np.repeat(found.groups.group_ids, counts)
    return np.split(found.normalize_and_check(spread, weights, ids), ends) if len(counts) else []


def _estimate_rollouts(
    name: str,
    rewards: npt.ArrayLike,
    *,
    group_size: int | None,
    group_ids: npt.ArrayLike | None,
    lengths: npt.ArrayLike | None,
    turns: npt.ArrayLike | None,
    options: Options,
) -> _Estimated:
    function, bound = bind("advantage", name, ADVANTAGES, options)
    complete = dict(bound)
    values = _check_vector("rewards", rewards)
    ids, num_groups = _group_indices(len(values), group_size, group_ids)
    weights, steps = _check_counts("lengths", lengths, values, least=0), _check_counts("turns", turns, values, least=1)
    shared: Options = {}
    if not is_import_path(name):
        shared = {option: complete.pop(option) for option in SHARED_OPTIONS if option in complete}
        values = _shape_rewards(values, weights, steps, shared)
    groups = RewardGroups(values, ids, num_groups, weights)
    found = _check_result(name, function(groups, **complete), len(values))
    if shared.get("global_std") and len(found) > 1:
        found = found / (values.std(ddof=1) + STD_FLOOR)
    return _Estimated(name, found, groups, shared)


def _shape_rewards(rewards: Floats, lengths: Floats | None, turns: Floats | None, options: Options) -> Floats:
    """Return R·turn_discount^(turns - 1) - length_penalty·L."""
    if turns is not None:
        rewards = np.multiply(rewards, options.get("turn_discount", 1.0) ** (turns - 1))
    if not (penalty := options.get("length_penalty", 0.0)):
        return rewards
    if lengths is None:
        raise ValueError("lengths must be given if length_penalty > 0")
    shaped: Floats = rewards - penalty * lengths
    return shaped


def _check_counts(name: str, counts: npt.ArrayLike | None, rewards: Floats, *, least: int) -> Floats | None:
    if counts is None:
        return None
    values = _check_vector(name, counts)
    if len(values) != len(rewards):
        raise ValueError(f"{name} has {len(values)} entries for {len(rewards)} rewards")
    if (values < least).any():
        raise ValueError(f"{name} must be at least {least}, got {values.min():g}")
    return values


def _check_vector(name: str, values: npt.ArrayLike) -> Floats:
    vector = np.asarray(values, np.float64)
    if vector.ndim != 1:
        raise ValueError(f"{name} must have shape [N], got {list(vector.shape)}")
    if not np.isfinite(vector).all():
        where = int(np.flatnonzero(~np.isfinite(vector))[0])
        raise ValueError(f"{name} is not finite: {vector[where]:g} at {where}")
    return vector


def _group_indices(count: int, group_size: int | None, group_ids: npt.ArrayLike | None) -> tuple[Integers, int]:
    if (group_size is None) == (group_ids is None):
        raise ValueError("give either group_size (equal contiguous groups) or group_ids (any groups)")
    if group_size is not None:
        if group_size < 1 or count % group_size:
            raise ValueError(f"group_size must divide the number of rewards ({count}), got {group_size}")
        return np.arange(count) // group_size, count // group_size
    ids = np.asarray(group_ids)
    if ids.shape != (count,):
        raise ValueError(f"group_ids must have shape [{count}], got {list(ids.shape)}")
    if count and not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"group_ids must be integers, got {ids.dtype}")
    known, inverse = np.unique(ids, return_inverse=True)
    return inverse.astype(np.int64), len(known)


def _check_result(name: str, result: object, count: int) -> Floats:
    """Check the result of an estimator, `[count]`. A user's function may return any array that numpy can convert, such as a CPU tensor."""
    try:
        values = np.asarray(result, np.float64)
    except (TypeError, ValueError, RuntimeError):
        values = np.empty(0)
    # The trainer receives fp32, so the values must be finite in fp32 too.
    if values.shape != (count,) or not (np.abs(values) <= np.finfo(np.float32).max).all():
        raise ValueError(f"advantage {name} must return {count} finite numbers, got {result}")
    return values
