"""Cause of an attempt's end: the first cause that its pods show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rlrun.diagnostics.symptoms import tag_of
from rlrun.runtime import exit_codes
from rlrun.runtime.printable import shorten_text
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
"""Exit codes that a restart cannot repair: the codes of sysexits."""
_SIGNALS = range(129, 193)
"""Exit codes of processes that were ended by a signal from 1 to 64."""
_EVICTIONS = {
    "Evicted": failure_reasons.POD_EVICTED,
    "Preempting": failure_reasons.POD_EVICTED,
    "Preempted": failure_reasons.POD_EVICTED,
} | dict.fromkeys(("Shutdown", "NodeShutdown", "Terminated", "NodeLost"), failure_reasons.NODE_LOST)
"""`status.reason` of a pod that was ended from outside, by the kubelet or the node controller."""
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
"""Reasons that identify the faulty component by themselves."""
_NEXT_NUMBER = re.compile(r"next (?:free attempt: |is )(\d+)")
"""Text about the free attempt number in the message of a process whose own number is taken."""
_MESSAGE_MAX = 1000

Kind = Literal["disruption", "taken", "permanent", "failure"]
"""disruption: the pod was ended from outside; taken: the attempt number is in use; permanent: a restart cannot repair the failure; failure:
any other failure of a process or pod."""


@dataclass(frozen=True)
class Cause:
    """Cause for which an attempt ends."""

    kind: Kind
    at: float | None
    """Seconds since the epoch; None: unknown, because the operator did not observe the event."""
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
    """Return the earliest reason why the launched `attempt` cannot continue, or None while it can.

    Args:
        pods: pods of the run.
        gone: observed pods that no longer exist. Times alone do not always show a replacement, because Kubernetes records whole seconds.
        attempt: current attempt, whose workloads have all been observed.
        names: names of the run's children.
        trainers: expected number of trainer pods.
        has_statefulset: whether the StatefulSet exists and is not being deleted.
        settled_at: time at which all pods of the attempt were ready, in seconds since the epoch. A younger pod is a replacement, and a
            missing pod was deleted. None: they were not all ready yet.
        now: current time, in seconds since the epoch. It is the time of causes without a time.
    """
    # Five sources: lost pods, the trainer's pods, the orchestrator's pod, missing objects, and engines with a permanent failure.
    trainer = [pod for pod in pods if pod.role == "trainer" and pod.attempt == attempt]
    lost = {pod.name: _gone_cause(pod) for pod in gone if pod.attempt == attempt and pod.node is not None}
    # The last state of a lost pod explains more than its absence or the age of its replacement.
    causes = list(lost.values())
    causes += filter(None, (_trainer_cause(pod, None if pod.name in lost else settled_at) for pod in trainer))
    orchestrator = next((p for p in pods if p.name == names.orchestrator(attempt)), None)
    if orchestrator is not None:
        causes += filter(None, [_role_cause(orchestrator)])
    elif names.orchestrator(attempt) not in lost:
        causes.append(_missing_pod_cause("orchestrator", names.orchestrator(attempt)))
    if not has_statefulset:
        causes.append(_missing_pod_cause("trainer", names.trainer, "the StatefulSet was deleted"))
    if settled_at is not None:
        there = {*lost, *(pod.name for pod in trainer)}
        causes += [
            _missing_pod_cause("trainer", name) for i in range(trainers) if (name := names.trainer_pod(i)) not in there
        ]
    # Without the pod, the start of the attempt is unknown, and an earlier end of an engine would be taken for one of this attempt.
    known = orchestrator or next((pod for pod in gone if pod.name == names.orchestrator(attempt)), None)
    if known is not None:
        causes += _permanent_engine_failures(pods, known.created_at)
    return min(causes, key=lambda cause: _order_causes(cause, now), default=None)


def next_number(message: str) -> int | None:
    """Return the free attempt number that rank 0 reports if its own number is taken, or None."""
    found = _NEXT_NUMBER.search(message)
    return attempt_number(found.group(1)) if found else None


def describe_cause(cause: Cause) -> str:
    """Return the cause in one sentence."""
    code = "" if cause.exit_code is None else f" (exit code {cause.exit_code})"
    return f"{cause.role} pod {cause.pod}{code}: {cause.message}"


def _trainer_cause(pod: Pod, settled_at: float | None) -> Cause | None:
    found = _pod_cause(pod, pod.containers)
    if found is None and settled_at is not None and pod.created_at > settled_at:
        return _make_cause(
            pod, "disruption", failure_reasons.POD_REPLACED, "the pod was deleted and created again", pod.created_at
        )
    return found


def _role_cause(pod: Pod) -> Cause | None:
    """Return the cause that ended a trainer's or the orchestrator's pod. Init containers of environments, which the orchestrator has, do
    not count."""
    own = (FOLDER_CONTAINER, DEMONSTRATIONS_CONTAINER, MODEL_CONTAINER)
    return _pod_cause(pod, [c for c in pod.containers if pod.role == "trainer" or not c.init or c.name in own])


def _gone_cause(pod: Pod) -> Cause:
    """Return the cause for a deleted pod. It had a node, so its process may have worked for the attempt."""
    return _role_cause(pod) or _make_cause(pod, "disruption", failure_reasons.POD_DELETED, "the pod was deleted", None)


def end_of(pod: Pod) -> Cause | None:
    """Return the cause if a trainer's or the orchestrator's process failed by itself; None: it did not fail, or was ended."""
    found = _role_cause(pod)
    return (
        found if found is not None and found.kind in ("failure", "permanent") and found.exit_code is not None else None
    )


def _pod_cause(pod: Pod, containers: Iterable[Container]) -> Cause | None:
    """Return the cause that ended a pod. Order: loss of its node, own failure, deletion, failed phase."""
    own = [c for c in containers if c.init or c.name == pod.role]
    ends = [c.exit for c in own if c.exit is not None and c.exit.code != 0]
    # An exit without a time counts as the first one.
    end = min(ends, key=lambda e: e.at or 0.0, default=None)
    if (disrupted := _find_disruption(pod, end)) is not None:
        return disrupted
    if end is not None and pod.ended_by_itself(end):
        return _exit_cause(pod, end)
    if pod.deleted_at is not None and pod.node is not None:  # a pod without a node has done no work that could be lost
        return _make_cause(pod, "disruption", failure_reasons.POD_DELETED, "the pod was deleted", pod.deleted_at)
    if pod.phase == "Failed":
        return _make_cause(
            pod, "failure", failure_reasons.POD_FAILED, pod.message or pod.reason or "the pod failed", None
        )
    return None


def _find_disruption(pod: Pod, end: Exit | None) -> Cause | None:
    """Return the loss of the node, or an eviction, that the pod itself reports."""
    if pod.disruption is not None:
        reason, message = pod.disruption
        lost = "Taint" in reason or "PodGC" in reason or "Shutdown" in message
        word = failure_reasons.NODE_LOST if lost else failure_reasons.POD_EVICTED
        return _make_cause(pod, "disruption", word, f"{reason}: {message}" if message else reason, pod.deleted_at, end)
    if pod.phase == "Failed" and pod.reason in _EVICTIONS:
        return _make_cause(pod, "disruption", _EVICTIONS[pod.reason], pod.message or pod.reason, pod.deleted_at, end)
    return None


def _exit_cause(pod: Pod, end: Exit) -> Cause:
    # The kubelet or containerd reports these for a container whose end it did not observe, such as during a restart of the node.
    if end.reason == "ContainerStatusUnknown" or (end.code == 255 and end.reason == "Unknown"):
        return _make_cause(pod, "disruption", failure_reasons.NODE_LOST, "the node restarted", end.at, end)
    tag, text = tag_of(end.message)
    message = text or f"ended with exit code {end.code}, without a message"
    if end.code == exit_codes.ATTEMPT_TAKEN and _reports_taken_number(pod, end):
        return _make_cause(pod, "taken", failure_reasons.NUMBER_TAKEN, message, end.at, end)
    if end.code in PERMANENT:
        return _make_cause(
            pod, "permanent", _BY_CODE.get(end.code, failure_reasons.PERMANENT_ERROR), message, end.at, end
        )
    if end.reason == "OOMKilled":
        fix = f"the container was killed because it ran out of memory; raise {pod.role}.resources.limits.memory"
        return _make_cause(
            pod, "failure", failure_reasons.OUT_OF_MEMORY, f"{fix}: {text}" if text else fix, end.at, end
        )
    word = tag or (
        failure_reasons.SIGNALLED if end.code in _SIGNALS else _BY_CODE.get(end.code, failure_reasons.EXIT_CODE)
    )
    return _make_cause(pod, "failure", word, message, end.at, end)


def _reports_taken_number(pod: Pod, end: Exit) -> bool:
    """Return whether the exit code means a taken attempt number.

    Any program may use this exit code, so a trainer must also report the next number. The orchestrator's exit code is enough, because
    guests and evaluations have no trainer that reports a number.
    """
    return pod.role == "orchestrator" or (pod.role == "trainer" and next_number(end.message) is not None)


def _permanent_engine_failures(pods: Iterable[Pod], began: float) -> Iterator[Cause]:
    """Yield permanent failures of engines during this attempt. Engines outlive attempts, so an engine may have ended before it.

    Args:
        pods: pods of the run.
        began: creation of the attempt's orchestrator, in seconds since the epoch. Earlier ends belong to an earlier attempt.
    """
    for pod in pods:
        end = pod.exit
        if pod.role != "inference" or pod.deleted_at is not None or end is None or end.code not in PERMANENT:
            continue
        if end.at is None or end.at >= began:
            yield _exit_cause(pod, end)


def _missing_pod_cause(role: Role, name: str, message: str = "the pod was deleted") -> Cause:
    return Cause("disruption", None, role, name, None, None, failure_reasons.POD_DELETED, message)


def _make_cause(pod: Pod, kind: Kind, reason: str, message: str, at: float | None, end: Exit | None = None) -> Cause:
    code = end.code if end is not None else None
    when = at if at is not None or end is None else end.at
    return Cause(kind, when, pod.role, pod.name, pod.node, code, reason, shorten_text(message, _MESSAGE_MAX))


def _order_causes(cause: Cause, now: float) -> tuple[float, int, int, str]:
    """Return the sort key of a cause: its time, then how well it explains the end of the attempt.

    Kubernetes records whole seconds, and the peers of a failed process may fail in the same second. The order within a second is:
    disruptions; taken numbers and permanent failures; other failures, ordered by `echo_of`.
    """
    explains = {"disruption": 0, "taken": 1, "permanent": 1, "failure": 3}[cause.kind]
    if cause.kind == "failure":
        explains += echo_of(cause.reason)
    return (cause.at if cause.at is not None else now, explains, ROLES.index(cause.role), cause.pod)


def echo_of(reason: str) -> int:
    """Return the rank of a failure's reason: -1 if it identifies its own cause, 1 if it only reports a lost peer, else 0."""
    return -1 if reason in _FIRST_HAND else int(reason == failure_reasons.NCCL_ERROR)
