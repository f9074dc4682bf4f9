"""Cause of an attempt's end: the first cause among everything that its pods show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rlrun.defaults.words import shorten_text
from rlrun.diagnostics.symptoms import tag_of
from rlrun.runtime import exit_codes
from rlrun_operator.names import (
    DEMONSTRATIONS_CONTAINER,
    FOLDER_CONTAINER,
    MODEL_CONTAINER,
    ROLES,
    Names,
    Role,
    attempt_number,
)
from rlrun_operator.pods import Container, Exit, Pod
from rlrun_operator.status import failure_reasons

PERMANENT = range(64, 79)
"""Exit codes that no restart can repair."""
_SIGNALS = range(129, 193)
"""Exit codes of processes that a signal, 1 to 64, has ended."""
_EVICTIONS = {
    "Evicted": failure_reasons.POD_EVICTED,
    "Preempting": failure_reasons.POD_EVICTED,
    "Preempted": failure_reasons.POD_EVICTED,
} | dict.fromkeys(("Shutdown", "NodeShutdown", "Terminated", "NodeLost"), failure_reasons.NODE_LOST)
"""`status.reason` of a pod that was ended from outside: the kubelet's and the node controller's words."""
_BY_CODE = {
    exit_codes.STORAGE: failure_reasons.STORAGE_ERROR,
    exit_codes.DATA: failure_reasons.DATA_ERROR,
    exit_codes.CONFIGURATION: failure_reasons.CONFIGURATION_ERROR,
}
_FIRST_HAND = frozenset(
    {
        failure_reasons.OUT_OF_MEMORY,
        failure_reasons.SIGNALLED,
        failure_reasons.STORAGE_ERROR,
        failure_reasons.DATA_ERROR,
        failure_reasons.CONFIGURATION_ERROR,
        failure_reasons.PERMANENT_ERROR,
        failure_reasons.CUDA_OUT_OF_MEMORY,
        failure_reasons.CUDA_ERROR,
    }
)
"""Reasons that say of themselves what broke."""
_NEXT_NUMBER = re.compile(r"next (?:free attempt: |is )(\d+)")
_MESSAGE_MAX = 1000

Kind = Literal["disruption", "taken", "permanent", "failure"]


@dataclass(frozen=True)
class Cause:
    """Reason to end an attempt."""

    kind: Kind
    at: float | None
    """Seconds since the epoch; None: not known, it was not seen happening."""
    role: Role
    pod: str
    node: str | None
    exit_code: int | None
    reason: str
    message: str


def first_cause(
    pods: Sequence[Pod],
    gone: Sequence[Pod],
    attempt: int,
    names: Names,
    *,
    trainers: int,
    has_statefulset: bool,
    settled_at: float | None,
    now: float,
) -> Cause | None:
    """The earliest reason why the launched `attempt` cannot go on; None while it can.

    Args:
        pods: the run's pods.
        gone: those that were seen and do not exist any more: times of one second's resolution do not always show that a pod is a new one.
        attempt: the current attempt; all its workloads were seen.
        names: of the run's children.
        trainers: how many trainer pods there should be.
        has_statefulset: whether the StatefulSet exists and is not being deleted.
        settled_at: when the attempt's pods were all ready, in seconds since the epoch: a pod that is younger has
            replaced one, and a missing one was deleted. None: they never were.
        now: the time of causes that were not seen happening.
    """
    trainer = [pod for pod in pods if pod.role == "trainer" and pod.attempt == attempt]
    lost = {pod.name: _gone_cause(pod) for pod in gone if pod.attempt == attempt and pod.node is not None}
    # What is known of the lost says more than their absence, or their successors' youth.
    causes = list(lost.values())
    causes += filter(None, (_trainer_cause(pod, None if pod.name in lost else settled_at) for pod in trainer))
    orchestrator = next((p for p in pods if p.name == names.orchestrator(attempt)), None)
    if orchestrator is not None:
        causes += filter(None, [_role_cause(orchestrator)])
    elif names.orchestrator(attempt) not in lost:
        causes.append(_missing("orchestrator", names.orchestrator(attempt)))
    if not has_statefulset:
        causes.append(_missing("trainer", names.trainer, "the StatefulSet was deleted"))
    if settled_at is not None:
        there = {*lost, *(pod.name for pod in trainer)}
        causes += [_missing("trainer", name) for i in range(trainers) if (name := names.trainer_pod(i)) not in there]
    causes += _engines_that_can_never_work(pods, orchestrator.created_at if orchestrator is not None else 0.0)
    return min(causes, key=lambda cause: _order_causes(cause, now), default=None)


def next_number(message: str) -> int | None:
    """The free attempt number that rank 0 names when its own is taken."""
    found = _NEXT_NUMBER.search(message)
    return attempt_number(found.group(1)) if found else None


def told_of(cause: Cause) -> str:
    """The cause in one sentence."""
    code = "" if cause.exit_code is None else f" (exit code {cause.exit_code})"
    return f"{cause.role} pod {cause.pod}{code}: {cause.message}"


def _trainer_cause(pod: Pod, settled_at: float | None) -> Cause | None:
    found = _pod_cause(pod, pod.containers)
    if found is None and settled_at is not None and pod.created_at > settled_at:
        return _cause(
            pod, "disruption", failure_reasons.POD_REPLACED, "the pod was deleted and made again", pod.created_at
        )
    return found


def _role_cause(pod: Pod) -> Cause | None:
    """Cause that ends a trainer's or the orchestrator's pod; of the latter's init containers, those of environments do not count."""
    own = (FOLDER_CONTAINER, DEMONSTRATIONS_CONTAINER, MODEL_CONTAINER)
    return _pod_cause(pod, [c for c in pod.containers if pod.role == "trainer" or not c.init or c.name in own])


def _gone_cause(pod: Pod) -> Cause:
    """A pod that had a node, and with it perhaps a part in the attempt."""
    return _role_cause(pod) or _cause(pod, "disruption", failure_reasons.POD_DELETED, "the pod was deleted", None)


def end_of(pod: Pod) -> Cause | None:
    """End of a trainer's or the orchestrator's process by itself, for good or not; None: it did not fail, or was ended."""
    found = _role_cause(pod)
    return (
        found if found is not None and found.kind in ("failure", "permanent") and found.exit_code is not None else None
    )


def _pod_cause(pod: Pod, containers: Iterable[Container]) -> Cause | None:
    own = [c for c in containers if c.init or c.name == pod.role]
    ends = [c.exit for c in own if c.exit is not None and c.exit.code != 0]
    end = min(ends, key=lambda e: e.at or 0.0, default=None)
    if (disrupted := _find_disruption(pod, end)) is not None:
        return disrupted
    if end is not None and pod.ended_by_itself(end):
        return _exit_cause(pod, end)
    if (
        pod.deleted_at is not None and pod.node is not None
    ):  # one that never had a node has done nothing that could be lost
        return _cause(pod, "disruption", failure_reasons.POD_DELETED, "the pod was deleted", pod.deleted_at)
    if pod.phase == "Failed":
        return _cause(pod, "failure", failure_reasons.POD_FAILED, pod.message or pod.reason or "the pod failed", None)
    return None


def _find_disruption(pod: Pod, end: Exit | None) -> Cause | None:
    """A loss of the node, or an eviction, that is on the pod itself."""
    if pod.disruption is not None:
        reason, message = pod.disruption
        lost = "Taint" in reason or "PodGC" in reason or "Shutdown" in message
        word = failure_reasons.NODE_LOST if lost else failure_reasons.POD_EVICTED
        return _cause(pod, "disruption", word, f"{reason}: {message}" if message else reason, pod.deleted_at, end)
    if pod.phase == "Failed" and pod.reason in _EVICTIONS:
        return _cause(pod, "disruption", _EVICTIONS[pod.reason], pod.message or pod.reason, pod.deleted_at, end)
    return None


def _exit_cause(pod: Pod, end: Exit) -> Cause:
    if end.reason == "ContainerStatusUnknown" or (end.code == 255 and end.reason == "Unknown"):
        return _cause(pod, "disruption", failure_reasons.NODE_LOST, "the node restarted", end.at, end)
    tag, told = tag_of(end.message)
    message = told or f"ended with exit code {end.code}, without a message"
    if end.code == exit_codes.ATTEMPT_TAKEN and _means_the_number(pod, end):
        return _cause(pod, "taken", failure_reasons.NUMBER_TAKEN, message, end.at, end)
    if end.code in PERMANENT:
        return _cause(pod, "permanent", _BY_CODE.get(end.code, failure_reasons.PERMANENT_ERROR), message, end.at, end)
    if end.reason == "OOMKilled":
        fix = f"the container was killed for want of memory; raise {pod.role}.resources.limits.memory"
        return _cause(pod, "failure", failure_reasons.OUT_OF_MEMORY, f"{fix}: {told}" if told else fix, end.at, end)
    word = tag or (
        failure_reasons.SIGNALLED if end.code in _SIGNALS else _BY_CODE.get(end.code, failure_reasons.EXIT_CODE)
    )
    return _cause(pod, "failure", word, message, end.at, end)


def _means_the_number(pod: Pod, end: Exit) -> bool:
    """A trainer that names the next number, as any program may end so; or the orchestrator of a run without one: a guest, an evaluation."""
    return pod.role == "orchestrator" or (pod.role == "trainer" and next_number(end.message) is not None)


def _engines_that_can_never_work(pods: Iterable[Pod], began: float) -> Iterator[Cause]:
    """Ends of engines that the attempt has seen: an engine outlives attempts, and with it the report of its last end.

    Args:
        began: creation of the attempt's orchestrator, in seconds since the epoch. An earlier end was acted on, by a rule for one.
    """
    for pod in pods:
        end = pod.exit
        if pod.role != "inference" or pod.deleted_at is not None or end is None or end.code not in PERMANENT:
            continue
        if end.at is None or end.at >= began:
            yield _exit_cause(pod, end)


def _missing(role: Role, name: str, message: str = "the pod was deleted") -> Cause:
    return Cause("disruption", None, role, name, None, None, failure_reasons.POD_DELETED, message)


def _cause(pod: Pod, kind: Kind, reason: str, message: str, at: float | None, end: Exit | None = None) -> Cause:
    code = end.code if end is not None else None
    when = at if at is not None or end is None else end.at
    return Cause(kind, when, pod.role, pod.name, pod.node, code, reason, shorten_text(message, _MESSAGE_MAX))


def _order_causes(cause: Cause, now: float) -> tuple[float, int, int, str]:
    """First in time; within one second (Kubernetes' resolution) what explains more comes first: peers of a dead process fail with it."""
    explains = {"disruption": 0, "taken": 1, "permanent": 1, "failure": 3}[cause.kind]
    if cause.kind == "failure":
        explains += echo_of(cause.reason)
    return (cause.at if cause.at is not None else now, explains, ROLES.index(cause.role), cause.pod)


def echo_of(reason: str) -> int:
    """Likelihood that a failure is a consequence of a peer's: -1 names its own cause, 1 that a peer was lost."""
    return -1 if reason in _FIRST_HAND else int(reason == failure_reasons.NCCL_ERROR)
