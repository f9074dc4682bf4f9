"""The failure policy: whose rule decides, what counts, and how long the next attempt waits."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from rlrun.api.lifecycle import FailurePolicySpec, FailureReason
from rlrun_operator.failures.detect import Cause, Kind
from rlrun_operator.failures.failure_policy import Budget, apply_policy
from rlrun_operator.status import failure_reasons
from tests.unit.operator.decide.kube import Kube

SPEC: dict[str, Any] = {"trainer": {"replicas": 2}, "inference": {"replicas": 1}, "maxSteps": 1000}
OWN_DOING = {
    "ClaimDeleted",
    "Drifted",
    "KeyLost",
    "AttemptNumberTaken",
    "SpecChanged",
    "HostRestarted",
    "HostSuspended",
    "HostGone",
    "NodeAllowedAgain",
    "ExcludedNodeNeeded",
}


def cause(reason: str, code: int | None = None, kind: Kind = "failure", role: Any = "trainer") -> Cause:
    return Cause(kind, 0.0, role, "pod", "node", code, reason, "it said so")


EVERY = ["trainer", "inference", "orchestrator"]


def rule(name: str, action: str, **fits: Any) -> dict[str, Any]:
    return {"name": name, "action": action, **fits}


FAIL, RESTART, FREE = "FailRun", "Restart", "RestartUncounted"


@pytest.mark.parametrize(
    ("rules", "happened", "decided", "fails", "counted"),
    [
        # the built-in rules
        ([], cause("ExitCode", 1), None, None, True),
        ([], cause("ConfigurationError", 78, "permanent"), None, "PermanentFailure", False),
        ([], cause("PodEvicted", 143, "disruption"), None, None, False),
        ([], cause("StorageError", 10), None, None, False),
        ([rule("r", RESTART, onReasons=["StorageError"])], cause("StorageError", 10), "r", None, True),
        # a rule comes before them
        ([rule("r", FREE, onExitCodes=[75])], cause("PermanentError", 75, "permanent"), "r", None, False),
        ([rule("r", RESTART, onExitCodes=[75])], cause("PermanentError", 75, "permanent"), "r", None, True),
        ([rule("r", FAIL, onReasons=["PodEvicted"])], cause("PodEvicted", None, "disruption"), "r", "FailedByRule", False),
        ([rule("r", RESTART, onReasons=["NodeLost"])], cause("NodeLost", None, "disruption"), "r", None, True),
        ([rule("r", FAIL, onReasons=["CudaOutOfMemory"])], cause("CudaOutOfMemory", 1), "r", "FailedByRule", False),
        ([rule("r", FREE, onExitCodes=[1])], cause("ExitCode", 1, role="orchestrator"), "r", None, False),
        # the first that fits decides
        ([rule("a", FREE, onExitCodes=[1]), rule("b", FAIL, onExitCodes=[1])], cause("ExitCode", 1), "a", None, False),
        ([rule("a", FREE, onExitCodes=[2]), rule("b", FAIL, onExitCodes=[1])], cause("ExitCode", 1), "b", "FailedByRule", False),
        # all parts have to fit
        ([rule("r", FAIL, onExitCodes=[1], roles=["orchestrator"])], cause("ExitCode", 1), None, None, True),
        ([rule("r", FAIL, onExitCodes=[1], roles=["orchestrator"])], cause("ExitCode", 1, role="orchestrator"), "r", "FailedByRule", False),
        ([rule("r", FAIL, onExitCodes=[9], onReasons=["ExitCode"])], cause("ExitCode", 1), None, None, True),
        # an exit code says nothing of why a pod was stopped, unless the rule names that too
        ([rule("r", FAIL, onExitCodes=[137])], cause("PodEvicted", 137, "disruption"), None, None, False),
        ([rule("r", FAIL, onExitCodes=[137], onReasons=["PodEvicted"])], cause("PodEvicted", 137, "disruption"), "r", "FailedByRule", False),  # noqa: E501
        # a rule without codes and reasons is of what would count
        ([rule("r", FAIL, roles=["trainer"])], cause("ExitCode", 1), "r", "FailedByRule", False),
        ([rule("r", FREE, roles=EVERY)], cause("Killed", 137, role="orchestrator"), "r", None, False),
        ([rule("r", FAIL, roles=EVERY)], cause("PodDeleted", None, "disruption"), None, None, False),
        ([rule("r", FREE, roles=EVERY)], cause("DataError", 65, "permanent"), None, "PermanentFailure", False),
        # what the operator does itself is not judged by rules
        ([rule("r", FAIL, onExitCodes=[11])], cause("AttemptNumberTaken", 11, "taken"), None, None, False),
    ],
)  # fmt: skip
def test_the_first_rule_that_fits_decides(
    rules: list[Any], happened: Cause, decided: str | None, fails: str | None, counted: bool
) -> None:
    policy = FailurePolicySpec.model_validate({"rules": rules})
    found = apply_policy(happened, budget=Budget(), policy=policy, random=0.5)
    assert (found.fails[0] if found.fails else None, found.counted) == (fails, counted)
    assert (found.rule is None) == (decided is None)
    if decided is not None:
        assert repr(decided) in (found.rule or "")
        assert found.fails is None or repr(decided) in found.fails[1]


@pytest.mark.parametrize(
    ("rules", "kind", "counted", "in_a_row", "waits"),
    [
        ([], "failure", 0, 5, 0),
        ([], "failure", 2, 0, 20),
        ([], "disruption", 3, 0, 0),
        ([], "disruption", 0, 2, 0),
        ([], "disruption", 0, 3, 10),
        ([], "disruption", 0, 5, 40),
        ([], "disruption", 0, 500, 300),
        ([rule("r", FREE, onReasons=["ExitCode"])], "failure", 3, 0, 0),
        ([rule("r", FREE, onReasons=["ExitCode"])], "failure", 3, 1, 10),
        ([rule("r", FREE, onReasons=["ExitCode"])], "failure", 3, 3, 40),
    ],
)
def test_nothing_restarts_hot(rules: list[Any], kind: Kind, counted: int, in_a_row: int, waits: float) -> None:
    policy = FailurePolicySpec.model_validate({"rules": rules, "maxRestarts": 5})
    found = apply_policy(cause("ExitCode", 1, kind), budget=Budget(counted, in_a_row), policy=policy, random=0.5)
    assert found.wait_seconds == pytest.approx(waits)


def fail_at(kube: Kube, step: int, code: int = 1) -> None:
    """Train up to `step`, fail, and begin the next attempt."""
    kube.report(step, resumed=0)
    kube.tick()
    kube.exit("trainer", code, message="boom")
    kube.tick()
    kube.tick(700)


def counters(kube: Kube) -> tuple[int, int, int]:
    return tuple(kube.status[n] for n in ("restarts", "restartsCountedTowardsMax", "restartsWithoutStep"))  # type: ignore[return-value]


def test_new_steps_give_the_budget_back_and_steps_trained_again_do_not() -> None:
    kube = Kube(SPEC | {"failurePolicy": {"maxRestarts": 2, "resetAfterSteps": 10}}).start()
    fail_at(kube, 30)
    assert counters(kube) == (1, 1, 1)
    fail_at(kube, 29)  # from a checkpoint: all of these were trained before
    assert counters(kube) == (2, 2, 2)
    kube.report(39, resumed=20)
    kube.tick()
    assert counters(kube) == (2, 2, 0), "nine new ones"
    kube.report(40, resumed=20)
    kube.tick()
    assert counters(kube) == (2, 0, 0)
    assert kube.status["progress"]["furthestStep"] == 40
    fail_at(kube, 41)
    assert counters(kube) == (3, 1, 1)
    assert (kube.status["phase"], kube.status["countedAtStep"]) == ("Starting", 41)


def test_the_budget_is_never_given_back_unless_asked_for() -> None:
    kube = Kube(SPEC | {"failurePolicy": {"maxRestarts": 1}}).start()
    fail_at(kube, 30)
    fail_at(kube, 900)
    assert (kube.status["phase"], kube.condition("Failed")["reason"]) == ("Failed", "MaxRestartsExceeded")


def test_a_disruption_between_two_failures_does_not_move_the_point_that_steps_are_counted_from() -> None:
    kube = Kube(SPEC | {"failurePolicy": {"maxRestarts": 1, "resetAfterSteps": 10}}).start()
    fail_at(kube, 30)
    kube.report(36, resumed=20)
    kube.tick()
    kube.delete(kube.ref("trainer"))
    kube.tick()
    kube.tick()
    fail_at(kube, 41)
    assert counters(kube) == (3, 1, 1)


def test_a_storm_of_disruptions_waits_after_the_third_and_a_new_step_ends_it() -> None:
    kube = Kube(SPEC | {"failurePolicy": {"maxRestarts": 0}}).start()
    waits = []
    for _ in range(5):
        kube.delete(kube.ref("trainer"))
        kube.do(kube.decide())
        waits.append(bool(kube.status.get("nextRetryTime")))
        kube.tick(30)
        kube.tick(30)
        kube.report(2, resumed=1)
        kube.tick()
    assert waits == [False, False, False, True, True]
    assert (kube.status["restartsCountedTowardsMax"], kube.status["restarts"]) == (0, 5)
    kube.report(4, resumed=1)
    kube.tick()
    kube.delete(kube.ref("trainer"))
    kube.do(kube.decide())
    assert "nextRetryTime" not in kube.status


@pytest.mark.parametrize("action", ["FailRun", "RestartUncounted"])
def test_the_rule_that_decided_is_named(action: str) -> None:
    rules = [rule("a-flaky-mount", action, onExitCodes=[75])]
    kube = Kube(SPEC | {"failurePolicy": {"rules": rules}}).start()
    kube.exit("trainer", 75, message="mount went away")
    kube.do(kube.decide())
    assert (kube.status["phase"] == "Failed") == (action == "FailRun")
    named = f"rule 'a-flaky-mount' of failurePolicy.rules ({action})"
    assert kube.status["lastFailure"]["message"] == f"{named}: mount went away"
    assert named in kube.messages[-1]
    assert not kube.status["lastFailure"]["counted"]


def test_rules_may_be_edited_while_the_run_lives() -> None:
    kube = Kube(SPEC).start()
    kube.edit(
        failurePolicy={"rules": [rule("never", "FailRun", onReasons=["Killed"])]},
        nodeLoss={"forceDeleteSeconds": 7},
    )
    kube.tick()
    assert (kube.condition("ConfigurationValid")["reason"], kube.status["phase"]) == ("Valid", "Running")
    kube.exit("trainer", 137)
    kube.tick()
    assert kube.condition("Failed")["reason"] == "FailedByRule"


def test_a_rule_may_name_every_reason_of_a_failure_but_the_operators_own_doing() -> None:
    assert set(get_args(FailureReason)) == set(failure_reasons.FAILURE_REASONS) - OWN_DOING


def test_a_volume_that_refuses_is_asked_again_ever_later_and_costs_no_budget() -> None:
    policy = FailurePolicySpec.model_validate({"maxRestarts": 0, "backoff": {"initialSeconds": 10, "maxSeconds": 40}})
    waits = [
        apply_policy(cause("StorageError", 10), budget=Budget(without_step=n), policy=policy, random=0.5)
        for n in range(5)
    ]
    assert [(w.fails, w.wait_seconds) for w in waits] == [(None, seconds) for seconds in (0, 10, 20, 40, 40)]
