"""Whatever code a role ends with, and whenever: the run acts, and says which code it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.operator.decide.kube import Kube

SPEC = {"trainer": {"replicas": 2}, "inference": {"replicas": 1}}
REASONS = {1: "ExitCode", 11: "ExitCode", 137: "Killed", 139: "Killed", 143: "Killed", 255: "ExitCode"}
ROLES = ("trainer", "orchestrator")


def alone(role: str) -> Kube:
    """It has started; no other pod has a node."""
    kube = Kube(SPEC)
    kube.place = lambda pod: "node-1" if pod["metadata"]["labels"]["rlrun.io/role"] == role else None
    kube.settle()
    kube.tick()
    return kube


def unrecorded(role: str) -> Kube:
    """All have started, and the operator has not yet seen that all were made."""
    kube = Kube(SPEC)
    kube.do(kube.decide())
    while kube.controllers():
        pass
    assert kube.status.get("launchedAttempt", 0) == 0
    return kube


def ready(role: str) -> Kube:
    """Before the first step."""
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
def test_no_end_is_overlooked(code: int, role: str, moment: Callable[[str], Kube]) -> None:
    kube = moment(role)
    kube.exit(role, code)
    kube.place = lambda pod: "node-1"
    for _ in range(4):
        kube.tick()
    failure = kube.status["lastFailure"]
    taken = code == 11 and role == "orchestrator"  # what a guest's ends with when its host's trainer has let it go
    assert failure["reason"] == ("AttemptNumberTaken" if taken else REASONS[code])
    assert (failure["role"], failure["exitCode"], failure["attempt"]) == (role, code, 1)
    assert (kube.status["attempt"], kube.status["restarts"]) == (2, 1)
    assert kube.status["restartsCountedTowardsMax"] == (0 if taken else 1)
    assert kube.attempts_of_trainers() == {"2"}


@pytest.mark.parametrize("role", ROLES)
def test_an_end_whose_event_has_come_before_it_could_be_judged_is_looked_at_again(role: str) -> None:
    """Nothing more is ever heard of that pod: the pass that puts the attempt on record has to ask for another one."""
    kube = unrecorded(role)
    kube.now += 60  # no operator was there; by now it has lost patience
    kube.exit(role, 255)
    decision = kube.decide()
    assert (decision.status["launchedAttempt"], "lastFailure" in decision.status) == (1, False)
    assert decision.wake_in is not None
    kube.do(decision)
    kube.do(kube.decide())
    assert kube.status["lastFailure"]["exitCode"] == 255


@pytest.mark.parametrize("moment", [ready, training])
@pytest.mark.parametrize("code", REASONS)
def test_an_engine_that_ends_is_told_of_and_costs_no_attempt(code: int, moment: Callable[[str], Kube]) -> None:
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
def test_a_node_that_was_restarted_is_no_failure_of_the_run(role: str, moment: Callable[[str], Kube]) -> None:
    """The kubelet finds containers that it knows nothing of: 255, Unknown."""
    kube = moment(role)
    kube.exit(role, 255, reason="Unknown")
    kube.place = lambda pod: "node-1"
    for _ in range(4):
        kube.tick()
    assert (kube.status["attempt"], kube.status["restartsCountedTowardsMax"]) == (2, 0)
    assert kube.status["lastFailure"]["reason"] == "NodeLost"
