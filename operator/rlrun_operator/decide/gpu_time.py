"""GPU time of a run: the time that its pods have held GPUs, and the budget that limits it. Pure.

Each pass counts the time since the last count, from the timestamps of the pods instead of the times of passes. A pod holds its GPUs from
its scheduling (condition PodScheduled) to the end of its containers, or to its removal. The status records the time of the last count and
the pods at this time, so no time is lost or counted twice, independent of the number of passes. Unknown times are bounded:

- A pod that vanished unobserved is counted until this was noticed, or until the known end of its grace period.
- A pod that came and went unobserved is not counted.
- If the clock was set back by more than `SKEW_SECONDS`, counting continues from the new time; otherwise it waits for the recorded time.

The budget (`spec.budget`) causes a warning when most of it is spent, and a suspension when all of it is spent. Spent time never decreases.
A run with a spent budget stays suspended until the budget is raised or removed, and then resumes by itself. The operator does not edit the
specification.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rlrun.api.run_status import CostStatus
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.names import ROLES, Role
from rlrun_operator.pods import Pod, gpus_of, resource_of
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import ConditionUpdate, find_condition, is_true
from rlrun_operator.times import seconds_of

SKEW_SECONDS = 60
"""Maximum difference between the clocks of two operators."""
GONE_KEPT = 16
"""Number of removed pods that stay recorded as ended: a second operator or an old response may still contain them."""
MOST_GPUS = 2**20
"""Upper bound of the GPUs of a pod: a record with more was not written by an operator."""
_ENDED = ("Succeeded", "Failed")


class Known(NamedTuple):
    """Recorded pod."""

    role: Role
    gpus: int
    """Number of GPUs; 0: the pod has ended and is completely counted."""
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
    """Pod that held the GPUs; None: it no longer exists."""

    @property
    def gpu_seconds(self) -> int:
        return self.gpus * (self.end - self.start)


@dataclass(frozen=True)
class Ledger:
    """Result of one count."""

    spans: tuple[Span, ...]
    counted_to: int
    pods: tuple[str, ...]
    """Pods of the next record."""
    holds: int
    """Number of GPUs that are still held."""

    @property
    def gpu_seconds(self) -> int:
        """GPU time to add."""
        return sum(span.gpu_seconds for span in self.spans)


def read_ledger(run: RunSnapshot) -> Ledger:
    """Return the GPU time since the last count in the status."""
    past = run.past.cost
    recorded = seconds_of(past.counted_to) if past is not None else None
    now = math.floor(run.now)
    to = int(recorded) if recorded is not None else now
    # A clock that was set back a little must not count time twice. After a large step it is believed, because
    # counting would stop for as long.
    upto = now if now >= to or to - now > SKEW_SECONDS else to
    known = _recorded_pods(past.pods) if past is not None and recorded is not None else {}
    held = list(_gpu_holders(run))
    there = {pod.uid for pod, _ in held}
    # A pod may end and disappear between two passes. Its recorded entry closes the gap.
    gone = {uid: pod for uid, pod in known.items() if uid not in there}
    spans = [_held_span(pod, gpus, known.get(pod.uid), to, upto) for pod, gpus in held]
    spans += [_vanished_span(pod, to, upto) for pod in gone.values()]
    left = [(pod, _counted_gpus(pod, gpus, known.get(pod.uid))) for pod, gpus in held]
    return Ledger(
        tuple(span for span in spans if span.gpu_seconds > 0),
        upto,
        (*sorted(_pod_entry(pod, gpus) for pod, gpus in left), *_ended_entries(gone)),
        sum(gpus for _, gpus in left),
    )


def _gpu_holders(run: RunSnapshot) -> Iterator[tuple[Pod, int]]:
    """Yield the scheduled pods with GPUs, and their numbers of GPUs."""
    named = resource_of(run.observed.run)
    for pod in run.pods:
        gpus = gpus_of(pod.manifest.get("spec") or {}, named) if pod.node is not None else 0
        if gpus:
            yield pod, gpus


def _held_span(pod: Pod, gpus: int, before: Known | None, to: int, upto: int) -> Span:
    """Return the time of an existing pod; it is empty if the pod is completely counted already."""
    end = min(upto, ended_at(pod)) if pod.phase in _ENDED else upto
    start = bound_at(pod) if before is None else to
    return Span(pod.role, gpus if before is None or before.gpus else 0, start, max(start, end), pod)


def _vanished_span(gone: Known, to: int, upto: int) -> Span:
    """Return the time of a removed pod. If it still existed after its grace period, on a lost node, it counts until now."""
    end = upto if gone.deadline is None or gone.deadline <= to else min(upto, gone.deadline)
    return Span(gone.role, gone.gpus, to, max(to, end), None)


def _counted_gpus(pod: Pod, gpus: int, before: Known | None) -> int:
    """Return the GPUs that are still counted; an ended pod is not counted again."""
    return 0 if pod.phase in _ENDED or (before is not None and not before.gpus) else gpus


def _ended_entries(gone: Mapping[str, Known]) -> list[str]:
    """Return the entries of the last removed pods, because other clients may still observe them; those of this count come last."""
    before = [f"{uid}/{pod.role}/0" for uid, pod in gone.items() if not pod.gpus]
    now = sorted(f"{uid}/{pod.role}/0" for uid, pod in gone.items() if pod.gpus)
    return [*before, *now][-GONE_KEPT:]


def total_gpu_seconds(past: CostStatus | None) -> int:
    """Return the recorded GPU-seconds."""
    return sum(sum(row.gpu_seconds.values()) for row in past.attempts) if past is not None else 0


def spent_gpu_seconds(run: RunSnapshot) -> tuple[int, int]:
    """Return the GPU-seconds until now, and the number of held GPUs."""
    ledger = read_ledger(run)
    return total_gpu_seconds(run.past.cost) + ledger.gpu_seconds, ledger.holds


def bound_at(pod: Pod) -> int:
    """Return the time at which a pod was scheduled, by the scheduler's clock, or its creation if unknown."""
    status = pod.manifest.get("status") or {}
    return int(_condition_since(pod, "PodScheduled") or seconds_of(status.get("startTime")) or pod.created_at)


def ready_at(pod: Pod) -> int | None:
    """Return the time since which a pod is ready, or None if it is not ready."""
    if not pod.ready:
        return None
    return int(_condition_since(pod, "Ready") or bound_at(pod))


def ended_at(pod: Pod) -> int:
    """Return the time at which a pod's last container ended, or a time in the far future if unknown."""
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
    """Return the recorded entry of a pod (`CostStatus.pods`); `deletionTimestamp` is the end of the grace period."""
    deadline = seconds_of(pod.manifest["metadata"].get("deletionTimestamp"))
    until = f"/{int(deadline)}" if deadline is not None and gpus else ""
    return f"{pod.uid}/{pod.role}/{gpus}{until}"


def _recorded_pods(entries: list[str]) -> Mapping[str, Known]:
    """Parse the recorded pods and skip invalid entries, which another client may have written."""
    found = {}
    for entry in entries:
        uid, *rest = entry.split("/")
        numbers = [int(n) for n in rest[1:] if n.isascii() and n.isdecimal() and len(n) <= 12]
        if len(rest) not in (2, 3) or len(numbers) != len(rest) - 1 or rest[0] not in ROLES:
            continue
        if numbers[0] <= MOST_GPUS:
            found[uid] = Known(rest[0], numbers[0], numbers[1] if len(numbers) > 1 else None)
    return found


NEARLY = 0.8
"""Spent share of the budget that causes the warning."""
LEAST_WAIT_SECONDS = 1.0


def gpu_hours(run: RunSnapshot) -> float | None:
    """Return the budget as written, because the rest of the specification may be invalid. None without a budget, and for guests."""
    budget = (run.observed.run.get("spec") or {}).get("budget")
    found = budget.get("gpuHours") if isinstance(budget, Mapping) else None
    if isinstance(found, bool) or not isinstance(found, int | float) or not found > 0 or run.host_name is not None:
        return None
    return float(found)


def is_spent(run: RunSnapshot) -> bool:
    """Return whether the budget is spent."""
    limit = gpu_hours(run)
    return limit is not None and spent_gpu_seconds(run)[0] >= limit * 3600


def spent_message(run: RunSnapshot) -> str:
    """Return the message about a spent budget, with the fix."""
    limit = gpu_hours(run) or 0.0
    fix = "raise budget.gpuHours, or remove budget, and the run resumes by itself from its checkpoint"
    return f"budget.gpuHours ({limit:g}) is spent; {fix}"


def with_budget_condition(
    run: RunSnapshot, updates: Mapping[str, ConditionUpdate | None]
) -> Mapping[str, ConditionUpdate | None]:
    """Return `updates` with the condition WithinBudget."""
    kind, limit = reasons.WITHIN_BUDGET, gpu_hours(run)
    past = run.past.conditions
    if limit is None:
        return updates if find_condition(past, kind) is None else {**updates, kind: None}
    if is_true(past, reasons.COMPLETE) or is_true(past, reasons.FAILED):
        return updates
    share = spent_gpu_seconds(run)[0] / (limit * 3600)
    if share >= 1:
        update = ConditionUpdate("False", reasons.BUDGET_SPENT, spent_message(run))
    elif share >= NEARLY:
        what = f"{NEARLY:.0%} of budget.gpuHours ({limit:g}) is spent; the run saves and is suspended when all is"
        update = ConditionUpdate(
            "True", reasons.BUDGET_NEARLY_SPENT, f"{what}; raise budget.gpuHours at any time, and it is not"
        )
    else:
        update = ConditionUpdate(
            "True", reasons.BUDGET_LEFT, f"less than {NEARLY:.0%} of budget.gpuHours ({limit:g}) is spent"
        )
    return {**updates, kind: update}


def look_in(run: RunSnapshot) -> float | None:
    """Return the seconds until the next threshold of the budget with the currently held GPUs; None if no threshold is ahead."""
    limit = gpu_hours(run)
    if limit is None:
        return None
    now, holds = spent_gpu_seconds(run)
    ahead = [limit * 3600 * share - now for share in (NEARLY, 1.0) if now < limit * 3600 * share]
    return max(min(ahead) / holds, LEAST_WAIT_SECONDS) if ahead and holds else None
