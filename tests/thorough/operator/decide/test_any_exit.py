"""Exits of a role with any code at any time: the run reacts and reports the code."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.operator.decide.kube import Kube

SPEC = {"trainer": {"replicas": 2}, "inference": {"replicas": 1}}
REASONS = {1: "ExitCode", 11: "ExitCode", 137: "Killed", 139: "Killed", 143: "Killed", 255: "ExitCode"}
ROLES = ("trainer", "orchestrator")


def alone(role: str) -> Kube:
    """Return a cluster in which this role has started and no other pod has a node."""
    kube = Kube(SPEC)
    kube.place = lambda pod: "node-1" if pod["metadata"]["labels"]["rlrun.io/role"] == role else None
    kube.settle()
    kube.tick()
    return kube


def unrecorded(role: str) -> Kube:
    """Return a cluster in which all roles have started before the attempt is recorded."""
    kube = Kube(SPEC)
    kube.do(kube.decide())
    while kube.controllers():
        pass
    assert kube.status.get("launchedAttempt", 0) == 0
    return kube


def ready(role: str) -> Kube:
    """Return a cluster before the first step."""
    kube = Kube(SPEC)
    kube.settle()
    kube.tick()
    assert kube.status["phase"] == "Starting"
    return kube


def training(role: str) -> Kube:
    return Kube(SPEC).start(step=7)


@pytest.mark.parametrize("moment", [alone, unrecorded, ready, training])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("code", REASONS)
def test_exit_of_any_code_restarts_the_run(code: int, role: str, moment: Callable[[str], Kube]) -> None:
    kube = moment(role)
    kube.exit(role, code)
    kube.place = lambda pod: "node-1"
    for _ in range(4):
        kube.tick()
    failure = kube.status["lastFailure"]
    taken = (
        code == 11 and role == "orchestrator"
    )  # a guest's orchestrator ends with it when the host's trainer drops the guest
    assert failure["reason"] == ("AttemptNumberTaken" if taken else REASONS[code])
    assert (failure["role"], failure["exitCode"], failure["attempt"]) == (role, code, 1)
    assert (kube.status["attempt"], kube.status["restarts"]) == (2, 1)
    assert kube.status["restartsCountedTowardsMax"] == (0 if taken else 1)
    assert kube.attempts_of_trainers() == {"2"}


@pytest.mark.parametrize("role", ROLES)
def test_unrecorded_exit_is_judged_in_a_later_pass(role: str) -> None:
    """No further event of that pod arrives, so the pass that records the attempt must request another one."""
    kube = unrecorded(role)
    kube.now += 60  # without an operator meanwhile, its grace period has passed
    kube.exit(role, 255)
    decision = kube.decide()
    assert (decision.status["launchedAttempt"], "lastFailure" in decision.status) == (1, False)
    assert decision.wake_in is not None
    kube.do(decision)
    kube.do(kube.decide())
    assert kube.status["lastFailure"]["exitCode"] == 255


@pytest.mark.parametrize("moment", [ready, training])
@pytest.mark.parametrize("code", REASONS)
def test_engine_exit_is_reported_without_ending_the_attempt(code: int, moment: Callable[[str], Kube]) -> None:
    kube = moment("inference")
    kube.exit("inference", code)
    for _ in range(4):
        kube.tick()
    told = kube.condition("InferenceAvailable")
    assert (told["status"], told["reason"]) == ("False", "ContainerFailing")
    assert f"exit code {code}" in told["message"]
    assert kube.status["attempt"] == 1


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("moment", [alone, ready, training])
def test_restarted_node_is_not_a_run_failure(role: str, moment: Callable[[str], Kube]) -> None:
    """The kubelet reports containers that it does not know with code 255 and reason Unknown."""
    kube = moment(role)
    kube.exit(role, 255, reason="Unknown")
    kube.place = lambda pod: "node-1"
    for _ in range(4):
        kube.tick()
    assert (kube.status["attempt"], kube.status["restartsCountedTowardsMax"]) == (2, 0)
    assert kube.status["lastFailure"]["reason"] == "NodeLost"
