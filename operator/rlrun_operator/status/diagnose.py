"""Reason why a run waits: nodes, pods and engines, and the order of all conditions of a start.

Storage comes first, with the condition of `claim_messages`. A scheduled pod may not become ready because of its image, its configuration, a
mount, its node or its process. Messages name the role and the fix; the first match wins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from rlrun.runtime.printable import shorten_text
from rlrun_operator.names import DEMONSTRATIONS_CONTAINER, MODEL_CONTAINER, ROLES, Role
from rlrun_operator.pods import Container, Pod
from rlrun_operator.state import Manifest
from rlrun_operator.status import claim_messages, reasons, wait_facts
from rlrun_operator.status.conditions import ConditionUpdate
from rlrun_operator.status.scheduling import waits_for_claim, why_unscheduled
from rlrun_operator.status.wait_facts import TEXT_MAX, Scene

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
        wait_facts.newest_event(scene.events, "Pod", pod.name, reason=reason, uid=pod.uid)
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
            else f"; see kubectl logs {pod.kubectl_argument} -c {container.name} --previous"
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


MAKING_SECONDS = 2.0
"""The operator creates the orchestrator's pod last, so a refusal may be this much older than that pod."""
_REFUSED = "FailedCreate"
"""Event reason of a controller, or of the operator itself, that was not allowed to create an object."""
_REFERENCES = (
    (re.compile(r"no PriorityClass with name (?P<name>\S+) was found"), "PriorityClass", "priorityClassName"),
    (re.compile(r'RuntimeClass "(?P<name>[^"]+)" not found'), "RuntimeClass", "runtimeClassName"),
    (re.compile(r"error looking up service account \S*?/(?P<name>[^/:\s]+):"), "ServiceAccount", "podTemplate"),
)
"""Refusals of pods that name an object which does not exist: text of Kubernetes, kind, field of the role."""
_CREATE_PREFIX = re.compile(r"^.*?(?:failed error: |Error creating: )", re.DOTALL)


def scheduled_condition(scene: Scene, patient: bool) -> ConditionUpdate:
    """Return Scheduled: whether every pod has a node."""
    if not patient:
        if _waits_for_claim_only(scene):
            message = f"the pods wait for the volume of claim {scene.wanted.claim}: see StorageReady"
            return ConditionUpdate("False", reasons.SCHEDULING, message)
        if (unscheduled := _unscheduled_message(scene)) is not None:
            return unscheduled
        for role in ROLES:
            if (
                len(scene.pods_of_role(role)) < scene.wanted.count(role)
                and (refused := _refused_pods(scene, role)) is not None
            ):
                return refused
        if (refused := _kept_out(scene)) is not None:
            return refused
    if all(len([p for p in scene.pods_of_role(role) if p.node]) >= scene.wanted.count(role) for role in ROLES):
        return ConditionUpdate("True", reasons.ALL_SCHEDULED, "every pod has a node")
    return ConditionUpdate("False", reasons.SCHEDULING, "the pods are being created and assigned to nodes")


def _waits_for_claim_only(scene: Scene) -> bool:
    """Return whether the scheduler has not considered any node yet because the run's claim has no volume."""
    unbound = ((scene.claim or {}).get("status") or {}).get("phase") != "Bound"
    return unbound and waits_for_claim(scene.pods)


def pods_ready_condition(scene: Scene, patient: bool) -> ConditionUpdate:
    """Return PodsReady: the state of the trainer's pods and of the orchestrator."""
    trainers, orchestrators = scene.pods_of_role("trainer"), scene.pods_of_role("orchestrator")
    done = [pod for pod in trainers if pod.ready or pod.exited_cleanly]
    up = [pod for pod in orchestrators if pod.ready]
    if len(done) >= scene.wanted.trainers and up:
        who = "the trainer's pods and the orchestrator are" if scene.wanted.trainers else "the orchestrator is"
        return ConditionUpdate("True", reasons.ALL_READY, f"{who} ready")
    troubles = (pod_trouble(scene, pod, pod.role) for pod in (*trainers, *orchestrators))
    if not patient and (found := next(filter(None, troubles), None)) is not None:
        return found
    if (preparing := next(filter(_prepares_model, (*trainers, *orchestrators)), None)) is not None:
        return ConditionUpdate(
            "False", reasons.MODEL_PREPARING, f"{preparing.role}: the init container is creating the tiny model"
        )
    enough = {"trainer": len(done) >= scene.wanted.trainers, "orchestrator": bool(up)}
    missing = [role for role in enough if not enough[role]]
    waits = f"; the orchestrator waits for {scene.waiting_on}" if scene.waiting_on and not patient else ""
    return ConditionUpdate("False", reasons.PODS_STARTING, f"{' and '.join(missing)}: not all pods are ready{waits}")


def _prepares_model(pod: Pod) -> bool:
    return any(c.init and c.running and c.name in (DEMONSTRATIONS_CONTAINER, MODEL_CONTAINER) for c in pod.containers)


def inference_condition(scene: Scene, patient: bool) -> ConditionUpdate | None:
    """Return InferenceAvailable: whether enough engines are ready; a run without engines does not have this condition."""
    if not scene.wanted.engines:
        return None
    engines = scene.engines
    ready = [pod for pod in engines if pod.ready]
    needed, wanted = scene.wanted.engines_needed, scene.wanted.engines
    if len(ready) >= needed:
        enough = "the engine is" if wanted == 1 else f"at least {needed} of {wanted} engines are"
        spot_note = f"; {scene.without}" if scene.without else ""
        return ConditionUpdate("True", reasons.ALL_READY, f"{enough} ready{spot_note}")
    short = "the engine is not ready" if wanted == 1 else f"fewer than {needed} of {wanted} engines are ready"
    if not patient:
        for pod in engines:
            if not pod.ready and (found := pod_trouble(scene, pod, "inference")) is not None:
                return ConditionUpdate("False", found.reason, f"{found.message} ({short})")
    if any(pod.main is not None and pod.main.running for pod in engines):
        which = "it is" if wanted == 1 else "one is"
        return ConditionUpdate(
            "False", reasons.ENGINE_LOADING, f"{short}: {which} loading the model, or waits for its first weights"
        )
    return ConditionUpdate(
        "False", reasons.PODS_STARTING, f"{short}: {'its container is' if wanted == 1 else 'containers are'} starting"
    )


SceneCondition = Callable[[Scene, bool], ConditionUpdate | None]
"""Function of one condition: scene, and whether a healthy start may still take this long. None: the run lacks the condition."""

SCENE_CONDITIONS: Mapping[str, SceneCondition] = {
    reasons.STORAGE_READY: claim_messages.storage_condition,
    reasons.SCHEDULED: scheduled_condition,
    reasons.PODS_READY: pods_ready_condition,
    reasons.INFERENCE_AVAILABLE: inference_condition,
}
"""Conditions that depend on pods, claim, events and nodes, each with its function, in the order in which a start passes them."""


def scene_conditions(
    scene: Scene, is_patient: Callable[[str], bool], kinds: Iterable[str] = SCENE_CONDITIONS
) -> dict[str, ConditionUpdate]:
    """Return the conditions of `SCENE_CONDITIONS` that the run has.

    Args:
        scene: facts about the run's pods, claim, events and nodes.
        is_patient: whether the condition of this type may still be false in a healthy start.
        kinds: condition types to return.
    """
    updates = ((kind, SCENE_CONDITIONS[kind](scene, is_patient(kind))) for kind in kinds)
    return {kind: update for kind, update in updates if update is not None}


def not_made_again(events: Sequence[Manifest], kind: str, name: str) -> ConditionUpdate | None:
    """Return the refusal by admission of an object that was deleted and cannot be created again, or None."""
    event = wait_facts.newest_event(events, kind, name, reason=_REFUSED)
    if event is None:
        return None
    text = shorten_text(str(event.get("message")), TEXT_MAX)
    return claim_messages.kept_out(f"{kind} {name} was deleted and cannot be created again", text, "the run")


def facts_that_would_help(scene: Scene, updates: Mapping[str, ConditionUpdate]) -> bool:
    """Return whether events and nodes could explain a false condition; a loading engine or a first step needs no explanation."""
    unbound = updates[reasons.STORAGE_READY].status != "True" and scene.trouble is None
    if unbound or updates[reasons.SCHEDULED].status != "True":
        return True
    starting = [c for pod in scene.pods if not pod.ready for c in pod.containers if not c.running and c.exit is None]
    return nodes_would_help(scene, updates) or any(
        c.waiting_reason in ("ContainerCreating", "PodInitializing", "") for c in starting
    )


def nodes_would_help(scene: Scene, updates: Mapping[str, ConditionUpdate]) -> bool:
    """Return whether nodes could explain the wait: no node accepts a pod, or a pod's node has not started its containers."""
    if updates[reasons.SCHEDULED].reason == reasons.UNSCHEDULABLE:
        return True
    return any(pod.node and not pod.mounted and not has_begun(pod) for pod in scene.pods)


def _unscheduled_message(scene: Scene) -> ConditionUpdate | None:
    """Return the condition for pods that no node accepts. A role that can never be scheduled comes before one that only waits."""
    modes = ((scene.claim or {}).get("spec") or {}).get("accessModes") or ["ReadWriteMany"]
    one_node = scene.wanted.own_claim and "ReadWriteMany" not in modes
    causes = [
        why_unscheduled(role, lost, scene.wanted.count(role), scene.nodes, scene.wanted.claim, one_node=one_node)
        for role in ROLES
        if (lost := [pod for pod in scene.pods_of_role(role) if pod.unscheduled is not None and pod.node is None])
    ]
    messages = [cause.message for cause in causes if cause.for_good] or [cause.message for cause in causes[:1]]
    return ConditionUpdate("False", reasons.UNSCHEDULABLE, ". Also: ".join(messages)) if messages else None


def _refused_pods(scene: Scene, role: Role) -> ConditionUpdate | None:
    """Return why the role's pods cannot be created: a quota, Pod Security or another admission."""
    if role == "inference" and not scene.engines_refused:
        return None
    names = scene.names
    makers = {
        "trainer": (("StatefulSet", names.trainer),),
        "inference": (("ReplicaSet", f"{names.inference}-"), ("Deployment", names.inference)),
        "orchestrator": (("Pod", f"{names.run}-orchestrator-"),),
    }[role]
    # Events live for an hour: skip refusals that the controller has overcome since.
    since = _refusals_count_from(scene, role)
    events = (
        [event for event in scene.events if since is not None and wait_facts.event_time(event) >= since]
        if role != "orchestrator"
        else scene.events
    )
    spot = f"{names.spot}-"  # the run does not wait for spot engines
    events = [e for e in events if not str((e.get("involvedObject") or {}).get("name")).startswith(spot)]
    found = (wait_facts.newest_event(events, kind, name, reason=_REFUSED) for kind, name in makers)
    event = next((event for event in found if event is not None), None)
    if event is None:
        return None
    text = shorten_text(_CREATE_PREFIX.sub("", str(event.get("message"))), TEXT_MAX)
    if (limits := claim_messages.limit_refusal(role, text, f"{role}.resources", noun="its pods")) is not None:
        return limits
    if (reference := _missing_reference(role, text)) is not None:
        return reference
    taken = text.endswith("already exists")
    fix = (
        "that pod belongs to something else; delete it, or rename the run"
        if taken
        else f"change what {role}.podTemplate adds, or what the namespace's policy allows"
    )
    return ConditionUpdate("False", reasons.PODS_REFUSED, f"{role}: its pods are refused: {text}; {fix}")


def _missing_reference(role: Role, text: str) -> ConditionUpdate | None:
    """Return the condition for pods that name an object which does not exist, or None for another refusal."""
    for pattern, kind, field in _REFERENCES:
        if (found := pattern.search(text)) is not None:
            name = found["name"]
            message = f"{role}: its pods name {kind} {name}, which does not exist; create it, or correct {role}.{field}"
            return ConditionUpdate("False", reasons.REFERENCE_NOT_FOUND, message)
    return None


def _refusals_count_from(scene: Scene, role: Role) -> float | None:
    """Return the time from which a refusal counts, or None if the controller has no pods of this attempt yet.

    Before this time the controller created a pod successfully, or used the template of an earlier attempt. Events live for an hour.
    All times come from the control plane's clock.
    """
    attempt = [pod.created_at for pod in scene.pods_of_role("orchestrator")]
    if not attempt:
        return None
    return max([max(attempt) - MAKING_SECONDS, *(pod.created_at for pod in scene.pods_of_role(role))])


def _kept_out(scene: Scene) -> ConditionUpdate | None:
    """Return the condition for refused objects that the operator itself creates, other than pods and the claim."""
    for event in scene.events:
        target, text = event.get("involvedObject") or {}, shorten_text(str(event.get("message")), TEXT_MAX)
        # A StatefulSet's own controller reports refused pods with a time; an event of this process has no time.
        of_pods = target.get("kind") == "StatefulSet" and wait_facts.event_time(event)
        if (
            event.get("reason") != _REFUSED
            or of_pods
            or target.get("kind") in ("Pod", "ReplicaSet", "PersistentVolumeClaim")
        ):
            continue
        return claim_messages.kept_out(f"{target.get('kind')} {target.get('name')} cannot be created", text, "the run")
    return None
