"""The number of engines of a run that is under way: autoscaling's choice, and engines that go only when nobody uses them.

    choice on record -> its number in the Lease's annotation -> the orchestrator drains that many -> it names them in the Lease
    -> their pods get the lowest deletion cost -> the Deployment gets fewer replicas

State is in the API's objects alone: `status.inference.desired`, the Lease, the Deployment. A Deployment may remove another pod than the
cheapest; its requests move, and the orchestrator takes the drained one back.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from rlrun.protocol.messages import annotations as keys
from rlrun.protocol.messages.spot_wish import SpotWish
from rlrun_operator.decide import stall
from rlrun_operator.decide.engines.autoscale import Choice, Rules, choose
from rlrun_operator.decide.reading.children import is_ending, replicas, uid_of
from rlrun_operator.decide.snapshot import Case
from rlrun_operator.names import Ref
from rlrun_operator.pods import Pod
from rlrun_operator.state import Annotate, Manifest, Scale
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
    pools, block = _pools(case), case.spec.inference.autoscale
    if block is None and told is None and all(replicas(pool.deployment) <= pool.engines for pool in pools):
        return []
    known = lease["metadata"].get("annotations") or {}
    wishes = {keys.ENGINES_WANTED: str(max(case.wanted.engines, sum(pool.engines for pool in pools)))}
    if block is not None:
        wishes[keys.ENGINES_WINDOW] = str(block.stabilization_seconds)
    if case.has_spot or case.spot_deployment is not None or keys.ENGINES_SPOT in known:
        wishes[keys.ENGINES_SPOT] = _spot_wish(case)
    if wishes.items() <= known.items():
        return []
    return [Annotate(Ref("Lease", case.names.progress), uid_of(lease), wishes)]


def _spot_wish(case: Case) -> str:
    """Wanted spot engines, and the addresses by which the orchestrator knows which these are."""
    found = [(pod.manifest.get("status") or {}).get("podIP") for pod in _live(case) if pod.spot]
    return SpotWish.of(case.wanted.spot, [str(address) for address in found if address]).text()


@dataclass(frozen=True)
class _Pool:
    """One Deployment of engines."""

    ref: Ref
    deployment: Manifest
    engines: int
    """Number that it is to have now."""
    spot: bool


def _pools(case: Case) -> list[_Pool]:
    """The Deployments of engines that exist, with the number that each is to have.

    An ordinary engine goes only when a spot engine is ready in its place: an edit of `inference.spot`, or nodes that never come, must not
    leave the run with fewer than it asks for. One that is lost later is not replaced by an ordinary one.
    """
    wanted, spot = case.wanted.engines, case.wanted.spot
    result = []
    if case.deployment is not None:
        there = min(spot, sum(1 for pod in _live(case) if pod.spot and pod.ready))
        number = max(wanted - spot, min(replicas(case.deployment), wanted - there))
        result.append(_Pool(case.inference_ref, case.deployment, number, spot=False))
    if case.spot_deployment is not None:
        result.append(_Pool(case.spot_ref, case.spot_deployment, spot, spot=True))
    return [pool for pool in result if not is_ending(pool.deployment)]


def _live(case: Case) -> list[Pod]:
    return [pod for pod in case.pods if pod.role == "inference" and pod.deleted_at is None]


def scaled(case: Case, heard: progress.Report | None) -> tuple[list[Annotate], list[Scale]]:
    """Writes that bring the Deployments to the wanted numbers: more at once, fewer once they are drained."""
    marks, scales = list[Annotate](), list[Scale]()
    for pool in _pools(case) if case.spec is not None else ():
        now, number = replicas(pool.deployment), pool.engines
        if now == number:
            continue
        drained: list[Pod] = []
        if now > number and _must_drain(case, heard):
            assert heard is not None
            live = [pod for pod in _live(case) if pod.spot == pool.spot]
            drained = _named(live, heard.drained or ())
            in_use = [pod for pod in live if pod.ready and pod not in drained]
            number = min(now, max(number, len(in_use)))
        if number != now:
            marks += [Annotate(pod.ref, pod.uid, {DELETION_COST: DRAINED_COST}) for pod in drained]
            scales.append(Scale(pool.ref, uid_of(pool.deployment), number))
    return marks, scales


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
