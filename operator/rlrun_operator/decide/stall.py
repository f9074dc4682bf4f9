"""Stalled runs: the orchestrator renews the Lease, but the step does not advance.

    no first step    `progress.startupDeadlineSeconds` after all pods of the attempt were scheduled
    no next step     `progress.deadlineSeconds` after the last step, or after the last activity of which each step has a bounded number

Both clocks only run while this operator watches, and within one attempt: a start of the operator, an outage of the API server and a gap
between two renewals restart them. The state of the run is known up to the last renewal of the Lease, so steps are judged up to this time. A
stale Lease is no evidence of a stall, and neither is a Lease that was never renewed: this is HeartbeatLost, which is only reported, because
training continues without the API server. The kubelets are the second channel. An orchestrator that has missed three renewals and that its
kubelet reports as not ready either hangs itself or has detected a hang: after the deadline the run waits for it. If it had been silent long
before it was not ready, the deadline starts when it is not ready. The readiness of the container counts: on a lost node, other components
set the pod to not ready.

The condition is written first; the action is decided in a later pass, when the condition is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime.printable import shorten_text
from rlrun_operator.decide import host_run, workload_edits
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.failures.detect import Cause, Kind
from rlrun_operator.names import ROLES, Names, Role
from rlrun_operator.pods import Pod
from rlrun_operator.state import SOON_SECONDS
from rlrun_operator.status import reasons, run_progress
from rlrun_operator.status.conditions import ConditionUpdate, find_condition, is_true, raw_conditions, true_since
from rlrun_operator.times import format_rfc3339

GUEST_MARGIN_SECONDS = 120.0
"""A guest waits longer than its host: if their trainer hangs, the host restarts it, and the guest's restart does not count."""
HANGS_SECONDS = 30.0
"""A missing renewal; the failing probe of the kubelet is the second sign."""
DOUBT_SECONDS = 15.0
"""Silence after which the Lease of an orchestrator that does not answer its kubelet is ignored, although no renewal is late yet."""
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
    """Time until which the event is known not to have happened."""

    @property
    def seconds_left(self) -> float:
        return self.began + self.limit - self.judged_at


def read_report(run: RunSnapshot, attempt: int) -> run_progress.Report | None:
    """Return the report on the Lease about `attempt`. If the orchestrator no longer renews the Lease, its wait reason is replaced."""
    report = run_progress.read_lease(run.observed.lease, attempt)
    if report is None or not orchestrator_hangs(run, report):
        return report
    since_ = format_rfc3339(run.observed.lease_changed_at or run.now)
    told = f"orchestrator: hanging since {since_}, without renewing its Lease or being ready"
    return replace(report, waiting_on=told, waiting_role="orchestrator")


def stall_condition(run: RunSnapshot, report: run_progress.Report | None) -> ConditionUpdate | None:
    """Return Progressing=False after the deadline."""
    clock = _start_of_wait(run, report)
    if clock is None or clock.seconds_left > 0:
        return None
    assert run.spec is not None
    never, action = _never_starts(run), _stall_action(run)
    waiting = report.waiting_on if report is not None and report.waiting_on else _not_ready(run)
    over = f"{clock.what} since {format_rfc3339(clock.began)} ({clock.field}: {clock.limit:g}); it waits for {waiting}"
    if never is not None:
        over = f"{never[1].message} (since {format_rfc3339(clock.began)}; {clock.field}: {clock.limit:g})"
        action = "never" if action == "Restart" else action
    return ConditionUpdate("False", reasons.NO_PROGRESS, f"{over}; {_THEN[action]}")


_THEN = {  # messages for the values of `_stall_action`
    "Restart": "the run is restarted, which counts",
    "never": "the run is ended, because a restart would find the same",
    "Fail": "the run is ended (progress.action: Fail)",
    "Report": "nothing is done about it (progress.action: Report)",
    "host": "its host, whose trainer it uses, does not get on either and decides",
}


def wake_in(run: RunSnapshot, report: run_progress.Report | None) -> float | None:
    """Return the seconds until the deadline of a report or of a restart."""
    clock = _start_of_wait(run, report)
    if clock is None:
        return None
    if clock.seconds_left <= 0:
        return SOON_SECONDS if _stall_action(run) in ("Restart", "Fail") else None
    waits = [clock.began + clock.limit - run.now]
    if _is_deaf(run) and run.observed.lease_changed_at is not None:
        waits.append(run.observed.lease_changed_at + HANGS_SECONDS - run.now)
    return min((seconds for seconds in waits if seconds > 0), default=None)


def stall_cause(run: RunSnapshot) -> Cause | None:
    """Return the cause to end a recorded attempt that hangs, or None."""
    # Only a recorded stall ends an attempt: users and tools see the reason before the action, and a stall
    # that has ended since then is not acted on.
    known = find_condition(run.past.conditions, reasons.PROGRESSING)
    if known is None or known.reason != reasons.NO_PROGRESS or _stall_action(run) not in ("Restart", "Fail"):
        return None
    report = read_report(run, run.past.attempt)
    updates = stall_condition(run, report)
    if updates is None:
        return None
    if (never := _never_starts(run)) is not None:
        return _unstarted_cause(run, *never, updates.message.rpartition("; ")[0])
    role, pod = _waited_for(run, report)
    name = pod.name if pod is not None else _waiting_name(run, role)
    message = updates.message.rpartition("; ")[0]
    if run.host_name is None or role == "orchestrator":
        folder = run.context(run.spec, run.past.attempt).folder if run.spec is not None else "."
        logs = RunPaths(Path(folder)).logs(run.past.attempt, role)
        message += f"; if it does not end on request, the stacks of its processes are in {logs}/*.stacks.txt"
    # The end of a guest without its host's trainer does not count.
    blameless = run.host_name is not None and not host_run.trainer_ready(run.observed.host)
    node = pod.node if pod is not None else None
    kind: Kind = "disruption" if blameless else "failure"
    return Cause(kind, run.now, role, name, node, None, reasons.NO_PROGRESS, shorten_text(message, _MESSAGE_MAX))


def _never_starts(run: RunSnapshot) -> tuple[Role, ConditionUpdate] | None:
    """Return the role that cannot start without a person, and the reason; None if there is none, or if a host's trainer is missing."""
    if run.host_name is not None and not host_run.trainer_ready(run.observed.host):
        return None
    return workload_edits.find_stuck_role(run)


def _unstarted_cause(run: RunSnapshot, role: Role, why: ConditionUpdate, message: str) -> Cause:
    """Return the cause that ends an attempt in which `role` never started. A restart would meet the same problem."""
    pods = sorted((pod for pod in run.needed_pods(run.past.attempt) if pod.role == role), key=lambda pod: pod.name)
    pod = next((pod for pod in pods if not pod.has_run), None)
    name, node = (pod.name, pod.node) if pod is not None else (_waiting_name(run, role), None)
    return Cause("permanent", run.now, role, name, node, None, why.reason, shorten_text(message, _MESSAGE_MAX))


def ends_run(run: RunSnapshot) -> bool:
    """Return whether a hanging run fails instead of restarting."""
    return _stall_action(run) == "Fail"


def _stall_action(run: RunSnapshot) -> str:
    if run.host_name is not None:
        conditions = raw_conditions((run.observed.host or {}).get("status") or {})
        if any((c.get("type"), c.get("reason")) == (reasons.PROGRESSING, reasons.NO_PROGRESS) for c in conditions):
            return "host"
    return run.spec.progress.action if run.spec is not None else "Report"


def _start_of_wait(run: RunSnapshot, report: run_progress.Report | None) -> _Clock | None:
    """Return the clock of the current wait; None if the attempt has not started, waits for nodes, is silent, or is not watched."""
    past = run.past
    begun = true_since(past.conditions, reasons.RESTARTING, true=False)
    if run.spec is None or begun is None or run.observed.watching_since is None:
        return None
    storage = find_condition(past.conditions, reasons.STORAGE_READY)
    if (report is not None and report.storage is not None) or (
        storage is not None and storage.reason in reasons.VOLUME
    ):
        return None  # the run waits for its volume, or did until now: it continues by itself without a restart
    # The clock starts only when progress was possible and observed: with a usable volume, and a watching
    # operator. After an outage of the operator or the API server no run is ended for a step that nobody saw.
    usable = true_since(past.conditions, reasons.STORAGE_READY, true=True) or 0.0
    least = max(run.observed.watching_since, usable)
    # The host decides first. Its restart ends the guest's attempt without a count.
    margin = GUEST_MARGIN_SECONDS if run.host_name is not None else 0.0
    limits = run.spec.progress
    if run_progress.is_training(report):
        return _next_step_clock(run, report, least, limits.deadline_seconds + margin)
    return _first_step_clock(run, report, max(least, begun), limits.startup_deadline_seconds + margin)


def _first_step_clock(
    run: RunSnapshot, report: run_progress.Report | None, least: float, limit: float
) -> _Clock | None:
    """Return the clock of an attempt without an own step; the clock starts at `least` at the earliest."""
    # The wait for nodes has no deadline. The wait for a missing object that the pods refer to has one,
    # although it keeps them from being scheduled too.
    scheduled = true_since(run.past.conditions, reasons.SCHEDULED, true=True)
    never = _never_starts(run)
    if scheduled is None and never is not None and never[1].reason == reasons.REFERENCE_NOT_FOUND:
        scheduled = true_since(run.past.conditions, reasons.SCHEDULED, true=False)
    if scheduled is None or run.observed.lease is None:
        return None
    what = f"the attempt's {run.progress_texts.first} {run.progress_texts.lacks}"
    made = (
        (run.observed.lease_changed_at or 0.0) if report is None else 0.0
    )  # a deleted Lease is recreated without a report
    began = max(scheduled, least, made, _unready_since(run, report))
    return _Clock(began, limit, "progress.startupDeadlineSeconds", what, _seen_until(run, report))


def _next_step_clock(run: RunSnapshot, report: run_progress.Report | None, least: float, limit: float) -> _Clock | None:
    """Return the clock of a training attempt; the clock starts at `least` at the earliest."""
    moved, renewed = run.observed.lease_moved_at, run.observed.lease_changed_at
    silent, hangs = run_progress.silent_for(renewed, run.now), orchestrator_hangs(run, report)
    # A silent Lease proves nothing: training continues without the API server. Only with the kubelet as a
    # second witness is the silence a hang.
    if moved is None or (silent >= run_progress.HEARTBEAT_SECONDS and not hangs):
        return None
    # While the Lease is renewed on time, the missing step is known until now; otherwise only until the last
    # renewal.
    judged = run.now if renewed is None or hangs or silent < _silence_limit(run) else renewed
    what = f"no {run.progress_texts.unit} is done" + ("" if hangs else ", although the orchestrator renews its Lease,")
    began = max(moved, least, _unready_since(run, report) if hangs else 0.0)
    return _Clock(began, limit, "progress.deadlineSeconds", what, judged)


def silent_since(run: RunSnapshot, report: run_progress.Report | None) -> float | None:
    """Return the time since which the Lease is not renewed although its process exists; None if unknown, or if there is no process.

    Before the attempt's first renewal that is since all pods are ready: a ready orchestrator renews it from its start.
    """
    changed = run.observed.lease_changed_at
    if report is not None or run.observed.lease is None:
        return changed if report is not None else None
    ready = true_since(run.past.conditions, reasons.PODS_READY, true=True)
    begun = true_since(run.past.conditions, reasons.RESTARTING, true=False)
    if ready is None or begun is None or run.past.launched_attempt != run.past.attempt:
        return None
    return max(ready, begun, changed or 0.0, run.observed.watching_since or 0.0)


def _seen_until(run: RunSnapshot, report: run_progress.Report | None) -> float:
    """Return the time until which a start is known not to progress: with all pods ready, at most as long as the Lease is renewed."""
    quiet = silent_since(run, report)
    if quiet is None or not is_true(run.past.conditions, reasons.PODS_READY):
        return run.now
    return run.now if report is not None and run.now - quiet < _silence_limit(run) else quiet


def _unready_since(run: RunSnapshot, report: run_progress.Report | None) -> float:
    """Return the time since which pods are not ready if they were ready long after the last renewal (until then there was no sign of a
    stall), otherwise 0."""
    unready = true_since(run.past.conditions, reasons.PODS_READY, true=False)
    if unready is None:
        return 0.0
    changed = run.observed.lease_changed_at
    if report is not None and (changed is None or unready - changed < run_progress.HEARTBEAT_SECONDS):
        return 0.0
    return unready


def orchestrator_hangs(run: RunSnapshot, report: run_progress.Report | None) -> bool:
    """Return whether the orchestrator reported in this attempt and now neither renews its Lease nor answers its kubelet."""
    silent = run_progress.silent_for(run.observed.lease_changed_at, run.now)
    return report is not None and silent >= HANGS_SECONDS and _is_deaf(run)


def _silence_limit(run: RunSnapshot) -> float:
    """Return the seconds of silence after which the Lease may be outdated."""
    return DOUBT_SECONDS if _is_deaf(run) else run_progress.LATE_SECONDS


def _is_deaf(run: RunSnapshot) -> bool:
    """Return whether the orchestrator's container runs and does not answer its kubelet."""
    pod = run.orchestrator(run.past.attempt)
    if pod is None or pod.deleted_at is not None or pod.main is None:
        return False
    return pod.main.running and not pod.main.ready


def _waited_for(run: RunSnapshot, report: run_progress.Report | None) -> tuple[Role, Pod | None]:
    """Return the role that the run waits for, and one of its pods: one that is not ready, otherwise the first."""
    pods = run.needed_pods(run.past.attempt)
    told = report.waiting_role if report is not None else None
    late = {pod.role for pod in pods if not pod.ready}
    # Before the first report of the orchestrator, the run waits for a role that is not ready.
    candidates = [r for r in ROLES if r == told] or [r for r in ROLES if r in late] or ["orchestrator"]
    role: Role = candidates[0]
    mine = sorted((pod for pod in pods if pod.role == role), key=lambda pod: (pod.ready, pod.name))
    return role, mine[0] if mine else None


def _waiting_name(run: RunSnapshot, role: Role) -> str:
    names = Names(run.host_name) if run.host_name is not None and role != "orchestrator" else run.names
    if role == "trainer":
        return names.trainer_pod(0)
    return names.inference if role == "inference" else names.orchestrator(run.past.attempt)


def _not_ready(run: RunSnapshot) -> str:
    for kind in (reasons.PODS_READY, reasons.INFERENCE_AVAILABLE):
        found = find_condition(run.past.conditions, kind)
        if found is not None and found.status != "True":
            return found.message
    return "the orchestrator's first word"
