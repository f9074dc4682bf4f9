"""Snapshot of a run from objects of the API server: the RLRun, its pods, events and progress Lease. No side effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from rlrun.inspect.snapshot import (
    Condition,
    CostRow,
    Event,
    Failure,
    Process,
    Progress,
    Role,
    Snapshot,
    Start,
    Wait,
    seconds_of,
)
from rlrun.protocol.messages import lease_annotations as said
from rlrun.protocol.messages.lease_annotations import RESTART_PHASES
from rlrun.runtime.json_types import Manifest
from rlrun.runtime.printable import escape_controls

_T = TypeVar("_T")
_ROLES = ("trainer", "inference", "orchestrator")
_OVER = ("Complete", "Failed", "Suspended")


def run_snapshot(
    run: Manifest,
    *,
    pods: Sequence[Manifest] = (),
    events: Sequence[Manifest] = (),
    lease: Manifest | None = None,
    now: float,
) -> Snapshot:
    """Return the snapshot of one RLRun.

    Args:
        run: RLRun object.
        pods: pods of the run.
        events: events about the run, in any order.
        lease: progress Lease of the run, or None if it does not exist or could not be read.
        now: seconds since the epoch.
    """
    meta, spec, status, beat = _read_map(run, "metadata"), _read_map(run, "spec"), _read_map(run, "status"), lease or {}
    # Without a phase, no operator has processed the run yet.
    phase = _read_text(status.get("phase")) or "Unserved"
    over = phase in _OVER
    attempt = _read_count(status.get("attempt"))
    # The report in the Lease is used only if it is not from another attempt.
    heard = _read_map(_read_map(beat, "metadata"), "annotations")
    current = heard if heard.get(said.ATTEMPT) in (None, str(attempt)) else {}
    return Snapshot(
        place="cluster",
        name=str(meta.get("name")),
        where=str(meta.get("namespace")),
        task=str(spec.get("task") or "RL"),
        phase=phase,
        reason=_read_text(status.get("reason")) or ("Unserved" if phase == "Unserved" else None),
        message=_read_message(status) or None,
        attempt=attempt,
        restarts=_read_count(status.get("restarts")),
        restarts_counted=_read_count(status.get("restartsCountedTowardsMax")),
        max_restarts=_read_whole(_read_map(spec, "failurePolicy").get("maxRestarts")),
        progress=_read_progress(status, spec, current, now),
        conditions=tuple(_read_condition(one) for one in _read_list(status, "conditions")),
        wait=None if over else _read_wait(status, current),
        failures=_read_failures(status),
        events=_read_events(events),
        processes=_read_processes(pods),
        roles=_read_roles(status),
        heard_seconds=None if over else _read_age(_read_map(beat, "spec").get("renewTime"), now),
        next_retry_time=_read_text(status.get("nextRetryTime")),
        started=_read_text(status.get("startTime")),
        ended=_read_text(status.get("completionTime")),
        created=_read_text(meta.get("creationTimestamp")),
        excluded_nodes=_excluded_nodes(status),
        defaults=_read_defaults(status),
        storage=_read_storage(_read_map(status, "storage")),
        start=_read_start(_read_map(status, "lastRestart"), attempt),
        folder=_read_text(_read_map(status, "storage").get("path")),
        host=_read_text(_read_map(spec, "trainer").get("sharedWith")),
        results=tuple(escape_controls(str(line)) for line in status.get("results") or ()),
        cost=_read_cost(_read_map(status, "cost")),
        trained=_read_trained(_read_map(status, "cost")),
        budget=_read_number(_read_map(spec, "budget").get("gpuHours")),
    )


def _read_cost(counted: Manifest) -> tuple[CostRow, ...]:
    """Return the rows of `status.cost`."""
    rows = []
    for row in _read_list(counted, "attempts"):
        seconds = (
            (escape_controls(str(use)), _read_count(found)) for use, found in _read_map(row, "gpuSeconds").items()
        )
        rows.append(CostRow(_read_count(row.get("attempt")), _read_text(row.get("role")) or "", tuple(seconds)))
    return tuple(rows)


def _read_trained(counted: Manifest) -> tuple[tuple[str, int], ...]:
    found = _read_map(counted, "trained")
    return tuple((what, count) for what in ("tokens", "samples") if (count := _read_count(found.get(what))))


def _read_progress(status: Manifest, spec: Manifest, heard: Manifest, now: float) -> Progress:
    """Return the progress. Values that the Lease has come from the Lease, which is newer; all others come from the status."""
    known, checkpoint = _read_map(status, "progress"), _read_map(status, "checkpoint")
    done = seconds_of(known.get("estimatedCompletionTime"))
    eta = _read_number(heard.get(said.ETA_SECONDS))
    if eta is None and done is not None:
        eta = max(0.0, done - now)
    return Progress(
        step=_first_known(_read_whole(heard.get(said.STEP)), _read_whole(known.get("step"))),
        total_steps=_first_known(_read_whole(known.get("totalSteps")), _read_whole(spec.get("maxSteps"))),
        policy_version=_first_known(
            _read_whole(heard.get(said.POLICY_VERSION)), _read_whole(known.get("policyVersion"))
        ),
        reward=_first_known(_read_number(heard.get(said.REWARD)), _read_number(known.get("reward"))),
        tokens_per_second=_first_known(
            _read_number(heard.get(said.TOKENS_PER_SECOND)), _read_number(known.get("tokensPerSecond"))
        ),
        staleness_mean=_first_known(
            _read_number(heard.get(said.STALENESS_MEAN)), _read_number(known.get("stalenessMean"))
        ),
        last_step_time=_read_text(known.get("lastStepTime")),
        eta_seconds=eta,
        checkpoint_step=_first_known(
            _read_whole(heard.get(said.CHECKPOINT_STEP)), _read_whole(checkpoint.get("latestCompleteStep"))
        ),
        resumed_from_step=_read_whole(checkpoint.get("resumedFromStep")),
        steps_lost=_read_count(checkpoint.get("stepsLostTotal")),
    )


def _read_wait(status: Manifest, heard: Manifest) -> Wait | None:
    text = _read_text(heard.get(said.WAITING_ON)) or _read_text(_read_map(status, "progress").get("waitingOn"))
    if text is None:
        return None
    role, phase, since = (heard.get(n) for n in (said.WAITING_ON_ROLE, said.WAITING_ON_PHASE, said.WAITING_ON_SINCE))
    return Wait(text, _read_text(role), _read_text(phase), _read_text(since))


def _read_condition(one: Manifest) -> Condition:
    return Condition(
        str(one.get("type")),
        str(one.get("status")),
        escape_controls(str(one.get("reason") or "")),
        _read_message(one),
        _read_text(one.get("lastTransitionTime")),
    )


def _read_failure(one: Manifest) -> Failure:
    return Failure(
        attempt=_read_count(one.get("attempt")),
        role=escape_controls(str(one.get("role"))),
        process=escape_controls(str(one.get("podName"))),
        node=_read_text(one.get("nodeName")),
        exit_code=_read_whole(one.get("exitCode")),
        reason=escape_controls(str(one.get("reason"))),
        message=_read_message(one),
        counted=one.get("counted") is not False,
        step=_read_whole(one.get("step")),
        time=_read_text(one.get("time")),
    )


def _read_failures(status: Manifest) -> tuple[Failure, ...]:
    """Return all failures in the status, or only the last one if the status has no list."""
    last = _read_map(status, "lastFailure")
    return tuple(_read_failure(one) for one in _read_list(status, "failures")) or (
        (_read_failure(last),) if last else ()
    )


def _read_events(events: Sequence[Manifest]) -> tuple[Event, ...]:
    """Return the events by time, oldest first."""
    return tuple(sorted((_read_event(one) for one in events), key=lambda event: event.time or ""))


def _read_event(one: Manifest) -> Event:
    series = _read_map(one, "series")
    time = (
        series.get("lastObservedTime") or one.get("lastTimestamp") or one.get("eventTime") or one.get("firstTimestamp")
    )
    return Event(
        escape_controls(str(one.get("reason"))),
        _read_message(one),
        one.get("type") == "Warning",
        _read_text(time),
        _read_whole(series.get("count")) or _read_whole(one.get("count")) or 1,
    )


def _read_processes(pods: Sequence[Manifest]) -> tuple[Process, ...]:
    """Return the pods by role and name."""
    return tuple(sorted((_read_process(pod) for pod in pods), key=lambda one: (_ROLES.index(one.role), one.name)))


def _read_process(pod: Manifest) -> Process:
    meta, status = _read_map(pod, "metadata"), _read_map(pod, "status")
    labels = _read_map(meta, "labels")
    role = labels.get("rlrun.io/role")
    # A pod without a known role is shown as an orchestrator.
    role = role if role in _ROLES else "orchestrator"
    own = next((c for c in _read_list(status, "containerStatuses") if c.get("name") == role), {})
    current = _read_map(own, "state")
    waiting = _read_map(current, "waiting").get("reason")
    ended = _read_map(current, "terminated")
    if (
        not ended and "running" not in current
    ):  # a container that runs again has its earlier end in the number of restarts
        ended = _read_map(_read_map(own, "lastState"), "terminated")
    state = waiting or (f"{ended.get('reason')} ({ended.get('exitCode')})" if ended else status.get("phase"))
    return Process(
        name=str(meta.get("name")),
        role=role,
        attempt=_read_whole(labels.get("rlrun.io/attempt")),
        state="Terminating" if meta.get("deletionTimestamp") else escape_controls(str(state)),
        ready=own.get("ready") is True,
        restarts=_read_count(own.get("restartCount")),
        node=_read_text(_read_map(pod, "spec").get("nodeName")),
        gpus=_visible_gpus(pod, role),
    )


def _visible_gpus(pod: Manifest, role: str) -> int:
    """Return the number of GPUs that NVML can show in the pod's main container, including MIG slices."""
    own = next((c for c in _read_list(_read_map(pod, "spec"), "containers") if c.get("name") == role), {})
    limits = _read_map(_read_map(own, "resources"), "limits")
    return sum(_read_count(count) for name, count in limits.items() if name.endswith("/gpu") or "/mig-" in name)


def _read_message(one: Manifest) -> str:
    """Return the message, which can have several lines."""
    return escape_controls(str(one.get("message") or ""), lines=True)


def _read_roles(status: Manifest) -> tuple[tuple[str, Role], ...]:
    """Return the roles that should have pods, with desired and ready counts."""
    found = [(name, _read_map(status, name)) for name in _ROLES]
    return tuple(
        (name, Role(_read_count(one.get("desired")), _read_count(one.get("ready")), _explain_size(one)))
        for name, one in found
        if one.get("desired")
    )


def _read_defaults(status: Manifest) -> str:
    found = status.get("defaults")
    if not isinstance(found, dict) or not isinstance(found.get("fields"), list):
        return ""
    fields = [str(_read_text(each)) for each in found["fields"]]
    return f"{', '.join(fields)} from ConfigMap {_read_text(found.get('configMap'))}"


def _read_start(one: Manifest, attempt: int) -> Start | None:
    """Return the last restart; None if there was none, or its first phase has not ended. Its attempt is recorded when it starts."""
    seconds = _read_map(one, "seconds")
    if not seconds:
        return None
    known = [(name, _read_number(seconds.get(name))) for name in RESTART_PHASES]
    return Start(
        attempt=_read_whole(one.get("attempt")) or attempt + 1,
        seconds=tuple((name, value) for name, value in known if value is not None),
        total=_read_number(one.get("totalSeconds")),
        slow=_read_text(one.get("slow")),
    )


def _explain_size(one: Manifest) -> str | None:
    """Return the reason for a role's size, and the reason why a requested size is delayed."""
    waits = f"another size waits for: {one['waitingOn']}" if one.get("waitingOn") else ""
    return escape_controls("; ".join(filter(None, (str(one.get("reason") or ""), waits, _describe_spot(one))))) or None


def _describe_spot(one: Manifest) -> str:
    """Return the numbers of engines on interruptible nodes and of their losses; empty without such engines."""
    spot = _read_map(one, "spot")
    if not spot:
        return ""
    lost = f", {_read_count(spot.get('lost'))} lost so far, the last:  {_read_text(spot.get('lastLoss'))}"
    there = f"{_read_count(spot.get('ready'))} of {_read_count(spot.get('desired'))} spot engines are ready"
    return there + (lost if _read_count(spot.get("lost")) else "")


def _excluded_nodes(status: Manifest) -> tuple[str, ...]:
    return tuple(
        f"{_read_text(one.get('name'))} until {one.get('until')}" for one in _read_list(status, "excludedNodes")
    )


def _read_storage(one: Manifest) -> str | None:
    words = [escape_controls(str(one[key])) for key in ("claimName", "size") if one.get(key)]
    return " ".join(words) or None


def _read_age(time: object, now: float) -> float | None:
    then = seconds_of(time)
    return None if then is None else max(0.0, now - then)


def _first_known(*values: _T | None) -> _T | None:
    return next((value for value in values if value is not None), None)


def _read_map(of: Manifest, key: str) -> Manifest:
    found = of.get(key)
    return found if isinstance(found, Mapping) else {}


def _read_list(of: Manifest, key: str) -> list[Manifest]:
    found = of.get(key)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def _read_text(value: object) -> str | None:
    return escape_controls(value) if isinstance(value, str) and value else None


def _read_whole(value: object) -> int | None:
    """Return a number without its fraction, or None if the value is not a number."""
    number = _read_number(value)
    return None if number is None else int(number)


def _read_count(value: object) -> int:
    return _read_whole(value) or 0


def _read_number(value: object) -> float | None:
    """Return a finite number from a number or a numeric text, as in annotations; otherwise None."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None
