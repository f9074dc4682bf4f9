"""Failure policy: rule order, counting and backoff."""

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


def make_cause(reason: str, code: int | None = None, kind: Kind = "failure", role: Any = "trainer") -> Cause:
    return Cause(kind, 0.0, role, "pod", "node", code, reason, "it said so")


EVERY = ["trainer", "inference", "orchestrator"]


def make_rule(name: str, action: str, **fits: Any) -> dict[str, Any]:
    return {"name": name, "action": action, **fits}


FAIL, RESTART, FREE = "FailRun", "Restart", "RestartUncounted"


@pytest.mark.parametrize(
    ("rules", "happened", "decided", "fails", "counted"),
    [
        # built-in rules
        ([], make_cause("ExitCode", 1), None, None, True),
        ([], make_cause("ConfigurationError", 78, "permanent"), None, "PermanentFailure", False),
        ([], make_cause("PodEvicted", 143, "disruption"), None, None, False),
        ([], make_cause("StorageError", 10), None, None, False),
        ([make_rule("r", RESTART, onReasons=["StorageError"])], make_cause("StorageError", 10), "r", None, True),
        # a user rule takes precedence
        ([make_rule("r", FREE, onExitCodes=[75])], make_cause("PermanentError", 75, "permanent"), "r", None, False),
        ([make_rule("r", RESTART, onExitCodes=[75])], make_cause("PermanentError", 75, "permanent"), "r", None, True),
        ([make_rule("r", FAIL, onReasons=["PodEvicted"])], make_cause("PodEvicted", None, "disruption"), "r", "FailedByRule", False),
        ([make_rule("r", RESTART, onReasons=["NodeLost"])], make_cause("NodeLost", None, "disruption"), "r", None, True),
        ([make_rule("r", FAIL, onReasons=["CudaOutOfMemory"])], make_cause("CudaOutOfMemory", 1), "r", "FailedByRule", False),
        ([make_rule("r", FREE, onExitCodes=[1])], make_cause("ExitCode", 1, role="orchestrator"), "r", None, False),
        # the first match decides
        ([make_rule("a", FREE, onExitCodes=[1]), make_rule("b", FAIL, onExitCodes=[1])], make_cause("ExitCode", 1), "a", None, False),
        ([make_rule("a", FREE, onExitCodes=[2]), make_rule("b", FAIL, onExitCodes=[1])],
         make_cause("ExitCode", 1), "b", "FailedByRule", False),
        # all parts must match
        ([make_rule("r", FAIL, onExitCodes=[1], roles=["orchestrator"])], make_cause("ExitCode", 1), None, None, True),
        ([make_rule("r", FAIL, onExitCodes=[1], roles=["orchestrator"])],
         make_cause("ExitCode", 1, role="orchestrator"), "r", "FailedByRule", False),
        ([make_rule("r", FAIL, onExitCodes=[9], onReasons=["ExitCode"])], make_cause("ExitCode", 1), None, None, True),
        # an exit code does not explain why a pod was stopped, unless the rule contains the reason as well
        ([make_rule("r", FAIL, onExitCodes=[137])], make_cause("PodEvicted", 137, "disruption"), None, None, False),
        ([make_rule("r", FAIL, onExitCodes=[137], onReasons=["PodEvicted"])], make_cause("PodEvicted", 137, "disruption"), "r", "FailedByRule", False),  # noqa: E501
        # a rule without codes and reasons matches counted failures
        ([make_rule("r", FAIL, roles=["trainer"])], make_cause("ExitCode", 1), "r", "FailedByRule", False),
        ([make_rule("r", FREE, roles=EVERY)], make_cause("Killed", 137, role="orchestrator"), "r", None, False),
        ([make_rule("r", FAIL, roles=EVERY)], make_cause("PodDeleted", None, "disruption"), None, None, False),
        ([make_rule("r", FREE, roles=EVERY)], make_cause("DataError", 65, "permanent"), None, "PermanentFailure", False),
        # rules do not apply to actions of the operator
        ([make_rule("r", FAIL, onExitCodes=[11])], make_cause("AttemptNumberTaken", 11, "taken"), None, None, False),
    ],
)  # fmt: skip
def test_first_matching_rule_decides(
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
        ([make_rule("r", FREE, onReasons=["ExitCode"])], "failure", 3, 0, 0),
        ([make_rule("r", FREE, onReasons=["ExitCode"])], "failure", 3, 1, 10),
        ([make_rule("r", FREE, onReasons=["ExitCode"])], "failure", 3, 3, 40),
    ],
)
def test_restarts_have_growing_delays(rules: list[Any], kind: Kind, counted: int, in_a_row: int, waits: float) -> None:
    policy = FailurePolicySpec.model_validate({"rules": rules, "maxRestarts": 5})
    found = apply_policy(make_cause("ExitCode", 1, kind), budget=Budget(counted, in_a_row), policy=policy, random=0.5)
    assert found.wait_seconds == pytest.approx(waits)


def fail_at(kube: Kube, step: int, code: int = 1) -> None:
    """Train up to `step`, fail and start the next attempt."""
    kube.report(step, resumed=0)
    kube.tick()
    kube.exit("trainer", code, message="boom")
    kube.tick()
    kube.tick(700)


def read_counters(kube: Kube) -> tuple[int, int, int]:
    return tuple(kube.status[n] for n in ("restarts", "restartsCountedTowardsMax", "restartsWithoutStep"))  # type: ignore[return-value]


def test_only_new_steps_reset_the_restart_budget() -> None:
    kube = Kube(SPEC | {"failurePolicy": {"maxRestarts": 2, "resetAfterSteps": 10}}).start()
    fail_at(kube, 30)
    assert read_counters(kube) == (1, 1, 1)
    fail_at(kube, 29)  # from a checkpoint: all of these steps were trained before
    assert read_counters(kube) == (2, 2, 2)
    kube.report(39, resumed=20)
    kube.tick()
    assert read_counters(kube) == (2, 2, 0), "nine new ones"
    kube.report(40, resumed=20)
    kube.tick()
    assert read_counters(kube) == (2, 0, 0)
    assert kube.status["progress"]["furthestStep"] == 40
    fail_at(kube, 41)
    assert read_counters(kube) == (3, 1, 1)
    assert (kube.status["phase"], kube.status["countedAtStep"]) == ("Starting", 41)


def test_restart_budget_is_not_reset_by_default() -> None:
    kube = Kube(SPEC | {"failurePolicy": {"maxRestarts": 1}}).start()
    fail_at(kube, 30)
    fail_at(kube, 900)
    assert (kube.status["phase"], kube.condition("Failed")["reason"]) == ("Failed", "MaxRestartsExceeded")


def test_disruption_does_not_move_the_start_of_counting() -> None:
    kube = Kube(SPEC | {"failurePolicy": {"maxRestarts": 1, "resetAfterSteps": 10}}).start()
    fail_at(kube, 30)
    kube.report(36, resumed=20)
    kube.tick()
    kube.delete(kube.ref("trainer"))
    kube.tick()
    kube.tick()
    fail_at(kube, 41)
    assert read_counters(kube) == (3, 1, 1)


def test_repeated_disruptions_back_off_until_a_new_step() -> None:
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
def test_matching_rule_is_named_in_the_failure(action: str) -> None:
    rules = [make_rule("a-flaky-mount", action, onExitCodes=[75])]
    kube = Kube(SPEC | {"failurePolicy": {"rules": rules}}).start()
    kube.exit("trainer", 75, message="mount went away")
    kube.do(kube.decide())
    assert (kube.status["phase"] == "Failed") == (action == "FailRun")
    named = f"rule 'a-flaky-mount' of failurePolicy.rules ({action})"
    assert kube.status["lastFailure"]["message"] == f"{named}: mount went away"
    assert named in kube.messages[-1]
    assert not kube.status["lastFailure"]["counted"]


def test_rules_are_editable_during_a_run() -> None:
    kube = Kube(SPEC).start()
    kube.edit(
        failurePolicy={"rules": [make_rule("never", "FailRun", onReasons=["Killed"])]},
        nodeLoss={"forceDeleteSeconds": 7},
    )
    kube.tick()
    assert (kube.condition("ConfigurationValid")["reason"], kube.status["phase"]) == ("Valid", "Running")
    kube.exit("trainer", 137)
    kube.tick()
    assert kube.condition("Failed")["reason"] == "FailedByRule"


def test_rules_may_contain_every_external_failure_reason() -> None:
    assert set(get_args(FailureReason)) == set(failure_reasons.FAILURE_REASONS) - OWN_DOING


def test_storage_error_backs_off_without_using_the_budget() -> None:
    policy = FailurePolicySpec.model_validate({"maxRestarts": 0, "backoff": {"initialSeconds": 10, "maxSeconds": 40}})
    waits = [
        apply_policy(make_cause("StorageError", 10), budget=Budget(without_step=n), policy=policy, random=0.5)
        for n in range(5)
    ]
    assert [(w.fails, w.wait_seconds) for w in waits] == [(None, seconds) for seconds in (0, 10, 20, 40, 40)]
