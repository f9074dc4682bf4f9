"""Role and phase that the next step waits for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlrun.inspect.snapshot import Progress, Snapshot, Wait
from rlrun.inspect.why import explain_run
from rlrun.orchestrator.progress.run_snapshot import Standing
from rlrun.orchestrator.sft.sft_pipeline import DataPipeline
from rlrun.orchestrator.trainer.trainer_client import Since
from rlrun.protocol.messages.trainer_channel import TrainerState


def state(phase: str, step: int) -> TrainerState:
    return TrainerState.model_validate(
        {"attempt": 1, "base_step": 0, "step": step, "phase": phase, "phase_since": 1.7e9, "last_event": 3}
    )


def standing(trainer: TrainerState | None, *, step: int, made: int, **changed: Any) -> Standing:
    """Build the progress of a run from plain values."""
    sync = SimpleNamespace(newest=changed.get("newest", 4), resting=changed.get("resting", False))
    pool = SimpleNamespace(version=changed.get("version", 4), problems=lambda: "")
    counters = dict.fromkeys(("readmitted", "errors"), 0)
    groups = SimpleNamespace(
        made=made, buffered=3, running=2, oldest=lambda: None, ledger=SimpleNamespace(counters=counters)
    )
    found = object.__new__(Standing)
    found._config = SimpleNamespace(max_steps=10, batch_size=8, replay=changed.get("replay"))  # type: ignore[assignment]
    found._pool, found._sync, found._groups = pool, sync, groups  # type: ignore[assignment]
    found._trainer = SimpleNamespace(state=trainer)  # type: ignore[assignment]
    found._evaluations = SimpleNamespace(pending=changed.get("evaluates", False), answered=5)  # type: ignore[assignment]
    found._step, found._since = step, Since()
    return found


IDLE = "waiting_for_batch"


@pytest.mark.parametrize(
    ("trainer", "step", "made", "more", "expected"),
    [
        (state(IDLE, 4), 4, 4, {}, ("orchestrator", "rollouts for step 5")),
        # The trainer has trained the batch, and its metrics are still on the way.
        (state(IDLE, 4), 3, 4, {}, ("orchestrator", "rollouts for step 5")),
        # The batch is written, and the trainer has not received it yet.
        (state(IDLE, 3), 3, 4, {}, ("orchestrator", "the batch of step 4")),
        (state("training", 3), 3, 4, {}, ("trainer", "training, step 4")),
        (state("saving", 4), 3, 4, {}, ("trainer", "saving, step 4")),
        (state(IDLE, 4), 4, 4, {"resting": True}, ("orchestrator", "rollouts for step 5")),
        (state("training", 3), 3, 4, {"resting": True}, ("trainer", "training, step 4")),
        (None, 0, 0, {"newest": None}, ("trainer", "starting")),
        (state("loading", 0), 0, 0, {"newest": None}, ("trainer", "loading, step 0")),
        (state(IDLE, 0), 0, 0, {"newest": None}, ("orchestrator", "the first weights of the trainer")),
        (state(IDLE, 0), 0, 0, {"version": None}, ("inference", "weights of version 4")),
        (state(IDLE, 4), 4, 4, {"evaluates": True}, ("orchestrator", "evaluation of version 4")),
        (state(IDLE, 4), 4, 4, {"evaluates": True, "version": None, "replay": "d"}, ("orchestrator", "evaluation")),
        (state(IDLE, 10), 10, 10, {}, ("trainer", "last checkpoint")),
    ],
)
def test_next_step_names_awaited_role_and_phase(
    trainer: TrainerState | None, step: int, made: int, more: dict[str, Any], expected: tuple[str, str]
) -> None:
    found = standing(trainer, step=step, made=made, **more)._waiting_reason()
    assert (found.role, found.phase) == expected


def test_sft_waits_for_data_while_trainer_is_idle() -> None:
    pipeline = object.__new__(DataPipeline)
    pipeline._trained, pipeline._made, pipeline._last_step, pipeline._since = 3, 4, None, Since()
    for phase, expected in ((IDLE, ("orchestrator", "data for step 5")), ("training", ("trainer", "training, step 4"))):
        pipeline.trainer = SimpleNamespace(state=state(phase, 3))  # type: ignore[assignment]
        found = pipeline._waiting_reason()
        assert (found.role, found.phase) == expected


@pytest.mark.parametrize(
    ("role", "phase", "expected"),
    [
        ("orchestrator", "rollouts for step 5", "the next step waits for rollouts for step 5"),
        ("trainer", "training, step 4", "the next step waits for the trainer (training, step 4)"),
        (None, None, "the next step waits"),
    ],
)
def test_why_names_awaited_phase(role: str | None, phase: str | None, expected: str) -> None:
    run = Snapshot(
        place="folder", name="a", where="runs/a", task="RL", phase="Running", reason=None, message=None, attempt=1,
        restarts=0, restarts_counted=0, max_restarts=None, progress=Progress(), wait=Wait("x", role, phase),
    )  # fmt: skip
    assert [one.what for one in explain_run(run, 1.7e9).now] == [expected]
