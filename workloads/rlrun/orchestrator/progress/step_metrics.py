"""Metrics of a step, computed from its batch. Pure; names follow other RL projects."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rlrun.config.models.rollout import SOLVED
from rlrun.environments.bounds import MAX_METRICS
from rlrun.orchestrator.types import FinishedGroup
from rlrun.protocol.files.batch import Batch, Sample
from rlrun.protocol.files.metrics_line import missing_answers


def batch_metrics(batch: Batch, solved: Mapping[str, float]) -> dict[str, float]:
    """Compute the metrics of a batch on disk.

    Args:
        batch: batch of one step.
        solved: reward from which a rollout counts as solved, by environment.

    Returns:
        Rewards over rollouts (`reward/mean`, `reward/std`, `reward/<env>/mean`); shares of groups in which all rollouts
        (`batch/solve_all`) or no rollouts (`batch/solve_none`) are solved; age in versions behind the trained policy,
        of tokens (`off_policy/mean`, `off_policy/max`) and of groups at dispatch (`staleness/mean`); tokens sampled per
        rollout.
    """
    rollouts: dict[tuple[int, int], list[Sample]] = {}
    for sample in batch.samples:
        rollouts.setdefault((sample.group, sample.rollout), []).append(sample)
    first = [samples[0] for samples in rollouts.values()]
    rewards = [sample.reward for sample in first]
    lengths = [float(sum(int(s.loss_mask.sum()) for s in samples)) for samples in rollouts.values()]
    groups: dict[int, list[bool]] = {}
    for sample in first:
        # Recorded batches may contain environments that this run does not have.
        is_solved = sample.reward >= solved.get(sample.environment, SOLVED)
        groups.setdefault(sample.group, []).append(is_solved)
    policy = batch.step - 1
    lags = np.concatenate([policy - s.versions[s.loss_mask] for s in batch.samples])
    metrics = {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "batch/rollouts": float(len(rewards)),
        "batch/groups": float(len(groups)),
        "batch/samples": float(len(batch.samples)),
        "batch/tokens": float(batch.tokens),
        "batch/loss_tokens": float(batch.loss_tokens),
        "batch/solve_all": statistics.fmean(float(all(values)) for values in groups.values()),
        "batch/solve_none": statistics.fmean(float(not any(values)) for values in groups.values()),
        "off_policy/mean": float(lags.mean()),
        "off_policy/max": float(lags.max()),
        "staleness/mean": statistics.fmean(policy - sample.dispatch_version for sample in first),
        "completion_length/mean": statistics.fmean(lengths),
        "completion_length/max": max(lengths),
    }
    for label in dict.fromkeys(sample.environment for sample in first):
        own = [sample.reward for sample in first if sample.environment == label]
        metrics[f"reward/{label}/mean"] = statistics.fmean(own)
        metrics[f"batch/{label}/rollouts"] = float(len(own))
    return metrics


def group_means(batch: Batch) -> dict[int, float]:
    """Return the mean reward of each group of a batch, in order of the group numbers."""
    rewards: dict[int, dict[int, float]] = {}
    for sample in batch.samples:
        rewards.setdefault(sample.group, {})[sample.rollout] = sample.reward
    return {group: sum(found.values()) / len(found) for group, found in sorted(rewards.items())}


class OwnMetrics:
    """Means of the environments' metrics, for the first `MAX_METRICS` names of each environment.

    An environment with ever new names would otherwise fill the run's metrics and a tracker's columns.
    """

    def __init__(self) -> None:
        self._names: dict[str, set[str]] = {}

    def means(self, environment: str, found: Iterable[Mapping[str, float]]) -> dict[str, float]:
        """Return the mean of each metric over the rollouts that have it. Values beyond the limit of names are counted
        as `left_out`.

        Args:
            environment: label of the environment.
            found: metrics of each rollout.
        """
        names, values, left_out = self._names.setdefault(environment, set()), dict[str, list[float]](), 0
        for metrics in found:
            for name, value in metrics.items():
                if name in names or len(names) < MAX_METRICS:
                    names.add(name)
                    values.setdefault(name, []).append(value)
                else:
                    left_out += 1
        means = {name: statistics.fmean(given) for name, given in values.items()}
        return means | ({"left_out": float(left_out)} if left_out else {})


def group_metrics(groups: Sequence[FinishedGroup], own: OwnMetrics) -> dict[str, float]:
    """Compute the metrics of a batch's groups in memory: truncation, time, and the environments' metrics as
    `env/<env>/<name>`.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [float(rollout.loss_tokens) for rollout in rollouts]  # masked rollouts included
    metrics = {
        "completion_length/mean": statistics.fmean(lengths),
        "completion_length/max": max(lengths),
        "batch/truncated": statistics.fmean(float(rollout.truncated) for rollout in rollouts),
        "time/rollout/mean": statistics.fmean(rollout.seconds for rollout in rollouts),
        "time/rollout/max": max(rollout.seconds for rollout in rollouts),
    }
    for label in dict.fromkeys(group.environment for group in groups):
        found = (rollout.metrics for group in groups if group.environment == label for rollout in group.rollouts)
        metrics |= {f"env/{label}/{name}": mean for name, mean in own.means(label, found).items()}
    return metrics


REMOVED = ("age", "error", "surplus")
"""Reasons to remove rollouts that are independent of the reward."""


def discarded_rollouts(counters: Mapping[str, int]) -> int:
    """Return the number of finished rollouts that restarts could not use."""
    return sum(count for name, count in counters.items() if name.startswith("discarded/"))


_OF_ENVIRONMENTS = ("errors/", "lost/", "unplayable/")
"""Prefixes of counters that are metrics of the same name."""


def counter_metrics(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, float]:
    """Compute the counts since the previous batch.

    Returns:
        Groups dropped and dispatched again by reason; rollouts that ended in an error, in total and as
        `errors/<env>/<kind>`; rollouts played again because another rollout ended their process (`lost/<env>`);
        unplayable tasks as `unplayable/<env>/<reason>`; reused and unusable finished rollouts of earlier attempts;
        rollouts that are not trained on by reason, and their mean length in tokens, for comparison with
        `completion_length/mean` of the trained ones.
    """
    reasons = ("error", "masked", "surplus", "too_easy", "too_hard", "unplayable", "zero_variance")
    names = {*(f"dropped/{reason}" for reason in reasons), "cancelled/age", "cancelled/engine", "errors"}
    names |= {name for name in now if name.startswith(_OF_ENVIRONMENTS)}
    restart = {
        "rollouts/readmitted": float(now.get("readmitted", 0) - before.get("readmitted", 0)),
        "rollouts/discarded": float(discarded_rollouts(now) - discarded_rollouts(before)),
    }
    counts = {
        name if name == "errors" or name.startswith(_OF_ENVIRONMENTS) else f"groups/{name}": float(
            now.get(name, 0) - before.get(name, 0)
        )
        for name in sorted(names)
    }
    return restart | counts | _removed_counts(now, before)


def _removed_counts(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, float]:
    metrics = {}
    for reason in REMOVED:
        rollouts, tokens = (
            now.get(name, 0) - before.get(name, 0)
            for name in (f"removed/{reason}/rollouts", f"removed/{reason}/tokens")
        )
        metrics[f"removed/{reason}/rollouts"] = float(rollouts)
        if rollouts:
            metrics[f"removed/{reason}/completion_length/mean"] = tokens / rollouts
    return metrics


_SHOWN = (
    ("reward", "reward/mean", ".3f"),
    ("loss", "loss", ".4f"),
    ("validation loss", "validation/loss", ".4f"),
    ("mismatch_kl", "mismatch_kl", ".1e"),
    ("grad_norm", "grad_norm", ".2g"),
    ("staleness", "off_policy/mean", ".2f"),
    ("tok/s", "perf/throughput", ".0f"),
    ("step time", "time/step", ".2f"),
)


def _is_logged(key: str, line: Mapping[str, object]) -> bool:
    """Return whether the log line shows `key`. The loss of RL is omitted, because its value cannot be interpreted."""
    return key != "loss" or "reward/mean" not in line


def _held_out(line: Mapping[str, float]) -> list[str]:
    found = []
    for key in line:
        if key.startswith("eval/") and key.endswith("/reward/mean"):
            prefix = key.removesuffix("reward/mean")
            found.append(f"held-out {prefix[5:-1]} {line[key]:.3f}{missing_answers(line, prefix)}")
        elif key.startswith("eval/") and key.endswith("/answers") and not line[key]:
            prefix = key.removesuffix("answers")
            found.append(f"held-out {prefix[5:-1]} without an answer{missing_answers(line, prefix)}")
    return found


def step_line(line: Mapping[str, float]) -> str:
    """Format a line of `metrics.jsonl` for the log, without unknown values."""
    shown = [f"{label} {line[key]:{layout}}" for label, key, layout in _SHOWN if key in line and _is_logged(key, line)]
    return f"step {line['step']}: " + ", ".join([*shown, *_held_out(line)])
