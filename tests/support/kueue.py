"""A stand-in for Kueue: effects of its scheduler and webhooks on Workloads, as its API reference and its sources
document them.

It is pure on manifests, so that it works with an API in memory and with a real API server. A queue admits a limited
number of Workloads at once; tests call methods for other admissions, evictions and checks.
"""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta
from typing import Any

Json = dict[str, Any]


class RefusedError(Exception):
    """A webhook of Kueue refuses a change."""


class StandIn:
    """One ClusterQueue.

    Args:
        rooms: number of Workloads that it admits at once.
        flavor: flavor that it assigns.
        queues: LocalQueues of this ClusterQueue.
        checked: whether an admission check must report Ready first (`approve`).
    """

    def __init__(
        self, rooms: int = 1, flavor: str = "h100", queues: tuple[str, ...] = ("team-a",), *, checked: bool = False
    ) -> None:
        self.rooms = rooms
        self.flavor = flavor
        self.queues = queues
        self.checked = checked
        self.updates: list[Json] = []
        """podSetUpdates of the admission check."""
        self.topology = False
        self.waits = ("WaitingForQuota", "insufficient unused quota for nvidia.com/gpu in flavor h100, 8 more needed")
        self.time = datetime(2026, 1, 1, tzinfo=UTC)

    # ---- the controllers

    def act(self, workloads: list[Json]) -> list[Json]:
        """Process all Workloads once; return the changed ones."""
        changed = []
        held = sum(1 for one in workloads if counts(one))
        for before in sorted(workloads, key=lambda one: (-one["spec"].get("priority", 0), one["metadata"]["name"])):
            after = copy.deepcopy(before)
            held += self._one(after, held)
            if after != before:
                changed.append(after)
        return changed

    def _one(self, one: Json, held: int) -> int:
        """Change one Workload; return its number of additional used places."""
        if is_true(one, "Finished"):
            return 0
        if one["spec"].get("active") is False:
            if not is_true(one, "Evicted"):
                self._evict(one, "Deactivated", "The workload is deactivated")
                one["status"].pop("requeueState", None)
            return 0
        if is_true(one, "Evicted") and one["status"].get("admission"):
            return 0  # the integration has to stop its pods first
        if condition(one, "Requeued").get("reason") == "Deactivated":  # only of this reason, as Kueue 0.17 does it
            self._say(one, "Requeued", True, "Reactivated", "The workload was reactivated")
        if one.get("status", {}).get("admission"):
            return 0
        if condition(one, "Requeued").get("status") == "False":
            return 0
        if one["spec"]["queueName"] not in self.queues:
            self._say(
                one, "QuotaReserved", False, "Misconfigured", f"LocalQueue {one['spec']['queueName']} doesn't exist"
            )
            return 0
        if held >= self.rooms:
            self._say(one, "QuotaReserved", False, *self.waits)
            return 0
        self._reserve(one)
        return 1

    def _reserve(self, one: Json) -> None:
        status = one.setdefault("status", {})
        sets = []
        for pods in one["spec"]["podSets"]:
            assigned: Json = {"name": pods["name"], "count": pods["count"], "flavors": {"nvidia.com/gpu": self.flavor}}
            if self.topology:
                assigned["topologyAssignment"] = {"levels": ["kubernetes.io/hostname"], "slices": []}
            sets.append(assigned)
        status["admission"] = {"clusterQueue": "gpus", "podSetAssignments": sets}
        self._say(one, "QuotaReserved", True, "QuotaReserved", "Quota reserved in ClusterQueue gpus")
        for kind in ("Evicted", "Preempted"):
            if condition(one, kind):
                self._say(one, kind, False, "QuotaReserved", "Previously: evicted")
        if self.checked:
            status["admissionChecks"] = [{"name": "capacity", "state": "Pending", "message": "nodes are being made"}]
            self._say(one, "Admitted", False, "UnsatisfiedAdmissionChecks", "Not all checks are ready")
        else:
            self._say(one, "Admitted", True, "Admitted", "The workload is admitted")

    def approve(self, one: Json) -> Json:
        """Let the admission check report Ready."""
        one = copy.deepcopy(one)
        check = one["status"]["admissionChecks"][0]
        check |= {"state": "Ready", "message": "", "podSetUpdates": self.updates}
        self._say(one, "Admitted", True, "Admitted", "The workload is admitted")
        return one

    def preempt(self, one: Json) -> Json:
        """Preempt for another Workload: the quota stays reserved until the integration clears it."""
        one = copy.deepcopy(one)
        message = "Preempted to accommodate a workload in the ClusterQueue"
        self._say(one, "Preempted", True, "InClusterQueue", message)
        self._evict(one, "Preempted", message)
        return one

    def time_out(self, one: Json) -> Json:
        """Time out because not all pods were ready: the back-off doubles each time."""
        one = copy.deepcopy(one)
        count = one["status"].get("requeueState", {}).get("count", 0) + 1
        at = self.time + timedelta(seconds=60 * 2 ** (count - 1))
        one["status"]["requeueState"] = {"count": count, "requeueAt": at.strftime("%Y-%m-%dT%H:%M:%SZ")}
        self._evict(one, "PodsReadyTimeout", "Exceeded the PodsReady timeout")
        return one

    def end_backoff(self, one: Json) -> Json:
        """Let the time of `requeueAt` pass."""
        one = copy.deepcopy(one)
        self._say(one, "Requeued", True, "BackoffFinished", "The workload backoff was finished")
        return one

    def lose_node(self, one: Json) -> Json:
        """Remove a node of the topology."""
        one = copy.deepcopy(one)
        self._evict(one, "NodeFailures", "node n1 failed")
        return one

    def deactivate(self, one: Json) -> Json:
        """Deactivate after too many evictions; `act` changes the status if others write `active: false`."""
        one = copy.deepcopy(one)
        one["spec"]["active"] = False
        self._evict(one, "DeactivatedDueToRequeuingLimitExceeded", "exceeded the maximum number of re-queuing retries")
        one["status"].pop("requeueState", None)
        return one

    def _evict(self, one: Json, reason: str, message: str) -> None:
        self._say(one, "Evicted", True, reason, message)
        for check in one.get("status", {}).get("admissionChecks", ()):
            check["state"] = "Pending"

    def _say(self, one: Json, kind: str, holds: bool, reason: str, message: str) -> None:
        known = one.setdefault("status", {}).setdefault("conditions", [])
        new = {"type": kind, "status": "True" if holds else "False", "reason": reason, "message": message}
        old = condition(one, kind)
        moved = old.get("status") != new["status"]
        new["lastTransitionTime"] = self.time.strftime("%Y-%m-%dT%H:%M:%SZ") if moved else old["lastTransitionTime"]
        if old:
            known[known.index(old)] = new
        else:
            known.append(new)


# ---- the webhooks


def judge(old: Json | None, new: Json) -> None:
    """Apply the rules of Kueue's validating webhook.

    Raises:
        RefusedError: the webhook refuses the change.
    """
    sets = new["spec"]["podSets"]
    if not 1 <= len(sets) <= 18 or len({one["name"] for one in sets}) != len(sets):
        raise RefusedError("spec.podSets: 1 to 18, of different names")
    if new["spec"].get("priorityClassRef") is not None and new["spec"].get("priority") is None:
        raise RefusedError("spec.priority: must be set together with priorityClassRef")
    if not any(owner.get("controller") for owner in new["metadata"].get("ownerReferences", ())):
        raise RefusedError(
            "metadata.ownerReferences: the job reconciler needs a controller"
        )  # Kueue itself crashes here
    if old is None:
        return
    if is_true(old, "QuotaReserved") and is_true(new, "QuotaReserved"):
        for name in ("podSets", "queueName"):
            if old["spec"].get(name) != new["spec"].get(name):
                raise RefusedError(f"spec.{name}: immutable while quota is reserved")
    before, after = (each.get("status", {}).get("admission") for each in (old, new))
    if before is not None and after not in (None, before):
        raise RefusedError("status.admission: immutable once set")


def condition(one: Json, kind: str) -> Json:
    """Return one condition, empty if it does not exist."""
    found: Json = next((c for c in one.get("status", {}).get("conditions", ()) if c["type"] == kind), {})
    return found


def is_true(one: Json, kind: str) -> bool:
    """Return whether a condition holds."""
    return bool(condition(one, kind).get("status") == "True")


def counts(one: Json) -> bool:
    """Return whether Kueue counts quota for a Workload."""
    return is_true(one, "QuotaReserved") and one["spec"].get("active") is not False and not is_true(one, "Finished")


def may_have_pods(one: Json | None) -> bool:
    """Return whether a run may have pods: only while its quota is counted and its Workload exists."""
    return one is not None and bool(one.get("status", {}).get("admission")) and not is_true(one, "Finished")
