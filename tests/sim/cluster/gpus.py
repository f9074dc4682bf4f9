"""GPU time of pods as the cluster counts it, by the cluster's own clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlrun_operator.names import run_uid_of
from rlrun_operator.times import seconds_of

Json = dict[str, Any]


@dataclass
class PodTime:
    """One pod with GPUs."""

    run: str
    """UID of its run."""
    gpus: int
    bound: float
    end: float | None = None
    """Time when all its containers had ended or it was removed."""
    deadline: float | None = None
    """End of its grace period."""
    listed: bool = False
    """Whether a record of the operator contained it."""
    left: float | None = None
    """End of the counted time in the first record without it."""

    def held(self, until: float) -> float:
        """Return the GPU-seconds up to a time."""
        end = until if self.end is None else min(self.end, until)
        return self.gpus * max(0.0, end - self.bound)


class GpuTime:
    """All pods that ever had a node and GPUs, by UID."""

    def __init__(self) -> None:
        self.pods: dict[str, PodTime] = {}

    def saw(self, event: str, pod: Json, now: float) -> None:
        """Record a change of a pod."""
        uid = pod["metadata"]["uid"]
        known = self.pods.get(uid)
        if known is None:
            limits = [(c.get("resources") or {}).get("limits") or {} for c in pod["spec"].get("containers") or ()]
            gpus = sum(int(limit.get("nvidia.com/gpu", 0)) for limit in limits)
            if "nodeName" not in pod["spec"] or not gpus:
                return
            known = self.pods[uid] = PodTime(str(run_uid_of(pod["metadata"])), gpus, now)
        known.deadline = seconds_of(pod["metadata"].get("deletionTimestamp"))
        if known.end is None and (event == "DELETED" or pod["status"]["phase"] in ("Succeeded", "Failed")):
            known.end = now
