"""Metrics of a step from its batch. Pure; names follow the ecosystem."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlrun.orchestrator.rollouts import FinishedGroup
from rlrun.protocol.batch import Batch, Sample


def batch_metrics(batch: Batch) -> dict[str, float]:
    """What a batch on disk tells.

    Returns:
        Rewards over rollouts (`reward/mean`, `reward/std`, `reward/<env>/mean`); shares of groups in which every rollout has a reward of
        at least 1 (`batch/solve_all`) or at most 0 (`batch/solve_none`); how many versions older than the policy that is being trained the
        tokens are (`off_policy/mean`, `off_policy/max`) and their groups were at dispatch (`staleness/mean`); tokens sampled per rollout.
    """
    rollouts: dict[tuple[int, int], list[Sample]] = {}
    for sample in batch.samples:
        rollouts.setdefault((sample.group, sample.rollout), []).append(sample)
    first = [samples[0] for samples in rollouts.values()]
    rewards = [sample.reward for sample in first]
    lengths = [float(sum(int(s.loss_mask.sum()) for s in samples)) for samples in rollouts.values()]
    groups: dict[int, list[float]] = {}
    for sample in first:
        groups.setdefault(sample.group, []).append(sample.reward)
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
        "batch/solve_all": statistics.fmean(float(min(values) >= 1) for values in groups.values()),
        "batch/solve_none": statistics.fmean(float(max(values) <= 0) for values in groups.values()),
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
    """Mean reward of each group of a batch, in order of their numbers."""
    rewards: dict[int, dict[int, float]] = {}
    for sample in batch.samples:
        rewards.setdefault(sample.group, {})[sample.rollout] = sample.reward
    return {group: sum(found.values()) / len(found) for group, found in sorted(rewards.items())}


def group_metrics(groups: Sequence[FinishedGroup]) -> dict[str, float]:
    """What only the live groups of a batch tell: truncation, time, and the environments' own metrics as `env/<env>/<name>`."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [float(rollout.loss_tokens) for rollout in rollouts]  # also of those that a filter masked
    metrics = {
        "completion_length/mean": statistics.fmean(lengths),
        "completion_length/max": max(lengths),
        "batch/truncated": statistics.fmean(float(rollout.truncated) for rollout in rollouts),
        "time/rollout/mean": statistics.fmean(rollout.seconds for rollout in rollouts),
        "time/rollout/max": max(rollout.seconds for rollout in rollouts),
    }
    values: dict[str, list[float]] = {}
    for group in groups:
        for rollout in group.rollouts:
            for name, value in rollout.metrics.items():
                values.setdefault(f"env/{group.environment}/{name}", []).append(value)
    return metrics | {name: statistics.fmean(found) for name, found in values.items()}


def discarded(counters: Mapping[str, int]) -> int:
    """Finished rollouts that a restart could not use."""
    return sum(count for name, count in counters.items() if name.startswith("discarded/"))


def counter_metrics(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, float]:
    """What happened since the batch before: groups dropped and dispatched again by reason, rollouts that ended in an error, all
    together and as `errors/<env>/<kind>`, and finished rollouts of earlier attempts that count again or are of no use."""
    reasons = ("error", "masked", "too_easy", "too_hard", "zero_variance")
    names = {*(f"dropped/{reason}" for reason in reasons), "cancelled/age", "cancelled/engine", "errors"}
    names |= {name for name in now if name.startswith("errors/")}
    restart = {
        "rollouts/readmitted": float(now.get("readmitted", 0) - before.get("readmitted", 0)),
        "rollouts/discarded": float(discarded(now) - discarded(before)),
    }
    return restart | {
        name if name.startswith("errors") else f"groups/{name}": float(now.get(name, 0) - before.get(name, 0))
        for name in sorted(names)
    }


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


def _told(key: str, line: Mapping[str, Any]) -> bool:
    """The loss of RL tells nothing; that of supervised fine-tuning tells all."""
    return key != "loss" or "reward/mean" not in line


def step_line(line: Mapping[str, Any]) -> str:
    """A line of `metrics.jsonl` in a few words, for the log; what is not known is left out."""
    shown = [f"{label} {line[key]:{layout}}" for label, key, layout in _SHOWN if key in line and _told(key, line)]
    shown += [
        f"held-out {key.removeprefix('eval/').removesuffix('/reward/mean')} {value:.3f}"
        for key, value in line.items()
        if key.startswith("eval/") and key.endswith("/reward/mean")
    ]
    return f"step {line['step']}: " + ", ".join(shown)
