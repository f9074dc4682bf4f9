"""`rlrun why` explains each broken run with its cause, evidence and fix."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rlrun.inspect.cluster_reader import run_snapshot
from rlrun.inspect.screen import explanation_text, status_screen
from rlrun.inspect.why import explain_run
from rlrun.protocol.messages import lease_annotations as said
from tests.unit.inspect.broken import BROKEN, MINUTE_AGO, NOW, condition, failure, over, restarting, run


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def explain_as_text(found: Any, **parts: Any) -> str:
    return flat(explanation_text(explain_run(run_snapshot(found, now=NOW, **parts), NOW), NOW))


def lease(seconds: float = 5.0, **annotations: str) -> Any:
    renewed = f"2027-01-15T07:59:{60 - seconds:09.6f}Z"
    return {"metadata": {"annotations": {said.ATTEMPT: "1", **annotations}}, "spec": {"renewTime": renewed}}


@pytest.mark.parametrize("name", BROKEN)
def test_why_names_cause_of_broken_run(name: str) -> None:
    found, expected = BROKEN[name]
    text = explain_as_text(found)
    assert [part for part in expected if flat(part) not in text] == []
    shown = flat(status_screen(run_snapshot(found, now=NOW), explain_run(run_snapshot(found, now=NOW), NOW), NOW))
    assert [part for part in expected[:1] if flat(part).split(" (")[0] not in shown] == []
    assert "what to do" in text


def test_why_of_healthy_run_needs_no_action() -> None:
    text = explain_as_text(
        run("Running"), lease=lease(**{said.WAITING_ON: "trainer: training step 8", said.WAITING_ON_ROLE: "trainer"})
    )
    assert "no action is needed" in text
    assert "the next step waits for the trainer" in text
    assert "no action is needed" in explain_as_text(run("Complete", condition("Complete", "True", "Completed")))


def test_long_wait_recommends_logs_of_waiting_role() -> None:
    since = {
        said.WAITING_ON: "rollouts",
        said.WAITING_ON_ROLE: "orchestrator",
        said.WAITING_ON_SINCE: "2027-01-15T07:30:00Z",
    }
    text = explain_as_text(run("Running"), lease=lease(**since))
    assert "(since 30m00s)" in text
    assert "`rlrun logs a -n team --role orchestrator` shows its activity." in text


def test_lease_of_previous_attempt_is_ignored() -> None:
    old = lease(**{said.ATTEMPT: "0", said.WAITING_ON: "something old", said.STEP: "99"})
    seen = run_snapshot(run("Running"), lease=old, now=NOW)
    assert (seen.wait, seen.progress.step) == (None, 7)


def test_why_orders_causes_by_importance_without_duplicates() -> None:
    found = run(
        "Starting",
        condition("PodsReady", "False", "ImagePullFailed", "x"),
        condition("Scheduled", "False", "Unschedulable", "y"),
        condition("InferenceAvailable", "False", "ImagePullFailed", "x"),
        condition("Progressing", "Unknown", "WaitingForFirstStep", "z"),
    )
    causes = explain_run(run_snapshot(found, now=NOW), NOW).now
    assert [one.what.partition(": ")[2] for one in causes] == [
        "ImagePullFailed",
        "Unschedulable",
        "WaitingForFirstStep",
    ]
    assert [one.do for one in causes[:2]] == list(explain_run(run_snapshot(found, now=NOW), NOW).steps())


def test_why_lists_failures_newest_first_with_one_fix() -> None:
    older, newer = (
        failure("OOMKilled", "too much", code=137),
        failure("CudaError", "illegal access", attempt=2),
    )
    explanation = explain_run(run_snapshot(restarting(older, newer), now=NOW), NOW)
    assert [one.what.split(":")[0] for one in explanation.before] == [
        "attempt 2 ended at step 6",
        "attempt 1 ended at step 6",
    ]
    assert not [step for step in explanation.steps() if "microBatchTokens" in step]
    assert "next attempt in 1m00s" in explanation.headline


def test_why_of_failed_run_ignores_waiting_conditions() -> None:
    found = over("PermanentFailure", "exit code 78")
    found["status"]["conditions"] += [condition("Extra", "False", "EngineLoading", "the engines load")]
    assert "EngineLoading" not in explain_as_text(found)


def test_why_shows_warning_events_without_routine_events() -> None:
    event = {
        "reason": "NodeExcluded",
        "message": "node-7 is left out",
        "type": "Warning",
        "count": 2,
        "lastTimestamp": MINUTE_AGO,
    }
    usual = {"reason": "AttemptStarted", "message": "attempt 1", "type": "Normal", "lastTimestamp": MINUTE_AGO}
    text = explain_as_text(run("Running"), events=[event, usual])
    assert "event NodeExcluded (2 times): node-7 is left out" in text
    assert "AttemptStarted" not in text


def test_multiline_message_is_shown_without_escapes() -> None:
    text = explain_as_text(over("PermanentFailure", "first\nsecond", failure("ExitCode", "ValueError: x\n  at y")))
    assert "first second" in text
    assert "ValueError: x at y" in text


def test_invalid_status_fields_are_ignored() -> None:
    found = run("Running")
    found["status"] |= {
        "attempt": "x",
        "progress": ["?"],
        "failures": 7,
        "trainer": None,
        "message": "\x1b[2J",
        "conditions": [3],
    }
    seen = run_snapshot(found, pods=[{"metadata": {"name": "p"}}], now=NOW)
    assert (seen.attempt, seen.progress.total_steps, seen.message) == (0, 100, "\\x1b[2J")
    assert explain_as_text(found)


@pytest.mark.parametrize("nonsense", [5, {"fields": 5}, {}])
def test_why_shows_namespace_defaults_of_attempt(nonsense: Any) -> None:
    found = run("Running")
    found["status"]["defaults"] = {
        "configMap": "sys/team",
        "mark": "0",
        "fields": ["trainer.image", "tracking.mlflow.uri"],
    }
    assert "defaults of the namespace: trainer.image, tracking.mlflow.uri from ConfigMap sys/team" in explain_as_text(
        found
    )
    found["status"]["defaults"] = nonsense
    assert "defaults of the namespace" not in explain_as_text(found)


def test_why_lists_restart_time_longest_first() -> None:
    """A finished run shows no restart time, because no user waits for it."""
    record = {"since": "x", "attempt": 3, "seconds": {"other": 4, "containers": 240, "model": 60, "group": 0}}
    slow = "model took 60 s of 30 s: the volume is slow"
    running = run("Running", lastRestart=record | {"totalSeconds": 304, "slow": slow})
    told = "attempt 3 took 304 s to its first new step: containers 240 s, model 60 s, other 4 s"
    assert f"the last restart: {told}; {slow}" in explain_run(run_snapshot(running, now=NOW), NOW).besides
    assert f"start       {told}\n            {slow}" in status_screen(
        run_snapshot(running, now=NOW), explain_run(run_snapshot(running, now=NOW), NOW), NOW
    )
    assert not explain_run(run_snapshot(run("Failed", lastRestart=record), now=NOW), NOW).besides
    young = run_snapshot(run("Running", lastRestart=record), now=NOW).start
    assert young is not None
    assert young.text.startswith("attempt 3 has no new step yet: containers 240 s")
    assert run_snapshot(run("Running", lastRestart={"seconds": [], "totalSeconds": {}}), now=NOW).start is None
