"""A mixture that replays its experts within each step learns, and with flipped advantages it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.local.local_run import LocalRun, small_quickstart
from tests.support.small_repositories import STEP_REPLAY, STEP_REPLAY_MISMATCH, make_qwen3_moe

pytestmark = pytest.mark.full

STEPS = 40
GAIN = 0.1
"""Measured: 0.33 and 0.40; -0.50 with flipped advantages."""


def train_mixture(new_run: Callable[..., LocalRun], source: Path, *, flipped: bool = False) -> LocalRun:
    """Train the mixture to the end."""
    document = small_quickstart(maxSteps=STEPS, evaluation={"interval": STEPS}, checkpoint={"interval": STEPS})
    spec = document["spec"]
    spec["model"] = {"path": str(source)}
    spec["trainer"]["processesPerReplica"] = 1
    for block, fields in STEP_REPLAY.items():
        spec[block] |= fields
    if flipped:
        spec["algorithm"] |= {"advantage": {"name": "tests.e2e.local.flipped:advantages"}}
    run = new_run(document)
    run.run()
    return run


def test_mixture_with_replayed_experts_learns(new_run: Callable[..., LocalRun], tmp_path: Path) -> None:
    make_qwen3_moe(tmp_path / "source")
    learning = train_mixture(new_run, tmp_path / "source")
    flipped = train_mixture(new_run, tmp_path / "source", flipped=True)
    gains = []
    for run in (learning, flipped):
        (_, before), *_, (_, after) = run.held_out()
        gains.append(after - before)
        lines = run.steps()
        # Both updates of a step compute its tokens with the experts of the pass at its start.
        assert {line["routing/replayed_share"] for line in lines} == {1.0}
        # The first update has moved the policy before the second one, so some experts would have been others without replay.
        assert sum(line["routing/changed_share"] for line in lines) > 0
        assert lines[0]["mismatch_kl"] < STEP_REPLAY_MISMATCH
    print(f"gains of held-out reward: {gains}")
    assert gains[0] >= GAIN
    assert gains[1] < 0
