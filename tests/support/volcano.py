"""A stand-in for Volcano: phases and gang binding of PodGroups as its scheduler decides them (sources of v1.14).

Pure on manifests, so that it plays against an API in memory and against a real API server. A queue lets so many groups in at once; nodes
take so many pods.
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
        rooms: PodGroups that it takes in at once.
        nodes: pods that all nodes together take.
        queues: that exist, with their states.
    """

    def __init__(self, rooms: int = 1, nodes: int = 99, queues: tuple[str, ...] = ("team-a", "default")) -> None:
        self.rooms = rooms
        self.nodes = nodes
        self.queues = dict.fromkeys(queues, "Open")
        self.session = 0

    def act(self, groups: list[Json], pods: list[Json]) -> list[Json]:
        """One session over all groups: those that it changes, changed. Of a queue that does not exist it knows none."""
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
            if _told(after) != _told(before):
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
        """Pods that get nodes: of a group that is let in, none before all that it needs have one, and then the others."""
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
    """Pods of a group, by their annotation alone."""
    name = group["metadata"]["name"]
    return [pod for pod in pods if (pod["metadata"].get("annotations") or {}).get(GROUP) == name]


def _phase(group: Json) -> str:
    return str((group.get("status") or {}).get("phase") or "")


def _told(group: Json) -> Json:
    """Status but for times: a session that finds nothing new writes nothing."""
    status = copy.deepcopy(group.get("status") or {})
    for one in status.get("conditions", ()):
        one.pop("lastTransitionTime")
    return dict(status)
