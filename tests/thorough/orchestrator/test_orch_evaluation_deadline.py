"""Slow evaluation: it delays weight updates at most until its deadline, and finished answers count as a partial
result.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from orch_simulation import FakeEngine, make_config, simulate

from rlrun.inference.client.engine_client import Completion
from rlrun.orchestrator.progress.step_metrics import step_line
from rlrun.runtime import exit_codes

SECONDS, TASKS = 0.5, 6
NEVER = 3600.0


@dataclass
class SlowInEvaluation(FakeEngine):
    """Engine that alternates between immediate answers and no answer for held-out questions, which have their own
    temperature.
    """

    held_out: int = 0
    given_up: int = 0
    all_of_them: bool = False
    handed: dict[int, float] = field(default_factory=dict)
    """Arrival time of each version."""

    async def generate(  # type: ignore[override]
        self, token_ids: Sequence[int], *, temperature: float, **more: Any
    ) -> list[Completion]:
        if temperature == 0:
            self.held_out += 1
            if self.all_of_them or self.held_out % 2:
                try:
                    await asyncio.sleep(NEVER)
                except asyncio.CancelledError:
                    self.given_up += 1
                    raise
        return await super().generate(token_ids, **more)

    async def update_weights(self, path: str, version: int, *, force: bool = False) -> dict[str, float]:
        self.handed[version] = time.monotonic()
        return await super().update_weights(path, version, force=force)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("all_of_them", [False, True])
async def test_evaluation_deadline_keeps_finished_answers(
    tmp_path: Path, tokenizer_folder: Path, all_of_them: bool
) -> None:
    engine = SlowInEvaluation(all_of_them=all_of_them)
    evaluation = {
        "interval": 4,
        "num_tasks": TASKS,
        "timeout_seconds": SECONDS,
        "sampling": {"temperature": 0.0},
    }
    config = make_config(tmp_path, tokenizer_folder, max_steps=4, evaluation=evaluation)
    began = time.monotonic()
    outcome = await simulate(config, engines=[engine])
    assert outcome.code == exit_codes.OK
    assert time.monotonic() - began < 60
    done = 0 if all_of_them else TASKS // 2
    metrics = {line["step"]: line for line in lines(outcome.paths.metrics)}
    assert sorted(metrics) == [0, 1, 2, 3, 4]
    for version in (0, 4):
        line = metrics[version]
        assert line["eval/reverse-text/answers"] == done
        assert line["eval/reverse-text/timeouts"] == TASKS - done
        assert line["eval/reverse-text/errors"] == 0
        assert ("eval/reverse-text/reward/mean" in line) is bool(done)
        assert SECONDS <= line["time/evaluate"] < SECONDS + 10
        if done:
            of_all = line["eval/reverse-text/reward/mean_all"]
            assert of_all == pytest.approx(line["eval/reverse-text/reward/mean"] * done / TASKS)
            assert f"(partial: {done} of {TASKS} answers in time, {of_all:.3f} with the rest as 0)" in step_line(line)
        trace = lines(outcome.paths.evaluation_trace(version))
        assert len(trace) == TASKS
        assert sum("evaluation.timeoutSeconds" in answer.get("error", "") for answer in trace) == TASKS - done
        assert {answer["policy_version"] for answer in trace} == {version}
    newer = min(when for version, when in engine.handed.items() if version > 0)
    assert SECONDS <= newer - engine.handed[0] < SECONDS + 10
    assert engine.given_up == 2 * (TASKS - done), "requests that nobody waits for end in the engine"
