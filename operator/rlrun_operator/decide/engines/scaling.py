"""The number of engines of a run that is under way: autoscaling's choice, and engines that go only when nobody uses them.

    choice on record -> its number in the Lease's annotation -> the orchestrator drains that many -> it names them in the Lease
    -> their pods get the lowest deletion cost -> the Deployment gets fewer replicas

State is in the API's objects alone: `status.inference.desired`, the Lease, the Deployment. A Deployment may remove another pod than the
cheapest; its requests move, and the orchestrator takes the drained one back.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from rlrun.protocol.messages import annotations as keys
from rlrun_operator.decide import stall
from rlrun_operator.decide.engines.autoscale import Choice, Rules, choose
from rlrun_operator.decide.snapshot import Case, is_ending, replicas, uid_of
from rlrun_operator.names import Ref
from rlrun_operator.pods import Pod
from rlrun_operator.state import Annotate, Scale
from rlrun_operator.status import progress
from rlrun_operator.status.change import NO_CHANGE, StatusChange

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""Kubernetes' annotation: of pods that are as ready, the controller removes the cheapest first."""
DRAINED_COST = "-1000"


def chosen(case: Case, heard: progress.Report | None, change: StatusChange) -> StatusChange:
    """`status.inference` of `change` with the number of engines that is wanted from now on."""
    spec, inference = case.spec, change.values().get("inference")
    if spec is None or inference is None or spec.inference.autoscale is None or not case.serves:
        return NO_CHANGE
    block = spec.inference.autoscale
    rules = Rules(block.min, block.max, block.target_wait, block.stabilization_seconds)
    load = heard.load if heard is not None and _is_fresh(case, heard) else None
    choice = choose(case.past.inference.desired or case.wanted.engines, load, rules)
    return StatusChange(inference=inference.model_copy(update=_of(choice)))


def _of(choice: Choice) -> dict[str, object]:
    return {"desired": choice.engines} | ({"reason": choice.why} if choice.why else {})


def _is_fresh(case: Case, heard: progress.Report) -> bool:
    """True if the orchestrator reports on time: what it does not know any more is not acted on."""
    silent = progress.silent_for(stall.silent_since(case, heard), case.now)
    return silent < progress.HEARTBEAT_SECONDS and case.observed.lease_changed_at is not None


def asked(case: Case, heard: progress.Report | None) -> list[Annotate]:
    """The number of engines, where the orchestrator reads it; it drains those beyond."""
    lease, told = case.observed.lease, heard.engines_wanted if heard is not None else None
    if lease is None or heard is None or heard.drained is None or case.spec is None or not case.serves:
        return []
    engines, block = case.wanted.engines, case.spec.inference.autoscale
    if block is None and told is None and replicas(case.deployment) <= engines:
        return []
    wishes = {keys.ENGINES_WANTED: str(engines)}
    if block is not None:
        wishes[keys.ENGINES_WINDOW] = str(block.stabilization_seconds)
    if wishes.items() <= (lease["metadata"].get("annotations") or {}).items():
        return []
    return [Annotate(Ref("Lease", case.names.progress), uid_of(lease), wishes)]


def scaled(case: Case, heard: progress.Report | None) -> tuple[list[Annotate], list[Scale]]:
    """Writes that bring the Deployment to the wanted number: more at once, fewer once they are drained."""
    deployment, engines = case.deployment, case.wanted.engines
    if case.spec is None or deployment is None or is_ending(deployment) or replicas(deployment) == engines:
        return [], []
    number, marks = engines, list[Annotate]()
    if replicas(deployment) > engines and _must_drain(case, heard):
        live = [pod for pod in case.pods if pod.role == "inference" and pod.deleted_at is None]
        assert heard is not None
        drained = _named(live, heard.drained or ())
        in_use = [pod for pod in live if pod.ready and pod not in drained]
        number = min(replicas(deployment), max(engines, len(in_use)))
        marks = [Annotate(pod.ref, pod.uid, {DELETION_COST: DRAINED_COST}) for pod in drained]
    if number == replicas(deployment):
        return [], []
    return marks, [Scale(case.inference_ref, uid_of(deployment), number)]


def _must_drain(case: Case, heard: progress.Report | None) -> bool:
    """True if somebody may use the engines that are to go, and can say when nobody does any more.

    The engines of a silent orchestrator stay for autoscaling, which is in no hurry; for a person's edit they go at once.
    """
    if heard is None or heard.drained is None:
        return False
    automatic = case.spec is not None and case.spec.inference.autoscale is not None
    return automatic or _is_fresh(case, heard)


def _named(pods: Sequence[Pod], addresses: Sequence[str]) -> list[Pod]:
    """Pods with one of the addresses."""
    known = {_address(text) for text in addresses} - {None}
    return [pod for pod in pods if _address((pod.manifest.get("status") or {}).get("podIP")) in known]


def _address(text: object) -> str | None:
    """An address in its one form; None: it is none."""
    try:
        return str(ipaddress.ip_address(str(text)))
    except ValueError:
        return None
