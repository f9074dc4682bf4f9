"""Causes that keep a scheduled pod from becoming ready: its image, its configuration, a mount, its node or its process."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlrun.defaults.words import shorten_text
from rlrun_operator.pods import Container, Pod
from rlrun_operator.status import object_events, reasons
from rlrun_operator.status.conditions import ConditionUpdate
from rlrun_operator.status.scene import TEXT_MAX, Scene

_PULLING = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
)
_UNSTARTABLE = ("CreateContainerError", "RunContainerError", "StartError", "ContainerCannotRun")
_KUBELET_WAITS = " cache: timed out waiting for the condition"
"""Part of FailedMount while a busy kubelet has not read a ConfigMap or a Secret yet; it retries shortly."""
_MISSING = re.compile(r"(secret|configmap) \"([^\"]+)\" not found", re.IGNORECASE)
_MISSING_KEY = re.compile(r"couldn't find key (\S+) in (secret|configmap) (?:[^/\s]+/)?([^/\s]+)", re.IGNORECASE)
_PULL_PREFIX = re.compile(r"^(?:Back-off pulling image \"[^\"]*\":? ?)?(?:ErrImagePull: )?")
"""Prefix that the kubelet adds to the registry's text only now and then; the status must not change with it."""


def pod_trouble(scene: Scene, pod: Pod, role: str) -> ConditionUpdate | None:
    """Return the cause that keeps a scheduled pod from becoming ready and that needs a user, or None."""
    for container in pod.containers:
        if (found := _container_trouble(pod, container, role, scene.tracker_secrets)) is not None:
            return found
    mounts = (
        object_events.newest_event(scene.events, "Pod", pod.name, reason=reason, uid=pod.uid)
        for reason in ("FailedMount", "FailedAttachVolume")
    )
    event = next((event for event in mounts if event is not None), None)
    if pod.mounted or has_begun(pod):
        return None
    if event is None or _KUBELET_WAITS in str(event.get("message")):
        return _silent_node(scene, pod, role)
    text = shorten_text(str(event.get("message")), TEXT_MAX)
    where = f" on node {pod.node}" if pod.node else ""
    missing = _MISSING.search(text)
    fix = (
        f"create {missing.group(1).lower()} {missing.group(2)} in the run's namespace, or correct {role}.podTemplate"
        if missing
        else f"check the volume of claim {scene.wanted.claim} and that its driver runs on that node"
    )
    return ConditionUpdate("False", reasons.MOUNT_FAILED, f"{role} pod {pod.name}: cannot mount{where}: {text}; {fix}")


def has_begun(pod: Pod) -> bool:
    """Return whether any container of the pod has ever started."""
    return any(c.running or c.exit is not None for c in pod.containers)


def _silent_node(scene: Scene, pod: Pod, role: str) -> ConditionUpdate | None:
    node = next((n for n in scene.nodes or () if n["metadata"]["name"] == pod.node), None)
    conditions = ((node or {}).get("status") or {}).get("conditions") or ()
    ready = next((c for c in conditions if c.get("type") == "Ready"), None)
    if ready is None or ready.get("status") == "True":
        return None
    why = shorten_text(f"{ready.get('reason')}: {ready.get('message')}", TEXT_MAX)
    fix = "it starts when the node is ready again; delete the pod to move it to another node"
    return ConditionUpdate(
        "False", reasons.NODE_NOT_READY, f"{role} pod {pod.name}: node {pod.node} is not ready ({why}); {fix}"
    )


def _container_trouble(pod: Pod, container: Container, role: str, secrets: Mapping[str, str]) -> ConditionUpdate | None:
    reason, message = container.waiting_reason, container.waiting_message
    if reason in _PULLING:
        text = shorten_text(_PULL_PREFIX.sub("", message), TEXT_MAX)
        fix = f"correct {role}.image, or set {role}.imagePullSecrets"
        error = f": {text}" if text else ""
        return ConditionUpdate(
            "False", reasons.IMAGE_PULL_FAILED, f"{role}: image {container.image} cannot be pulled{error}; {fix}"
        )
    if reason == "CreateContainerConfigError":
        error, fix = shorten_text(message, TEXT_MAX), _explain_missing(message, role, secrets)
        return ConditionUpdate("False", reasons.CONTAINER_CONFIG_INVALID, f"{role}: {error}; {fix}")
    if reason in _UNSTARTABLE:
        error = f"container {container.name} cannot be started: {shorten_text(message or reason, TEXT_MAX)}"
        return ConditionUpdate("False", reasons.CONTAINER_FAILING, f"{role}: {error}; correct {role}.image")
    end = container.exit
    if end is not None and end.code != 0 and (reason == "CrashLoopBackOff" or container.restarts > 0):
        why = (
            "was killed because it ran out of memory; raise " + f"{role}.resources.limits.memory"
            if end.reason == "OOMKilled"
            else "fails"
        )
        details = (
            f": {shorten_text(end.message, TEXT_MAX)}"
            if end.message
            else f"; see kubectl logs {pod.argument} -c {container.name} --previous"
        )
        message = f"{role}: container {container.name} {why} (exit code {end.code}){details}"
        return ConditionUpdate("False", reasons.CONTAINER_FAILING, message)
    return None


def _explain_missing(message: str, role: str, secrets: Mapping[str, str]) -> str:
    """Return the fix for a container that names a Secret, ConfigMap or key which does not exist."""
    object_missing, key_missing = _MISSING.search(message), _MISSING_KEY.search(message)
    if object_missing is not None:
        kind, name = object_missing.groups()
        create = f"create {kind.lower()} {name} in the run's namespace, or correct"
    elif key_missing is not None:
        key, kind, name = key_missing.groups()
        create = f"add the key {key} to {kind.lower()} {name}, or correct"
    else:
        return f"correct {role}.env and {role}.envFrom"
    of_tracker = secrets.get(name) if role == "orchestrator" and kind.lower() == "secret" else None
    return f"{create} {of_tracker or f'{role}.env and {role}.envFrom'}"
