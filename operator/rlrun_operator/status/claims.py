"""StorageReady: state of the run's claim, and the edit and command that help if it gets no volume."""

from __future__ import annotations

import re

from rlrun.defaults.words import shorten_text
from rlrun_operator.state import Manifest
from rlrun_operator.status import admission_limits, object_events, reasons
from rlrun_operator.status.conditions import ConditionUpdate
from rlrun_operator.status.scene import TEXT_MAX, Scene
from rlrun_operator.status.scheduling import waits_for_claim
from rlrun_operator.times import seconds_of

_REFUSED = "FailedCreate"
_ACCESS_MODES = re.compile(r"access ?modes?\b|MULTI_NODE|multi.?writer|ReadWriteMany", re.IGNORECASE)
"""Words of storage drivers that make volumes of one node: local-path (kind), EBS, PD."""


def storage_condition(scene: Scene, patient: bool) -> ConditionUpdate:
    """StorageReady. `patient`: still within the time that a healthy start takes, so nothing is called a problem."""
    name, claim = scene.wanted.claim, scene.claim
    if claim is None:
        return _missing_claim(scene, patient)
    state = (claim.get("status") or {}).get("phase")
    if state == "Bound":
        return scene.trouble or ConditionUpdate(
            "True", reasons.CLAIM_BOUND, f"claim {name} is bound{_earlier_claim_note(scene, claim)}"
        )
    if state == "Lost":
        return ConditionUpdate(
            "False", reasons.CLAIM_LOST, f"claim {name} has lost its volume; restore the volume, or use another claim"
        )
    of_class = (claim.get("spec") or {}).get("storageClassName")
    event = object_events.newest_event(scene.events, "PersistentVolumeClaim", name, uid=claim["metadata"].get("uid"))
    told = shorten_text(str(event.get("message")), TEXT_MAX) if event else ""
    outdated = _explain_outdated(scene, claim)
    if (told or outdated or waits_for_claim(scene.pods)) and not patient:
        return ConditionUpdate("False", reasons.CLAIM_PENDING, _unbound_message(scene, claim, told, outdated))
    named = f" (StorageClass {of_class})" if of_class else ""
    return ConditionUpdate("False", reasons.CLAIM_WAITING, f"claim {name}{named} waits for its volume")


def _missing_claim(scene: Scene, patient: bool) -> ConditionUpdate:
    """StorageReady of a run without its claim."""
    name = scene.wanted.claim
    refused = object_events.newest_event(scene.events, "PersistentVolumeClaim", name, reason=_REFUSED)
    if refused is not None:
        text = shorten_text(str(refused.get("message")), TEXT_MAX)
        return admission_limits.kept_out(f"claim {name} cannot be made", text, "storage.claimTemplate.size")
    if scene.wanted.own_claim or patient:
        return ConditionUpdate("False", reasons.CLAIM_WAITING, f"claim {name} is being made")
    fix = "create it in the run's namespace, or correct storage.claimName"
    return ConditionUpdate(
        "False", reasons.CLAIM_NOT_FOUND, f"storage.claimName: there is no PersistentVolumeClaim {name}; {fix}"
    )


def _unbound_message(scene: Scene, claim: Manifest, told: str, outdated: str) -> str:
    """Message on a claim without a volume."""
    name, spec = scene.wanted.claim, claim.get("spec") or {}
    of_class = spec.get("storageClassName")
    head = f"claim {name} of StorageClass {of_class} is not bound"
    if not of_class:
        head = f"claim {name} names no StorageClass and is not bound"
    head = f"{head}: {told or 'nothing makes a volume for it'}"
    if not scene.wanted.own_claim:
        return f"{head}; repair the claim, or name another one in storage.claimName"
    again = f"kubectl -n {scene.namespace} delete pvc {name}"
    if outdated:
        return f"{head}; {outdated}: {again}, and it is made again as storage.claimTemplate asks"
    if _ACCESS_MODES.search(told) and "ReadWriteMany" in (spec.get("accessModes") or ()):
        fix = (
            "name a StorageClass whose volumes many nodes can mount in storage.claimTemplate.storageClassName, or set "
            "storage.claimTemplate.accessModes to [ReadWriteOnce], which puts all pods on one node"
        )
    elif of_class:
        fix = "correct storage.claimTemplate.storageClassName (kubectl get storageclass lists them)"
    else:
        fix = "set storage.claimTemplate.storageClassName, or give the cluster a default StorageClass"
    return f"{head}; {fix}; then {again}: it is made again"


def _explain_outdated(scene: Scene, claim: Manifest) -> str:
    """Reason why an unbound claim of the run's name is not the one that the specification asks for; empty: it is."""
    if not scene.wanted.own_claim or scene.template is None:
        return ""
    if _is_older(scene, claim):
        return "an earlier run of this name has left it"
    spec, template = claim.get("spec") or {}, scene.template
    other_class = template.storage_class_name not in (None, spec.get("storageClassName"))
    other_modes = sorted(spec.get("accessModes") or template.access_modes) != sorted(template.access_modes)
    return "it was made before storage.claimTemplate was edited" if other_class or other_modes else ""


def _earlier_claim_note(scene: Scene, claim: Manifest) -> str:
    """Addition to the message on a bound claim that an earlier run of this name has left."""
    if not scene.wanted.own_claim or not _is_older(scene, claim):
        return ""
    again = f"kubectl -n {scene.namespace} delete pvc {scene.wanted.claim}"
    return f"; an earlier run of this name has left it with its data, and `{again}` removes both"


def _is_older(scene: Scene, claim: Manifest) -> bool:
    made = seconds_of(claim["metadata"].get("creationTimestamp"))
    return made is not None and scene.born is not None and made < scene.born
