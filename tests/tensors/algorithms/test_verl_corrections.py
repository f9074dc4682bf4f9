"""Converted verl corrections, compared with the definitions of verl's documentation in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlrun.algorithms import correct_mismatch
from rlrun.api.run_manifest import parse_manifest
from rlrun.convert.compose.shared_parts import Context
from rlrun.convert.conversion import convert_settings
from rlrun.convert.readers.hydra import Setting

KEY = "algorithm.rollout_correction."
BASE = {
    "data.train_files": "/srv/data/gsm8k/train.parquet",
    "actor_rollout_ref.model.path": "Qwen/Qwen3-8B",
    "algorithm.adv_estimator": "grpo",
    "trainer.total_training_steps": 7,
}
LENGTHS = [5, 4, 6, 3]


def converted(changes: dict[str, Any]) -> dict[str, Any]:
    settings = BASE | {KEY + name: value for name, value in changes.items()}
    found = convert_settings([Setting(key, value, "test") for key, value in settings.items()], Context("run"), ["test"])
    assert not found.refused
    correction = parse_manifest(found.text, "test")[0].spec.algorithm.effective_correction
    assert correction is not None
    return dict(correction.options)


def bounds(spec: str | float) -> tuple[float | None, float]:
    parts = str(spec).split("_")
    return (float(parts[0]), float(parts[1])) if len(parts) == 2 else (None, float(parts[0]))


def keeps_token(xs: dict[int, float], k: int, name: str, spec: str | float) -> bool:
    """Whether verl's `rollout_rs` keeps token `k`; `xs` holds log(trainer/engine) of the sequence's loss tokens."""
    low, high = bounds(spec)
    measure = name[-2:] if name[-2:] in ("k1", "k2", "k3") else "ratio"
    value = {
        "k1": lambda x: -x,
        "k2": lambda x: x * x / 2,
        "k3": lambda x: math.exp(x) - 1 - x,
        "ratio": lambda x: x,
    }[measure]
    if name.startswith("token"):
        statistic = value(xs[k])
    elif name.startswith("seq_max"):
        statistic = max(map(value, xs.values()))
    else:
        total = sum(map(value, xs.values()))
        statistic = total / len(xs) if "mean" in name or name == "geometric" else total
    if measure in ("k2", "k3"):
        return statistic <= high
    low = 1 / high if low is None else low
    if measure == "ratio":
        return low <= math.exp(statistic) <= high
    return math.log(low) <= statistic <= math.log(high)


def weight(xs: dict[int, float], k: int, level: str, spec: str | float) -> float:
    """verl's `rollout_is` weight of token `k`: truncated, or 0 outside of two bounds (IcePop)."""
    low, high = bounds(spec)
    ratio = math.exp(xs[k] if level == "token" else sum(xs.values()))
    return min(ratio, high) if low is None else ratio * (low <= ratio <= high)


CASES: list[dict[str, Any]] = [
    {"rollout_is": "token", "rollout_is_threshold": 1.2},
    {"rollout_is": "sequence", "rollout_is_threshold": 1.5},
    {"rollout_is": "token", "rollout_is_threshold": "0.8_1.2"},
    {"rollout_is": "sequence", "rollout_is_threshold": "0.7_1.5"},
    {
        "rollout_is": "sequence",
        "rollout_is_threshold": 1.5,
        "rollout_rs": "token_k1",
        "rollout_rs_threshold": "0.8_1.3",
    },
    {"rollout_is": "token", "rollout_is_threshold": 1.1, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.1},
    *(
        {"rollout_rs": name, "rollout_rs_threshold": spec}
        for name, spec in [
            ("token_k1", 1.2),
            ("token_k1", "0.7_1.1"),
            ("token_k2", 0.02),
            ("token_k3", 0.02),
            ("seq_sum_k1", "0.8_1.5"),
            ("seq_sum_k2", 0.1),
            ("seq_sum_k3", 0.1),
            ("seq_mean_k1", 1.1),
            ("seq_mean_k2", 0.02),
            ("seq_mean_k3", 0.02),
            ("seq_max_k2", 0.08),
            ("seq_max_k3", 0.08),
            ("token", 1.2),
            ("sequence", "0.8_1.5"),
            ("geometric", 1.15),
        ]
    ),
]


@pytest.mark.parametrize("changes", CASES, ids=lambda changes: "-".join(map(str, changes.values())))
def test_converted_verl_correction_equals_definition(changes: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(4)
    i = -torch.rand(18, generator=generator, dtype=torch.float64) - 0.5
    o = i + 0.25 * torch.randn(18, generator=generator, dtype=torch.float64)
    mask = torch.rand(18, generator=generator) < 0.8
    found = correct_mismatch(o, i, mask=mask, sequence_lengths=LENGTHS, **converted(changes))
    expected, rejects = [], []
    for start, length in zip((0, 5, 9, 15), LENGTHS, strict=True):
        xs = {k: (o[k] - i[k]).item() for k in range(start, start + length) if mask[k]}
        for k in range(start, start + length):
            keeps = k in xs and (
                "rollout_rs" not in changes
                or keeps_token(xs, k, changes["rollout_rs"], changes["rollout_rs_threshold"])
            )
            level = changes.get("rollout_is")
            value = 1.0 if level is None or k not in xs else weight(xs, k, level, changes["rollout_is_threshold"])
            expected.append(value * keeps)
            rejects.append(k in xs and not keeps)
    assert found.weights.tolist() == pytest.approx(expected, rel=1e-10, abs=1e-12)
    assert len({round(value, 6) for value in expected}) > 1, "the thresholds divide the tokens"
    if "rollout_rs" in changes:
        assert found.dropped.tolist() == rejects
