"""GPU time that pods of a run have held since it was counted last: from their own timestamps, never from the passes that see them. Pure.

A pod holds its GPUs from the time at which it got its node (condition PodScheduled) to its end: that of its containers, or its removal.
What is counted already is on record as one time and the pods that were there then, so that no hour is lost or counted twice, however
seldom somebody looks. What nobody can know is bounded:

- A pod that vanished unseen is counted to the time at which that was noticed, or to the end of its grace period, if that was known.
- A pod that came and went unseen is not counted.
- Where the clock was set back by more than `SKEW_SECONDS`, counting goes on from what it shows now; less is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rlrun.api.status import CostStatus
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.gpus import gpus_of, resource_of
from rlrun_operator.names import ROLES, Role
from rlrun_operator.pods import Pod
from rlrun_operator.times import seconds_of

SKEW_SECONDS = 60
"""Clocks of two operators may differ by so much."""
GONE_KEPT = 16
"""Pods that are gone and stay on record as ended: a second operator, or an old answer, may still show one."""
MOST_GPUS = 2**20
"""Far more than a pod may have: a record that says more was not written by an operator."""
_ENDED = ("Succeeded", "Failed")


class Known(NamedTuple):
    """A pod of the record."""

    role: Role
    gpus: int
    """0: it has ended and is counted to its end."""
    deadline: int | None
    """End of its grace period, in seconds since the epoch."""


@dataclass(frozen=True)
class Span:
    """GPU time to add: `gpus` from `start` to `end`, in whole seconds since the epoch."""

    role: Role
    gpus: int
    start: int
    end: int
    pod: Pod | None
    """None: it is gone."""

    @property
    def gpu_seconds(self) -> int:
        return self.gpus * (self.end - self.start)


@dataclass(frozen=True)
class Ledger:
    """Result of one look."""

    spans: tuple[Span, ...]
    counted_to: int
    pods: tuple[str, ...]
    """The next record's."""
    holds: int
    """GPUs that go on being counted."""

    @property
    def gpu_seconds(self) -> int:
        """GPU time to add."""
        return sum(span.gpu_seconds for span in self.spans)


def read_ledger(run: RunSnapshot) -> Ledger:
    """GPU time since the record of the status."""
    past = run.past.cost
    recorded = seconds_of(past.counted_to) if past is not None else None
    now = math.floor(run.now)
    to = int(recorded) if recorded is not None else now
    upto = now if now >= to or to - now > SKEW_SECONDS else to
    known = _recorded_pods(past.pods) if past is not None and recorded is not None else {}
    held = list(_gpu_holders(run))
    there = {pod.uid for pod, _ in held}
    gone = {uid: pod for uid, pod in known.items() if uid not in there}
    spans = [_held_span(pod, gpus, known.get(pod.uid), to, upto) for pod, gpus in held]
    spans += [_vanished_span(pod, to, upto) for pod in gone.values()]
    left = [(pod, _goes_on(pod, gpus, known.get(pod.uid))) for pod, gpus in held]
    return Ledger(
        tuple(span for span in spans if span.gpu_seconds > 0),
        upto,
        (*sorted(_pod_entry(pod, gpus) for pod, gpus in left), *_ended_entries(gone)),
        sum(gpus for _, gpus in left),
    )


def _gpu_holders(run: RunSnapshot) -> Iterator[tuple[Pod, int]]:
    """Pods that have got a node, and their GPUs."""
    named = resource_of(run.observed.run)
    for pod in run.pods:
        gpus = gpus_of(pod.manifest.get("spec") or {}, named) if pod.node is not None else 0
        if gpus:
            yield pod, gpus


def _held_span(pod: Pod, gpus: int, before: Known | None, to: int, upto: int) -> Span:
    """Time of a pod that is there: none where it is counted to its end already."""
    end = min(upto, ended_at(pod)) if pod.phase in _ENDED else upto
    start = bound_at(pod) if before is None else to
    return Span(pod.role, gpus if before is None or before.gpus else 0, start, max(start, end), pod)


def _vanished_span(gone: Known, to: int, upto: int) -> Span:
    """Time of a pod that is gone. One that was there after its grace period, on a node that is lost, may have been there until now."""
    end = upto if gone.deadline is None or gone.deadline <= to else min(upto, gone.deadline)
    return Span(gone.role, gone.gpus, to, max(to, end), None)


def _goes_on(pod: Pod, gpus: int, before: Known | None) -> int:
    """GPUs that are counted on: a pod that has ended once stays so."""
    return 0 if pod.phase in _ENDED or (before is not None and not before.gpus) else gpus


def _ended_entries(gone: Mapping[str, Known]) -> list[str]:
    """Entries of pods that are gone, which somebody may still see: the last of them, those of this look behind the others."""
    before = [f"{uid}/{pod.role}/0" for uid, pod in gone.items() if not pod.gpus]
    now = sorted(f"{uid}/{pod.role}/0" for uid, pod in gone.items() if pod.gpus)
    return [*before, *now][-GONE_KEPT:]


def total_gpu_seconds(past: CostStatus | None) -> int:
    """GPU-seconds on record."""
    return sum(sum(row.gpu_seconds.values()) for row in past.attempts) if past is not None else 0


def spent_gpu_seconds(run: RunSnapshot) -> tuple[int, int]:
    """GPU-seconds up to now, and the GPUs that the run holds."""
    ledger = read_ledger(run)
    return total_gpu_seconds(run.past.cost) + ledger.gpu_seconds, ledger.holds


def bound_at(pod: Pod) -> int:
    """Time at which a pod got its node, by the scheduler's clock; where nobody says, its creation."""
    status = pod.manifest.get("status") or {}
    return int(_condition_since(pod, "PodScheduled") or seconds_of(status.get("startTime")) or pod.created_at)


def ready_at(pod: Pod) -> int | None:
    """Time since which a pod is ready; None: it is not."""
    if not pod.ready:
        return None
    return int(_condition_since(pod, "Ready") or bound_at(pod))


def ended_at(pod: Pod) -> int:
    """Time at which a pod's last container ended; now and for ever where no container says."""
    status = pod.manifest.get("status") or {}
    ends = [
        seconds_of(((container.get("state") or {}).get("terminated") or {}).get("finishedAt"))
        for container in status.get("containerStatuses") or ()
    ]
    found = [end for end in ends if end is not None]
    return math.ceil(max(found)) if found else 2**53


def _condition_since(pod: Pod, kind: str) -> float | None:
    conditions = (pod.manifest.get("status") or {}).get("conditions") or ()
    for condition in conditions:
        if condition.get("type") == kind and condition.get("status") == "True":
            return seconds_of(condition.get("lastTransitionTime"))
    return None


def _pod_entry(pod: Pod, gpus: int) -> str:
    """A pod of the record, see `CostStatus.pods`; `deletionTimestamp` is the end of the grace period."""
    deadline = seconds_of(pod.manifest["metadata"].get("deletionTimestamp"))
    until = f"/{int(deadline)}" if deadline is not None and gpus else ""
    return f"{pod.uid}/{pod.role}/{gpus}{until}"


def _recorded_pods(entries: list[str]) -> Mapping[str, Known]:
    """Pods of a record, which another client may have written."""
    found = {}
    for entry in entries:
        uid, *rest = entry.split("/")
        numbers = [int(n) for n in rest[1:] if n.isascii() and n.isdecimal() and len(n) <= 12]
        if len(rest) not in (2, 3) or len(numbers) != len(rest) - 1 or rest[0] not in ROLES:
            continue
        if numbers[0] <= MOST_GPUS:
            found[uid] = Known(rest[0], numbers[0], numbers[1] if len(numbers) > 1 else None)
    return found
