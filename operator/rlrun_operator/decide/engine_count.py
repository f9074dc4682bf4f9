"""Number of engines of a run: autoscaling by load, and the steps from one number to another. Pure.

With n engines, the engines need (work / n) for a step, and the trainer needs a fixed time; the step takes the longer of both:

- The trainer waits for a share w of the time, and the engines have requests for a share b: with n b (1 - target) / (1 - w) engines that
  always have requests it waits for the target share. If it waits for something else (a slow environment, the last long answer, alternating
  phases), b is low, and more engines do not help.
- The trainer does not wait, and the engines have no request for a share i of the time: n (1 - i) engines would always be busy. The number
  falls to the engines that need `FULL` of their time for this work.

Between both is a band of 1 / (FULL (1 - target)), about a quarter, without changes, so that the number does not oscillate. Each window of
measurement starts with a change of the number, so that one measurement never causes two choices.

A running attempt reaches the chosen number in these steps:

    choice recorded -> its number in the Lease's annotation -> the orchestrator drains the others -> it reports them in the Lease
    -> their pods get the lowest deletion cost -> the Deployment gets fewer replicas

All state is in API objects: `status.inference.desired`, the Lease, the Deployment. A Deployment may remove a pod other than the cheapest;
then the requests of this pod move, and the orchestrator uses the drained engine again.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlrun.protocol.messages import lease_annotations as keys
from rlrun.protocol.messages.lease_annotations import EngineLoad, SpotWish
from rlrun_operator.decide import stall
from rlrun_operator.decide.reading import desired_replicas, is_ending, uid_of
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.names import Ref
from rlrun_operator.pods import Pod
from rlrun_operator.state import Annotate, Manifest, Scale
from rlrun_operator.status import run_progress
from rlrun_operator.status.conditions import NO_CHANGE, StatusChange

FULL = 0.85
"""Maximum busy share of engines after their number has fallen."""
KV_FULL = 0.9
"""Maximum use of the KV cache after the number of engines has fallen."""
QUEUED = 0.1
"""Ratio of waiting requests to requests in flight above which the number of engines does not fall."""
LEAST_STEPS = 2
"""Minimum number of steps in a window, because one step may be an exception."""
_MOST_WAITED = 0.99
_CLOSE = 1e-9
"""Tolerance for shares, which are quotients of floats."""


@dataclass(frozen=True)
class Rules:
    """Settings of a run.

    Attributes:
        least: minimum number of engines.
        most: maximum number of engines.
        target_wait: share of the time for which the trainer may wait for rollouts.
        stabilization_seconds: minimum length of the window of measurement.
    """

    least: int
    most: int
    target_wait: float
    stabilization_seconds: float


@dataclass(frozen=True)
class Choice:
    """Number of engines, and the reason for a change; empty: nothing changes."""

    engines: int
    why: str = ""


def choose_engines(wanted: int, load: EngineLoad | None, rules: Rules) -> Choice:
    """Return the new number of engines.

    Args:
        wanted: current number.
        load: measured load; None if the run is silent, or has no measurement yet.
        rules: settings of the run.
    """
    # New bounds apply at once: they are the user's, and need no measurement.
    within = min(max(wanted, rules.least), rules.most)
    if within != wanted:
        return Choice(within, f"autoscale is from {rules.least} to {rules.most}")
    # A window that is too short is not judged. Each change starts a new window, so no measurement causes two
    # changes.
    if load is None or load.steps < LEAST_STEPS or load.seconds < rules.stabilization_seconds:
        return Choice(wanted)
    if load.engines > wanted:
        return Choice(wanted)  # drained engines still exist
    # While engines of the last change are missing, `load.engines` is below `wanted`: these are not requested
    # a second time.
    if load.waited > rules.target_wait:
        more = min(_engines_to_add(load, rules.target_wait), rules.most) if load.engines == wanted else wanted
        return Choice(more, _describe_waiting_trainer(load, rules)) if more > wanted else Choice(wanted)
    # Half of the target: between both limits the number stays, so that it does not oscillate.
    if load.waited <= rules.target_wait / 2:
        fewer = max(_engines_to_keep(load), rules.least)
        return Choice(fewer, _describe_idle_engines(load)) if fewer < load.engines else Choice(wanted)
    return Choice(wanted)


def _engines_to_add(load: EngineLoad, target: float) -> int:
    """Return the number of engines with which the trainer waits for the target share; at most twice as many, and none without requests."""
    n = load.engines
    # Formula of the module's docstring. `_CLOSE` keeps a quotient like 3.0000000001 from requesting a fourth
    # engine.
    needed = math.ceil(n * load.busy * (1 - target) / (1 - min(load.waited, _MOST_WAITED)) - _CLOSE)
    # An engine without a request adds nothing, so there are at most as many engines as requests at a time.
    useful = math.floor(n * (load.requests + load.waiting) + _CLOSE)
    return min(needed, 2 * n, useful)


def _engines_to_keep(load: EngineLoad) -> int:
    """Return the number of engines that can do the same work with room in their KV caches; at least half as many."""
    n = load.engines
    # Waiting requests show that the engines are the limit, even if some were idle.
    if load.waiting > QUEUED * load.requests:
        return n
    busy = math.ceil(n * (1 - load.idle) / FULL - _CLOSE)
    holds = math.ceil(n * load.kv / KV_FULL - _CLOSE)
    return max(busy, holds, math.ceil(n / 2), 1)


def _describe_waiting_trainer(load: EngineLoad, rules: Rules) -> str:
    return (
        f"with {load.engines} engines the trainer waited for rollouts {load.waited:.0%} of {load.seconds:.0f} s "
        f"(target {rules.target_wait:.0%})"
    )


def _describe_idle_engines(load: EngineLoad) -> str:
    return (
        f"{load.engines} engines had no request for {load.idle:.0%} of {load.seconds:.0f} s, and the trainer waited for "
        f"rollouts {load.waited:.0%}"
    )


DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""Annotation of Kubernetes: among equally ready pods the controller removes the cheapest first."""
DRAINED_COST = "-1000"


def with_chosen_engines(run: RunSnapshot, report: run_progress.Report | None, change: StatusChange) -> StatusChange:
    """Return `status.inference` of `change` with the new number of engines."""
    spec, inference = run.spec, change.values().get("inference")
    if spec is None or inference is None or spec.inference.autoscale is None or not run.has_own_engines:
        return NO_CHANGE
    block = spec.inference.autoscale
    rules = Rules(block.min, block.max, block.target_wait, block.stabilization_seconds)
    load = report.load if report is not None and _is_fresh(run, report) else None
    choice = choose_engines(run.past.inference.desired or run.wanted.engines, load, rules)
    return StatusChange(inference=inference.model_copy(update=_scaling_fields(choice)))


def _scaling_fields(choice: Choice) -> dict[str, object]:
    return {"desired": choice.engines} | ({"reason": choice.why} if choice.why else {})


def _is_fresh(run: RunSnapshot, report: run_progress.Report) -> bool:
    """Return whether the orchestrator reports on time: outdated reports are ignored."""
    silent = run_progress.silent_for(stall.silent_since(run, report), run.now)
    return silent < run_progress.HEARTBEAT_SECONDS and run.observed.lease_changed_at is not None


def announce_engines(run: RunSnapshot, report: run_progress.Report | None) -> list[Annotate]:
    """Return the annotation of the Lease with the number of engines; the orchestrator drains the surplus."""
    lease, told = run.observed.lease, report.engines_wanted if report is not None else None
    if lease is None or report is None or report.drained is None or run.spec is None or not run.has_own_engines:
        return []
    # A run with a fixed number of engines needs no annotation, and its Lease no write, until engines are
    # removed.
    pools, block = _engine_pools(run), run.spec.inference.autoscale
    if block is None and told is None and all(desired_replicas(pool.deployment) <= pool.engines for pool in pools):
        return []
    known = lease["metadata"].get("annotations") or {}
    wishes = {keys.ENGINES_WANTED: str(max(run.wanted.engines, sum(pool.engines for pool in pools)))}
    if block is not None:
        wishes[keys.ENGINES_WINDOW] = str(block.stabilization_seconds)
    if run.has_spot or run.spot_deployment is not None or keys.ENGINES_SPOT in known:
        wishes[keys.ENGINES_SPOT] = _spot_wish(run)
    if wishes.items() <= known.items():
        return []
    return [Annotate(Ref("Lease", run.names.progress), uid_of(lease), wishes)]


def _spot_wish(run: RunSnapshot) -> str:
    """Return the wanted number of spot engines, with their addresses, by which the orchestrator recognizes them."""
    found = [(pod.manifest.get("status") or {}).get("podIP") for pod in _live_engines(run) if pod.spot]
    return SpotWish.from_hosts(run.wanted.spot, [str(address) for address in found if address]).text()


@dataclass(frozen=True)
class _Pool:
    """One Deployment of engines."""

    ref: Ref
    deployment: Manifest
    engines: int
    """Wanted number of engines."""
    spot: bool


def _engine_pools(run: RunSnapshot) -> list[_Pool]:
    """Return the existing Deployments of engines with their wanted numbers.

    An ordinary engine is removed only if a spot engine is ready to replace it: after an edit of `inference.spot`, or without spot nodes,
    the run must not have fewer engines than specified. A spot engine that is lost later is not replaced by an ordinary one.
    """
    wanted, spot = run.wanted.engines, run.wanted.spot
    result = []
    if run.deployment is not None:
        # Spot engines that are not ready yet do not replace an ordinary one.
        there = min(spot, sum(1 for pod in _live_engines(run) if pod.spot and pod.ready))
        number = max(wanted - spot, min(desired_replicas(run.deployment), wanted - there))
        result.append(_Pool(run.inference_ref, run.deployment, number, spot=False))
    if run.spot_deployment is not None:
        result.append(_Pool(run.spot_ref, run.spot_deployment, spot, spot=True))
    return [pool for pool in result if not is_ending(pool.deployment)]


def _live_engines(run: RunSnapshot) -> list[Pod]:
    return [pod for pod in run.pods if pod.role == "inference" and pod.deleted_at is None]


def scale_pools(run: RunSnapshot, report: run_progress.Report | None) -> tuple[list[Annotate], list[Scale]]:
    """Return the writes that scale the Deployments to the wanted numbers: up at once, down after engines are drained."""
    marks, scales = list[Annotate](), list[Scale]()
    for pool in _engine_pools(run) if run.spec is not None else ():
        now, number = desired_replicas(pool.deployment), pool.engines
        if now == number:
            continue
        # A removed engine aborts its answers. Therefore the number falls only to the engines that the
        # orchestrator still uses; the next report may allow fewer.
        drained: list[Pod] = []
        if now > number and _must_drain(run, report):
            assert report is not None
            live = [pod for pod in _live_engines(run) if pod.spot == pool.spot]
            drained = _pods_at_addresses(live, report.drained or ())
            in_use = [pod for pod in live if pod.ready and pod not in drained]
            number = min(now, max(number, len(in_use)))
        if number != now:
            # The marks precede the new size, because the controller chooses pods when it observes the size.
            # Without them it may remove an engine in use.
            marks += [Annotate(pod.ref, pod.uid, {DELETION_COST: DRAINED_COST}) for pod in drained]
            scales.append(Scale(pool.ref, uid_of(pool.deployment), number))
    return marks, scales


def _must_drain(run: RunSnapshot, report: run_progress.Report | None) -> bool:
    """Return whether engines have to be drained before their removal, because an orchestrator uses them and reports drained ones.

    With a silent orchestrator, autoscaling keeps the engines, because it can wait; after an edit by a user they are removed at once.
    """
    if report is None or report.drained is None:
        return False
    automatic = run.spec is not None and run.spec.inference.autoscale is not None
    return automatic or _is_fresh(run, report)


def _pods_at_addresses(pods: Sequence[Pod], addresses: Sequence[str]) -> list[Pod]:
    """Return the pods with one of the addresses."""
    known = {_normalize_address(text) for text in addresses} - {None}
    return [pod for pod in pods if _normalize_address((pod.manifest.get("status") or {}).get("podIP")) in known]


def _normalize_address(text: object) -> str | None:
    """Return the canonical form of an address, or None if it is invalid."""
    try:
        return str(ipaddress.ip_address(str(text)))
    except ValueError:
        return None
