"""A run that lives and does not get on: its Lease is fresh, and its step is old.

    no first step    `progress.startupDeadlineSeconds` after all pods of the attempt were scheduled
    no next step     `progress.deadlineSeconds` after the last step, or the last activity that every step has a bounded number of

Both clocks run only while this operator watches, and within one attempt: its own start, an outage of the API server and a gap between two
renewals restart them. What the run waits for is known up to the last renewal of the Lease, so steps are judged up to then. A stale Lease
alone says nothing about them, nor does one that was never renewed: that is HeartbeatLost, which is reported only, as training goes on
without the API server. The kubelets are the second channel. An orchestrator that has not renewed its Lease three times over, and that its
own kubelet finds not ready either, hangs itself, or has found that its run does: after the deadline it is the one that the run waits for.
Where it had been silent long before it was not ready, the deadline begins then. The kubelet's word is that of the container: of a pod on a
lost node, others say that it is not ready.

The condition is written first; what follows from it is decided when it is on record.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rlrun.defaults.words import shorten
from rlrun.protocol.files.paths import RunPaths
from rlrun_operator.decide import host_run
from rlrun_operator.decide.objects import unstarted
from rlrun_operator.decide.snapshot import Case
from rlrun_operator.failures.detect import Cause, Kind
from rlrun_operator.names import ROLES, Names, Role
from rlrun_operator.pods import Pod
from rlrun_operator.state import SOON_SECONDS
from rlrun_operator.status import progress, reasons
from rlrun_operator.status.conditions import Say, find, is_true, raw_conditions, since
from rlrun_operator.times import rfc3339

GUEST_MARGIN_SECONDS = 120.0
"""A guest waits longer than its host does: when their trainer hangs, the host restarts it, and the guest's restart does not count."""
HANGS_SECONDS = 30.0
"""A renewal that has not come; the kubelet's probe, which fails too, is the second witness."""
DOUBT_SECONDS = 15.0
"""Silence after which an orchestrator that does not answer its kubelet is not believed any more, though its renewal is not yet late."""
_MESSAGE_MAX = 1000


@dataclass(frozen=True)
class _Clock:
    began: float
    """Seconds since the epoch."""
    limit: float
    """Seconds."""
    field: str
    """Field of `spec.progress`."""
    what: str
    """Event that has not happened since then."""
    judged_at: float
    """Time until which it is known not to have happened."""

    @property
    def left(self) -> float:
        return self.began + self.limit - self.judged_at


def hear(case: Case, attempt: int) -> progress.Report | None:
    """Report on the Lease about `attempt`, with its reason for waiting replaced should the orchestrator itself not renew it any more."""
    heard = progress.read_lease(case.observed.lease, attempt)
    if heard is None or not orchestrator_hangs(case, heard):
        return heard
    since_ = rfc3339(case.observed.lease_changed_at or case.now)
    told = f"orchestrator: hanging since {since_}, without renewing its Lease or being ready"
    return replace(heard, waiting_on=told, waiting_role="orchestrator")


def say(case: Case, heard: progress.Report | None) -> Say | None:
    """Progressing=False, once the deadline is over."""
    clock = _clock(case, heard)
    if clock is None or clock.left > 0:
        return None
    assert case.spec is not None
    never, action = _never_starts(case), _action(case)
    waiting = heard.waiting_on if heard is not None and heard.waiting_on else _not_ready(case)
    over = f"{clock.what} since {rfc3339(clock.began)} ({clock.field}: {clock.limit:g}); it waits for {waiting}"
    if never is not None:
        over = f"{never[1].message} (since {rfc3339(clock.began)}; {clock.field}: {clock.limit:g})"
        action = "never" if action == "Restart" else action
    return Say("False", reasons.NO_PROGRESS, f"{over}; {_THEN[action]}")


_THEN = {  # what `_action` says, in words
    "Restart": "the run is restarted, which counts",
    "never": "the run is ended, because a restart would find the same",
    "Fail": "the run is ended (progress.action: Fail)",
    "Report": "nothing is done about it (progress.action: Report)",
    "host": "its host, whose trainer it uses, does not get on either and decides",
}


def wake_in(case: Case, heard: progress.Report | None) -> float | None:
    """Seconds until this has something to say or to do."""
    clock = _clock(case, heard)
    if clock is None:
        return None
    if clock.left <= 0:
        return SOON_SECONDS if _action(case) in ("Restart", "Fail") else None
    waits = [clock.began + clock.limit - case.now]
    if _is_deaf(case) and case.observed.lease_changed_at is not None:
        waits.append(case.observed.lease_changed_at + HANGS_SECONDS - case.now)
    return min((seconds for seconds in waits if seconds > 0), default=None)


def cause(case: Case) -> Cause | None:
    """Reason to end a hanging attempt that is on record; None: nothing is to be done."""
    known = find(case.past.conditions, reasons.PROGRESSING)
    if known is None or known.reason != reasons.NO_PROGRESS or _action(case) not in ("Restart", "Fail"):
        return None
    heard = hear(case, case.past.attempt)
    said = say(case, heard)
    if said is None:
        return None
    if (never := _never_starts(case)) is not None:
        return _of_start(case, *never, said.message.rpartition("; ")[0])
    role, pod = _waited_for(case, heard)
    name = pod.name if pod is not None else _name(case, role)
    message = said.message.rpartition("; ")[0]
    if case.host_name is None or role == "orchestrator":
        folder = case.context(case.spec, case.past.attempt).folder if case.spec is not None else "."
        logs = RunPaths(Path(folder)).logs(case.past.attempt, role)
        message += f"; if it does not end when it is asked to, what its processes do is in {logs}/*.stacks.txt"
    blameless = case.host_name is not None and not host_run.trainer_ready(case.observed.host)
    node = pod.node if pod is not None else None
    kind: Kind = "disruption" if blameless else "failure"
    return Cause(kind, case.now, role, name, node, None, reasons.NO_PROGRESS, shorten(message, _MESSAGE_MAX))


def _never_starts(case: Case) -> tuple[Role, Say] | None:
    """Role that cannot start without a person, and why; None: there is none, or the trainer of a host is missing."""
    if case.host_name is not None and not host_run.trainer_ready(case.observed.host):
        return None
    return unstarted.stuck(case)


def _of_start(case: Case, role: Role, why: Say, message: str) -> Cause:
    """Cause that ends an attempt of which `role` never started. A restart would find the same."""
    pods = sorted((pod for pod in case.needed_pods(case.past.attempt) if pod.role == role), key=lambda pod: pod.name)
    pod = next((pod for pod in pods if not pod.has_run), None)
    name, node = (pod.name, pod.node) if pod is not None else (_name(case, role), None)
    return Cause("permanent", case.now, role, name, node, None, why.reason, shorten(message, _MESSAGE_MAX))


def ends_run(case: Case) -> bool:
    """True if a run that hangs is not to be restarted."""
    return _action(case) == "Fail"


def _action(case: Case) -> str:
    if case.host_name is not None:
        conditions = raw_conditions((case.observed.host or {}).get("status") or {})
        if any((c.get("type"), c.get("reason")) == (reasons.PROGRESSING, reasons.NO_PROGRESS) for c in conditions):
            return "host"
    return case.spec.progress.action if case.spec is not None else "Report"


def _clock(case: Case, heard: progress.Report | None) -> _Clock | None:
    """Clock of the present wait; None: no clock, because the attempt has not begun, waits for nodes, is silent, or is not watched."""
    past = case.past
    begun = since(past.conditions, reasons.RESTARTING, true=False)
    if case.spec is None or begun is None or case.observed.watching_since is None:
        return None
    storage = find(past.conditions, reasons.STORAGE_READY)
    if (heard is not None and heard.storage is not None) or (storage is not None and storage.reason in reasons.VOLUME):
        return None  # the run waits for its volume, or has just stopped to: it goes on by itself, and no restart would help
    usable = since(past.conditions, reasons.STORAGE_READY, true=True) or 0.0
    least = max(case.observed.watching_since, usable)
    margin = GUEST_MARGIN_SECONDS if case.host_name is not None else 0.0
    limits = case.spec.progress
    if progress.is_training(heard):
        return _next_step_clock(case, heard, least, limits.deadline_seconds + margin)
    return _first_step_clock(case, heard, max(least, begun), limits.startup_deadline_seconds + margin)


def _first_step_clock(case: Case, heard: progress.Report | None, least: float, limit: float) -> _Clock | None:
    """Clock of an attempt without a step of its own; it has not begun before `least`."""
    scheduled = since(case.past.conditions, reasons.SCHEDULED, true=True)
    never = _never_starts(case)
    if scheduled is None and never is not None and never[1].reason == reasons.REFERENCE_NOT_FOUND:
        scheduled = since(case.past.conditions, reasons.SCHEDULED, true=False)
    if scheduled is None or case.observed.lease is None:
        return None
    what = f"the attempt's {case.words.first} {case.words.lacks}"
    made = (case.observed.lease_changed_at or 0.0) if heard is None else 0.0  # one that was deleted is made again empty
    began = max(scheduled, least, made, _unready_since(case, heard))
    return _Clock(began, limit, "progress.startupDeadlineSeconds", what, _seen_until(case, heard))


def _next_step_clock(case: Case, heard: progress.Report | None, least: float, limit: float) -> _Clock | None:
    """Clock of an attempt that trains; it has not begun before `least`."""
    moved, renewed = case.observed.lease_moved_at, case.observed.lease_changed_at
    silent, hangs = progress.silent_for(renewed, case.now), orchestrator_hangs(case, heard)
    if moved is None or (silent >= progress.HEARTBEAT_SECONDS and not hangs):
        return None
    judged = case.now if renewed is None or hangs or silent < _late(case) else renewed
    what = f"no {case.words.unit} is done" + ("" if hangs else ", although the orchestrator renews its Lease,")
    began = max(moved, least, _unready_since(case, heard) if hangs else 0.0)
    return _Clock(began, limit, "progress.deadlineSeconds", what, judged)


def silent_since(case: Case, heard: progress.Report | None) -> float | None:
    """Time since which the Lease is not renewed although a process is there to renew it; None: unknown, or none is there.

    Before the attempt's first renewal that is since all pods are ready: a ready orchestrator renews it from its start.
    """
    changed = case.observed.lease_changed_at
    if heard is not None or case.observed.lease is None:
        return changed if heard is not None else None
    ready = since(case.past.conditions, reasons.PODS_READY, true=True)
    begun = since(case.past.conditions, reasons.RESTARTING, true=False)
    if ready is None or begun is None or case.past.launched_attempt != case.past.attempt:
        return None
    return max(ready, begun, changed or 0.0, case.observed.watching_since or 0.0)


def _seen_until(case: Case, heard: progress.Report | None) -> float:
    """Time until which a start is known not to get on: with all pods ready, no longer than the Lease is renewed."""
    quiet = silent_since(case, heard)
    if quiet is None or not is_true(case.past.conditions, reasons.PODS_READY):
        return case.now
    return case.now if heard is not None and case.now - quiet < _late(case) else quiet


def _unready_since(case: Case, heard: progress.Report | None) -> float:
    """Time since which pods are not ready that were ready long after the last renewal: until then nothing spoke against the run. Else 0."""
    unready = since(case.past.conditions, reasons.PODS_READY, true=False)
    if unready is None:
        return 0.0
    changed = case.observed.lease_changed_at
    if heard is not None and (changed is None or unready - changed < progress.HEARTBEAT_SECONDS):
        return 0.0
    return unready


def orchestrator_hangs(case: Case, heard: progress.Report | None) -> bool:
    """True if the orchestrator, which has spoken in this attempt, neither renews its Lease nor answers its kubelet."""
    silent = progress.silent_for(case.observed.lease_changed_at, case.now)
    return heard is not None and silent >= HANGS_SECONDS and _is_deaf(case)


def _late(case: Case) -> float:
    """Silence in seconds after which what the Lease says may not be so any more."""
    return DOUBT_SECONDS if _is_deaf(case) else progress.LATE_SECONDS


def _is_deaf(case: Case) -> bool:
    """True if the orchestrator's container runs, and its kubelet gets no answer."""
    pod = case.orchestrator(case.past.attempt)
    if pod is None or pod.deleted_at is not None or pod.main is None:
        return False
    return pod.main.running and not pod.main.ready


def _waited_for(case: Case, heard: progress.Report | None) -> tuple[Role, Pod | None]:
    """The role that the run waits for, and one of its pods: that which is not ready, else the first."""
    pods = case.needed_pods(case.past.attempt)
    told = heard.waiting_role if heard is not None else None
    late = {pod.role for pod in pods if not pod.ready}
    # Before the orchestrator has spoken, a role that is not ready is waited for.
    candidates = [r for r in ROLES if r == told] or [r for r in ROLES if r in late] or ["orchestrator"]
    role: Role = candidates[0]
    mine = sorted((pod for pod in pods if pod.role == role), key=lambda pod: (pod.ready, pod.name))
    return role, mine[0] if mine else None


def _name(case: Case, role: Role) -> str:
    names = Names(case.host_name) if case.host_name is not None and role != "orchestrator" else case.names
    if role == "trainer":
        return names.trainer_pod(0)
    return names.inference if role == "inference" else names.orchestrator(case.past.attempt)


def _not_ready(case: Case) -> str:
    for kind in (reasons.PODS_READY, reasons.INFERENCE_AVAILABLE):
        found = find(case.past.conditions, kind)
        if found is not None and found.status != "True":
            return found.message
    return "the orchestrator's first word"
