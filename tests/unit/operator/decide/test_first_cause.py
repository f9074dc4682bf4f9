"""Cause of an attempt's end if several pods ended, and attempt numbers already used on the volume."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlrun_operator.failures.detect import next_number
from tests.unit.operator.decide.kube import Kube

SPEC = {"trainer": {"replicas": 2}, "inference": {"replicas": 1}}


def exits_in_order(
    first: tuple[str, int, int], then: tuple[str, int, int], apart: float, said: str = ""
) -> Callable[[Kube], None]:
    def happens(kube: Kube) -> None:
        kube.exit(first[0], first[2], first[1])
        kube.now += apart
        kube.exit(then[0], then[2], then[1], said)

    return happens


@pytest.mark.parametrize(
    ("happens", "pod", "reason"),
    [
        (exits_in_order(("trainer", 1, 1), ("trainer", 0, 137), 2), "run-trainer-1", "ExitCode"),
        (exits_in_order(("trainer", 0, 1), ("trainer", 1, 137), 0), "run-trainer-1", "Killed"),
        (exits_in_order(("trainer", 1, 1), ("orchestrator", 0, 1), 0), "run-trainer-1", "ExitCode"),
        (exits_in_order(("orchestrator", 0, 1), ("trainer", 0, 1), 3), "run-orchestrator-1", "ExitCode"),
        (
            exits_in_order(("trainer", 1, 1), ("trainer", 0, 11), 0, "the next is 7"),
            "run-trainer-0",
            "AttemptNumberTaken",
        ),
        (lambda k: (k.exit("trainer", 1, 0, "NcclError: x"), k.exit("trainer", 1, 1)), "run-trainer-1", "ExitCode"),
        (lambda k: (k.exit("trainer", 1, 0), k.exit("trainer", 1, 1, "CudaError: x")), "run-trainer-1", "CudaError"),
    ],
)
def test_first_cause_is_recorded(happens: Callable[[Kube], None], pod: str, reason: str) -> None:
    kube = Kube(SPEC).start()
    happens(kube)
    kube.do(kube.decide())
    assert (kube.status["lastFailure"]["podName"], kube.status["lastFailure"]["reason"]) == (pod, reason)


@pytest.mark.parametrize(
    ("code", "kubernetes", "message", "reason", "told"),
    [
        (1, "", "CudaOutOfMemory: ended with exit code 1: CUDA out of memory", "CudaOutOfMemory", "ended with exit code 1"),
        (134, "", "NcclError: was ended by SIGABRT: timeout", "NcclError", "was ended by SIGABRT"),
        (135, "", "StorageError: was ended by SIGBUS: full", "StorageError", "was ended by SIGBUS"),
        (137, "OOMKilled", "CudaError: x", "OOMKilled", "the container was killed"),
        (1, "", "ended with exit code 1; CudaError: x", "ExitCode", "ended with exit code 1; CudaError"),
        (78, "", "CudaError: x", "ConfigurationError", "x"),
    ],
)  # fmt: skip
def test_failure_reason_is_the_prefix_of_the_message(
    code: int, kubernetes: str, message: str, reason: str, told: str
) -> None:
    kube = Kube(SPEC).start()
    kube.exit("trainer", code, message=message, reason=kubernetes)
    kube.do(kube.decide())
    failure = kube.status["lastFailure"]
    assert (failure["reason"], failure["message"].startswith(told)) == (reason, True)


def test_crash_is_the_cause_only_before_the_deletion() -> None:
    crashed = Kube(SPEC).start()
    crashed.exit("trainer", 1)
    crashed.now += 5
    crashed.delete(crashed.ref("trainer"))
    crashed.do(crashed.decide())
    assert crashed.status["lastFailure"]["counted"]
    deleted = Kube(SPEC).start()
    deleted.delete(deleted.ref("trainer"))
    deleted.now += 5
    deleted.exit("trainer", 143)
    deleted.do(deleted.decide())
    assert not deleted.status["lastFailure"]["counted"]


def test_engine_exit_before_the_attempt_is_not_the_cause_of_a_lost_orchestrator() -> None:
    kube = Kube(SPEC).start()
    kube.exit("trainer", 1)
    kube.now += 2
    kube.exit("inference", 78)
    kube.now += 30
    kube.settle()
    kube.start(step=45, resumed=40)
    assert kube.status["attempt"] == 2
    del kube.objects[kube.ref("orchestrator")]
    kube.now += 5
    kube.do(kube.decide())
    failure = kube.status["lastFailure"]
    assert (failure["attempt"], failure["reason"], failure["counted"]) == (2, "PodDeleted", False)
    assert kube.status["phase"] != "Failed"


def test_attempt_number_used_on_the_volume_is_skipped() -> None:
    kube = Kube(SPEC | {"failurePolicy": {"maxRestarts": 0}})
    kube.settle()
    kube.exit(
        "trainer", 11, message="RLRUN_ATTEMPT is 1, but /data/run/attempts already contains attempt 6; the next is 7"
    )
    kube.tick()
    kube.start(step=45, resumed=40)
    assert (kube.status["attempt"], kube.status["restartsCountedTowardsMax"]) == (7, 0)
    assert kube.status["checkpoint"] == {"resumedFromStep": 40, "stepsLostTotal": 0}
    assert ("Normal", "AttemptNumberTaken") in kube.told


@pytest.mark.parametrize(
    ("message", "number"), [("the next is 7", 7), ("x; next free attempt: 12", 12), ("no number", None)]
)
def test_next_free_attempt_is_read_from_the_message(message: str, number: int | None) -> None:
    assert next_number(message) == number
