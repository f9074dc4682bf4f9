"""Phases of a restart: their recording, durations and budgets."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rlrun.api.run_status import COUNT_MAX, RestartStatus
from rlrun.protocol.messages.lease_annotations import RESTART_PHASES, start_text
from rlrun_operator.status.run_progress import BUDGETS, Look, restart_after
from rlrun_operator.times import format_rfc3339
from tests.unit.operator.decide.kube import Kube

NOW = 1_700_000_000.0
FAILED = Look(
    was_restarting=False, restarting=True, ending=True, attempt=1, scheduled=False, running=False, trained=False,
    over=False, start={},
)  # fmt: skip
GONE = replace(FAILED, was_restarting=True, ending=False)
BEGUN = replace(GONE, restarting=False, was_restarting=False, attempt=2)
PLACED = replace(BEGUN, scheduled=True)
UP = replace(PLACED, running=True)
TRAINED = replace(UP, trained=True, start={"imports": 9.6, "model": 20.0, "batch": 5.0, "step": 2.4})
SPEC = {"trainer": {"replicas": 2}, "inference": {"replicas": 1}}


def walk_looks(*looks: tuple[float, Look]) -> RestartStatus | None:
    past: RestartStatus | None = None
    for seconds, look in looks:
        past = restart_after(past, look, NOW + seconds)
    return past


def test_restart_phases_add_up_to_the_total() -> None:
    whole = walk_looks((0, FAILED), (12, GONE), (22, BEGUN), (25, PLACED), (65, UP), (110, TRAINED))
    assert whole is not None
    assert whole.seconds == {
        "ending": 12, "waiting": 10, "scheduling": 3, "containers": 40, "imports": 10, "model": 20, "batch": 5,
        "step": 2, "other": 8,
    }  # fmt: skip
    assert (whole.since, whole.attempt, whole.total_seconds, whole.slow) == (format_rfc3339(NOW), 2, 110, None)
    assert list(whole.seconds) == [name for name in RESTART_PHASES if name in whole.seconds]


def test_restart_phases_between_two_looks_have_no_duration() -> None:
    """An absent operator sees all phases at once, and a trainer of another release measures none."""
    whole = walk_looks((0, FAILED), (100, replace(TRAINED, start={})))
    assert whole is not None
    assert whole.seconds == {"ending": 100, "waiting": 0, "scheduling": 0, "containers": 0, "other": 0}
    assert whole.total_seconds == 100


def test_clock_set_back_makes_no_phase_negative() -> None:
    whole = walk_looks((0, FAILED), (12, GONE), (-3000, BEGUN), (-2990, PLACED), (-2980, UP), (-2950, TRAINED))
    assert whole is not None
    assert whole.seconds["ending"] == whole.total_seconds == 12
    assert set(whole.seconds.values()) == {0, 12}


def test_trainer_phases_never_exceed_the_elapsed_time() -> None:
    whole = walk_looks((0, FAILED), (5, UP), (30, replace(TRAINED, start={"imports": 1e6, "model": 4.0})))
    assert whole is not None
    assert (whole.seconds["imports"], whole.seconds["model"], whole.total_seconds) == (25, 0, 30)


@pytest.mark.parametrize("look", [replace(UP, over=True), replace(GONE, over=True)])
def test_finished_run_leaves_no_open_restart_record(look: Look) -> None:
    assert walk_looks((0, FAILED), (5, look)) is None


def test_complete_restart_record_stays_until_next_restart() -> None:
    past = walk_looks((0, FAILED), (5, UP), (30, TRAINED))
    assert restart_after(past, replace(UP, over=True), NOW + 99) is past
    again = restart_after(past, replace(FAILED, attempt=2), NOW + 100)
    assert again is not None
    assert (again.since, again.seconds, again.total_seconds) == (format_rfc3339(NOW + 100), {}, None)


def test_failure_before_first_step_resets_the_record() -> None:
    again = walk_looks((0, FAILED), (5, UP), (30, FAILED), (31, GONE))
    assert again is not None
    assert (again.since, again.seconds, again.attempt) == (format_rfc3339(NOW + 30), {"ending": 1}, None)


def test_phase_over_budget_is_reported_with_its_usual_cause() -> None:
    present = walk_looks((0, FAILED), (1, BEGUN), (2, PLACED), (400, PLACED))
    assert present is not None
    assert present.slow is not None
    assert present.slow.startswith("containers takes more than 300 s: images that the nodes did not have")
    assert restart_after(present, PLACED, NOW + 500) == present  # the record does not change in every look
    whole = restart_after(restart_after(present, UP, NOW + 402), TRAINED, NOW + 450)
    assert whole is not None
    assert whole.slow is not None
    assert whole.slow.startswith("containers took 400 s of 300 s: images")


def test_malformed_restart_record_is_tolerated() -> None:
    hostile = RestartStatus(since="soon", seconds={"mine": 5, "ending": COUNT_MAX, "waiting": COUNT_MAX})
    whole = restart_after(hostile, TRAINED, NOW)
    assert whole is not None
    assert "mine" not in whole.seconds
    assert whole.total_seconds == COUNT_MAX
    RestartStatus.model_validate(whole.model_dump())


def test_restart_phases_appear_in_the_status() -> None:
    kube = Kube(SPEC).start(step=7)
    assert "lastRestart" not in kube.status
    kube.exit("trainer", 1)
    kube.lingering = {"trainer"}
    kube.tick()
    kube.tick(20)
    assert kube.status["lastRestart"] == {"since": format_rfc3339(kube.now - 20), "seconds": {}}
    kube.lingering, kube.schedule = set(), False
    kube.tick(2)
    assert kube.status["lastRestart"]["seconds"] == {"ending": 22, "waiting": 0}
    assert kube.status["lastRestart"]["attempt"] == 2
    kube.schedule, kube.make_ready = True, False
    kube.tick(3)
    kube.make_ready = True
    kube.tick(40)
    kube.report(4, resumed=4)
    kube.tick(10)
    assert kube.status["lastRestart"]["seconds"] == {"ending": 22, "waiting": 0, "scheduling": 3, "containers": 40}
    kube.report(5, resumed=4, start_seconds=start_text({"imports": 10.0, "checkpoint": 4.0, "step": 1.0}))
    kube.tick(10)
    whole = kube.status["lastRestart"]
    assert whole["seconds"] == {
        "ending": 22, "waiting": 0, "scheduling": 3, "containers": 40, "imports": 10, "checkpoint": 4, "step": 1,
        "other": 5,
    }  # fmt: skip
    assert whole["totalSeconds"] == 85
    kube.report(6, resumed=4)
    kube.tick(20)
    assert kube.status["lastRestart"] == whole


def test_suspension_is_not_a_restart() -> None:
    kube = Kube(SPEC).start(step=7)
    kube.edit(suspend=True)
    kube.tick()
    kube.tick(30)
    assert kube.status["phase"] == "Suspended"
    kube.edit(suspend=False)
    kube.tick()
    kube.report(8, resumed=7)
    kube.tick()
    assert "lastRestart" not in kube.status


def test_failures_page_lists_phases_and_budgets_in_order() -> None:
    page = (Path(__file__).parents[4] / "docs/failures.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .* \| (none|\d+ s) \|$", page, re.MULTILINE)
    assert rows == [(name, f"{BUDGETS[name][0]} s" if name in BUDGETS else "none") for name in RESTART_PHASES]
