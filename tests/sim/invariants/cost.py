"""Rules of reported costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlrun_operator.times import seconds_of

if TYPE_CHECKING:
    from tests.sim.cluster.gpus import PodTime
    from tests.sim.world import World

Json = dict[str, Any]
ROUNDING_SECONDS = 2
"""Rounding of a pod's time, whose start and end are whole seconds."""


def what_is_counted_was_held(world: World, old: Json, new: Json) -> str | None:
    """The sum over attempts and roles is the GPU time of the run's pods, except for times without an operator."""
    cost = new.get("cost")
    if cost is None or world.run is None or world.clock.was_set:
        return None
    until = seconds_of(cost["countedTo"])
    assert until is not None
    counted = sum(sum(row["gpuSeconds"].values()) for row in cost["attempts"])
    uid = world.run["metadata"]["uid"]
    pods = {name: pod for name, pod in world.api.gpu_time.pods.items() if pod.run == uid}
    _note(pods, cost["pods"], until)
    held = sum(pod.held(until) for pod in pods.values())
    rounding = sum(ROUNDING_SECONDS * pod.gpus for pod in pods.values())
    most = held + rounding + sum(_unheard(pod, until) for pod in pods.values())
    least = held - rounding - sum(_unseen(pod, until) for pod in pods.values())
    if least <= counted <= most:
        return None
    return f"{counted} GPU-seconds are counted; from {least:g} to {most:g} were held"


def what_is_counted_never_falls(world: World, old: Json, new: Json) -> str | None:
    before, now = old.get("cost") or {}, new.get("cost") or {}
    for use, seconds in (before.get("gpuSeconds") or {}).items():
        if (now.get("gpuSeconds") or {}).get(use, 0) < seconds:
            return f"{use}: {seconds} GPU-seconds became {(now.get('gpuSeconds') or {}).get(use, 0)}"
    return None


def the_parts_are_the_whole(world: World, old: Json, new: Json) -> str | None:
    cost = new.get("cost") or {}
    parts, whole = sum((cost.get("gpuSeconds") or {}).values()), 0
    for row in cost.get("attempts") or ():
        whole += sum(row["gpuSeconds"].values())
    hours = cost.get("gpuHours", 0.0)
    good = parts == whole and abs(hours * 3600 - whole) < 1
    return None if good else f"parts {parts}, attempts {whole}, hours {hours}"


def _note(pods: dict[str, PodTime], entries: list[str], until: float) -> None:
    counted = {entry.split("/")[0] for entry in entries if entry.split("/")[2] != "0"}
    known = {entry.split("/")[0] for entry in entries}
    for uid, pod in pods.items():
        pod.listed |= uid in known
        if pod.listed and pod.left is None and uid not in counted:
            pod.left = until


def _unheard(pod: PodTime, until: float) -> float:
    """Return the counted GPU-seconds after the unreported end of a pod."""
    end = pod.end
    return 0.0 if end is None else pod.gpus * max(0.0, (until if pod.left is None else pod.left) - end)


def _unseen(pod: PodTime, until: float) -> float:
    """Return the GPU-seconds of an unreported pod, or after the end of its grace period."""
    if not pod.listed:
        return pod.held(until)
    over = (until if pod.end is None else pod.end) - pod.deadline if pod.deadline is not None else 0.0
    return pod.gpus * max(0.0, over)
