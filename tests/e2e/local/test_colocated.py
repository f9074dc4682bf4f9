"""Trainer and engine on one device, in turns, on real parts: trained tokens come from the trained policy, after a kill
in any turn.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.local.local_run import LocalRun, example
from tests.support.faults import rlrun_faults
from tests.support.python_path import before

STEPS = 3
IN_TURN = {
    "turn.memory_taken": "sigkill",  # the trainer, while an engine sleeps
    "turn.memory_given": "sigkill@2",  # the trainer, after a step that is not reported as finished
    "turn.engine_half_awake": "sigkill@2",  # the engine, with memory allocated for weights but no weights
}
"""Each fault occurs once, in a separate attempt."""

pytestmark = pytest.mark.full


def test_engine_sleeps_during_steps_despite_kills(
    new_run: Callable[..., LocalRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = tmp_path / "happened"
    monkeypatch.setenv("PYTHONPATH", before(Path(rlrun_faults.__file__).parent))
    monkeypatch.setenv(rlrun_faults.VARIABLE, ",".join(f"{point}={action}" for point, action in IN_TURN.items()))
    monkeypatch.setenv(rlrun_faults.FOLDER_VARIABLE, str(happened))
    run = new_run(
        example(
            "colocated",
            maxSteps=STEPS,
            orchestrator={"batchSize": 16},
            evaluation={"interval": 2, "numTasks": 4},
            checkpoint={"interval": 1},
        )
    )
    for attempt, point in enumerate(IN_TURN):
        run.start(*["--resume"][:attempt])
        assert run.wait() != 0, run.output
        assert sorted(path.name for path in happened.iterdir()) == sorted([*IN_TURN][: attempt + 1]), (
            f"{point}\n{run.output}"
        )
    run.run("--resume")
    rollouts = run.traces()
    assert len(rollouts) == STEPS * 16
    for rollout in rollouts:
        assert {span["version"] for sequence in rollout["versions"] for span in sequence} == {rollout["step"] - 1}
    assert [line["step"] for line in run.metrics() if "time/engines_asleep" in line] == [1, 2, 3]
    assert [line["step"] for line in run.metrics() if "eval/arithmetic/reward/mean" in line] == [0, 2, 3]
