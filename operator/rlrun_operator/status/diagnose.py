"""Reason why a run waits: storage, nodes, containers and engines, each in words that name the role and the fix. First match wins."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rlrun.defaults.words import shorten_text
from rlrun_operator.names import DEMONSTRATIONS_CONTAINER, MODEL_CONTAINER, ROLES, Role
from rlrun_operator.pods import Pod
from rlrun_operator.state import Manifest
from rlrun_operator.status import admission_limits, object_events, reasons
from rlrun_operator.status.conditions import ConditionUpdate
from rlrun_operator.status.pod_trouble import has_begun, pod_trouble
from rlrun_operator.status.scene import TEXT_MAX, Scene
from rlrun_operator.status.scheduling import waits_for_claim, why_unscheduled

MAKING_SECONDS = 2.0
"""The orchestrator's pod is the last one of an attempt to be made: a refusal may be so much older."""
_REFUSED = "FailedCreate"
"""Reason of the event of a controller, or of the operator itself, that may not create an object."""
_REFERENCES = (
    (re.compile(r"no PriorityClass with name (?P<name>\S+) was found"), "PriorityClass", "priorityClassName"),
    (re.compile(r'RuntimeClass "(?P<name>[^"]+)" not found'), "RuntimeClass", "runtimeClassName"),
    (re.compile(r"error looking up service account \S*?/(?P<name>[^/:\s]+):"), "ServiceAccount", "podTemplate"),
)
"""Refusals of pods that name an object which does not exist: words of Kubernetes, kind, field of the role."""
_CREATE_PREFIX = re.compile(r"^.*?(?:failed error: |Error creating: )", re.DOTALL)


def scheduled_condition(scene: Scene, patient: bool) -> ConditionUpdate:
    """Scheduled: every pod has a node."""
    if not patient:
        if _waits_for_claim_alone(scene):
            told = f"the pods wait for the volume of claim {scene.wanted.claim}: see StorageReady"
            return ConditionUpdate("False", reasons.SCHEDULING, told)
        if (unscheduled := _unscheduled_message(scene)) is not None:
            return unscheduled
        for role in ROLES:
            if len(scene.of(role)) < scene.wanted.count(role) and (refused := _refused_pods(scene, role)) is not None:
                return refused
        if (refused := _kept_out(scene)) is not None:
            return refused
    if all(len([p for p in scene.of(role) if p.node]) >= scene.wanted.count(role) for role in ROLES):
        return ConditionUpdate("True", reasons.ALL_SCHEDULED, "every pod has a node")
    return ConditionUpdate("False", reasons.SCHEDULING, "the pods are being created and given nodes")


def _waits_for_claim_alone(scene: Scene) -> bool:
    """True if the scheduler has not looked for nodes yet, because the run's claim has no volume."""
    unbound = ((scene.claim or {}).get("status") or {}).get("phase") != "Bound"
    return unbound and waits_for_claim(scene.pods)


def pods_ready(scene: Scene, patient: bool) -> ConditionUpdate:
    """PodsReady: the trainer's pods and the orchestrator."""
    trainers, orchestrators = scene.of("trainer"), scene.of("orchestrator")
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
            "False", reasons.MODEL_PREPARING, f"{preparing.role}: the init container is making the tiny model"
        )
    enough = {"trainer": len(done) >= scene.wanted.trainers, "orchestrator": bool(up)}
    missing = [role for role in enough if not enough[role]]
    told = f"; the orchestrator waits for {scene.waiting_on}" if scene.waiting_on and not patient else ""
    return ConditionUpdate("False", reasons.PODS_STARTING, f"{' and '.join(missing)}: not all pods are ready{told}")


def _prepares_model(pod: Pod) -> bool:
    return any(c.init and c.running and c.name in (DEMONSTRATIONS_CONTAINER, MODEL_CONTAINER) for c in pod.containers)


def inference_condition(scene: Scene, patient: bool) -> ConditionUpdate:
    """InferenceAvailable: enough engines answer."""
    engines = scene.engines
    ready = [pod for pod in engines if pod.ready]
    needed, wanted = scene.wanted.engines_needed, scene.wanted.engines
    if len(ready) >= needed:
        enough = "the engine is" if wanted == 1 else f"at least {needed} of {wanted} engines are"
        beside = f"; {scene.without}" if scene.without else ""
        return ConditionUpdate("True", reasons.ALL_READY, f"{enough} ready{beside}")
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


def not_made_again(events: Sequence[Manifest], kind: str, name: str) -> ConditionUpdate | None:
    """Refusal by admission of an object that was deleted; None: there is none."""
    event = object_events.newest_event(events, kind, name, reason=_REFUSED)
    if event is None:
        return None
    text = shorten_text(str(event.get("message")), TEXT_MAX)
    return admission_limits.kept_out(f"{kind} {name} was deleted and cannot be made again", text, "the run")


def facts_that_would_help(scene: Scene, updates: Mapping[str, ConditionUpdate]) -> bool:
    """True if events and nodes could explain what is not true yet; a loading engine or a first step needs no explanation."""
    unbound = updates[reasons.STORAGE_READY].status != "True" and scene.trouble is None
    if unbound or updates[reasons.SCHEDULED].status != "True":
        return True
    starting = [c for pod in scene.pods if not pod.ready for c in pod.containers if not c.running and c.exit is None]
    return nodes_would_help(scene, updates) or any(
        c.waiting_reason in ("ContainerCreating", "PodInitializing", "") for c in starting
    )


def nodes_would_help(scene: Scene, updates: Mapping[str, ConditionUpdate]) -> bool:
    """True if nodes could explain it: no node takes a pod, or the one that took it has not begun with it."""
    if updates[reasons.SCHEDULED].reason == reasons.UNSCHEDULABLE:
        return True
    return any(pod.node and not pod.mounted and not has_begun(pod) for pod in scene.pods)


def _unscheduled_message(scene: Scene) -> ConditionUpdate | None:
    """Message on pods that no node can take. A role whose pods can never be taken comes before one that only waits."""
    modes = ((scene.claim or {}).get("spec") or {}).get("accessModes") or ["ReadWriteMany"]
    one_node = scene.wanted.own_claim and "ReadWriteMany" not in modes
    found = [
        why_unscheduled(role, lost, scene.wanted.count(role), scene.nodes, scene.wanted.claim, one_node=one_node)
        for role in ROLES
        if (lost := [pod for pod in scene.of(role) if pod.unscheduled is not None and pod.node is None])
    ]
    told = [why.message for why in found if why.for_good] or [why.message for why in found[:1]]
    return ConditionUpdate("False", reasons.UNSCHEDULABLE, ". Also: ".join(told)) if told else None


def _refused_pods(scene: Scene, role: Role) -> ConditionUpdate | None:
    """Reason why the role's pods cannot be created: quota, Pod Security, another admission."""
    if role == "inference" and not scene.engines_refused:
        return None
    names = scene.names
    makers = {
        "trainer": (("StatefulSet", names.trainer),),
        "inference": (("ReplicaSet", f"{names.inference}-"), ("Deployment", names.inference)),
        "orchestrator": (("Pod", f"{names.run}-orchestrator-"),),
    }[role]
    since = _refusals_count_from(scene, role)
    events = (
        [event for event in scene.events if since is not None and object_events.event_time(event) >= since]
        if role != "orchestrator"
        else scene.events
    )
    spot = f"{names.spot}-"  # whose refusals keep nothing waiting
    events = [one for one in events if not str((one.get("involvedObject") or {}).get("name")).startswith(spot)]
    found = (object_events.newest_event(events, kind, name, reason=_REFUSED) for kind, name in makers)
    event = next((event for event in found if event is not None), None)
    if event is None:
        return None
    text = shorten_text(_CREATE_PREFIX.sub("", str(event.get("message"))), TEXT_MAX)
    if (limits := admission_limits.limit_refusal(role, text, f"{role}.resources", noun="its pods")) is not None:
        return limits
    if (reference := _missing_reference(role, text)) is not None:
        return reference
    taken = text.endswith("already exists")
    fix = (
        "that pod is not of this run; delete it, or give the run another name"
        if taken
        else f"change what {role}.podTemplate adds, or what the namespace's policy allows"
    )
    return ConditionUpdate("False", reasons.PODS_REFUSED, f"{role}: its pods are refused: {text}; {fix}")


def _missing_reference(role: Role, text: str) -> ConditionUpdate | None:
    """Refusal of pods that name an object which does not exist; None: it is another refusal."""
    for pattern, kind, field in _REFERENCES:
        if (found := pattern.search(text)) is not None:
            name = found["name"]
            told = f"{role}: {kind} {name} does not exist, and its pods name it; create it, or correct {role}.{field}"
            return ConditionUpdate("False", reasons.REFERENCE_NOT_FOUND, told)
    return None


def _refusals_count_from(scene: Scene, role: Role) -> float | None:
    """Time from which a controller may not make the role's pods: it made one, or had another template, before. None: it has none yet.

    Events live for an hour. These are all times of the control plane.
    """
    attempt = [pod.created_at for pod in scene.of("orchestrator")]
    if not attempt:
        return None
    return max([max(attempt) - MAKING_SECONDS, *(pod.created_at for pod in scene.of(role))])


def _kept_out(scene: Scene) -> ConditionUpdate | None:
    """Objects that admission keeps the operator itself from making, beside pods and the claim."""
    for event in scene.events:
        target, text = event.get("involvedObject") or {}, shorten_text(str(event.get("message")), TEXT_MAX)
        of_pods = target.get("kind") == "StatefulSet" and object_events.event_time(
            event
        )  # its controller's; an event of this process has no time
        if (
            event.get("reason") != _REFUSED
            or of_pods
            or target.get("kind") in ("Pod", "ReplicaSet", "PersistentVolumeClaim")
        ):
            continue
        return admission_limits.kept_out(f"{target.get('kind')} {target.get('name')} cannot be made", text, "the run")
    return None
