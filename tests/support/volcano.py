"""A stand-in for Volcano: phases and gang binding of PodGroups as its scheduler decides them (sources of v1.14).

It is pure on manifests, so that it works with an API in memory and with a real API server. A queue admits a limited
number of groups at once; nodes have room for a limited number of pods.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

Json = dict[str, Any]
GROUP = "scheduling.k8s.io/group-name"
TASK = "volcano.sh/task-spec"
OVERUSED = "queue resource quota insufficient: insufficient nvidia.com/gpu"


class StandIn:
    """Volcano's scheduler.

    Args:
        rooms: number of PodGroups that it admits at once.
        nodes: number of pods that all nodes together accept.
        queues: existing queues with their states.
    """

    def __init__(self, rooms: int = 1, nodes: int = 99, queues: tuple[str, ...] = ("team-a", "default")) -> None:
        self.rooms = rooms
        self.nodes = nodes
        self.queues = dict.fromkeys(queues, "Open")
        self.session = 0

    def act(self, groups: list[Json], pods: list[Json]) -> list[Json]:
        """Run one session over all groups; return the changed ones. Groups of an unknown queue stay unchanged."""
        self.session += 1
        changed = []
        held = sum(1 for one in groups if _phase(one) not in ("", "Pending"))
        for before in groups:
            after = copy.deepcopy(before)
            if before["spec"].get("queue", "default") not in self.queues:
                continue
            status = after.setdefault("status", {})
            if _phase(after) in ("", "Pending"):
                opened = self.queues[before["spec"]["queue"]] == "Open" and held < self.rooms
                status["phase"] = "Inqueue" if opened else "Pending"
                held += opened
            self._judge(after, members(after, pods))
            if _without_times(after) != _without_times(before):
                changed.append(after)
        return changed

    def _judge(self, group: Json, mine: list[Json]) -> None:
        status, least = group["status"], group["spec"]["minMember"]
        scheduled = [pod for pod in mine if pod["spec"].get("nodeName") and "deletionTimestamp" not in pod["metadata"]]
        running = [pod for pod in scheduled if pod["status"].get("phase") == "Running"]
        stuck = bool(mine) and len(scheduled) < least
        if mine:
            reason, message = "tasks in gang are ready to be scheduled", ""
            if stuck:
                reason, message = (
                    "NotEnoughResources",
                    f"{least - len(scheduled)}/{len(mine)} tasks in gang unschedulable",
                )
            kind = "Unschedulable" if stuck else "Scheduled"
            others = [one for one in status.get("conditions", ()) if one["type"] != kind]
            same = [one for one in status.get("conditions", ()) if one["type"] == kind and one["message"] == message]
            when = f"2026-01-01T{self.session // 3600:02}:{self.session // 60 % 60:02}:{self.session % 60:02}Z"
            new = {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": when}
            status["conditions"] = [*others, same[0] if same and not others else new]
        status["running"] = len(running)
        if running and stuck:
            status["phase"] = "Unknown"
        elif len(scheduled) >= least:
            status["phase"] = "Running"
        elif status["phase"] != "Inqueue":
            status["phase"] = "Pending"

    def binds(self, groups: list[Json], pods: list[Json]) -> list[Json]:
        """Return pods that get nodes: in an admitted group, none before its minimum fits, and then the others."""
        bound: list[Json] = []
        taken = sum(1 for pod in pods if pod["spec"].get("nodeName") and "deletionTimestamp" not in pod["metadata"])
        for group in groups:
            mine = [pod for pod in members(group, pods) if "deletionTimestamp" not in pod["metadata"]]
            waiting = [pod for pod in mine if not pod["spec"].get("nodeName")]
            by_role = Counter(pod["metadata"]["annotations"].get(TASK, "") for pod in mine)
            there = all(by_role[role] >= least for role, least in group["spec"].get("minTaskMember", {}).items())
            lacks = group["spec"]["minMember"] - (len(mine) - len(waiting))
            free = self.nodes - taken
            if _phase(group) in ("", "Pending") or not there or len(mine) < group["spec"]["minMember"] or free < lacks:
                continue
            bound += waiting[:free]
            taken += len(waiting[:free])
        return bound


def members(group: Json, pods: list[Json]) -> list[Json]:
    """Return pods of a group, by their annotation only."""
    name = group["metadata"]["name"]
    return [pod for pod in pods if (pod["metadata"].get("annotations") or {}).get(GROUP) == name]


def _phase(group: Json) -> str:
    return str((group.get("status") or {}).get("phase") or "")


def _without_times(group: Json) -> Json:
    """Return a status without times: a session without news writes nothing."""
    status = copy.deepcopy(group.get("status") or {})
    for one in status.get("conditions", ()):
        one.pop("lastTransitionTime")
    return dict(status)
