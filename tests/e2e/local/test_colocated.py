"""Trainer and engine on the same device, in turn, on real parts: what is trained was sampled by the policy that it trains."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.e2e.local.local_run import LocalRun, example

STEPS = 3

pytestmark = pytest.mark.timeout(900)


def test_an_engine_sleeps_while_a_step_is_trained(new_run: Callable[..., LocalRun]) -> None:
    run = new_run(
        example(
            "colocated",
            maxSteps=STEPS,
            orchestrator={"batchSize": 16},
            evaluation={"interval": 2, "numTasks": 4},
            checkpoint={"interval": 2},
        )
    )
    run.run()
    rollouts = run.traces()
    assert len(rollouts) == STEPS * 16
    for rollout in rollouts:
        assert {span["version"] for sequence in rollout["versions"] for span in sequence} == {rollout["step"] - 1}
    metrics = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if "time/engines_asleep" in line] == [1, 2, 3]
    assert [line["step"] for line in metrics if "eval/arithmetic/reward/mean" in line] == [0, 2, 3]
