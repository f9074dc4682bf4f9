"""Snapshot of a run from what the API server answers: the RLRun, its pods, its events and its progress Lease. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from rlrun.inspect.snapshot import Condition, CostRow, Event, Failure, Process, Progress, Role, Snapshot, Start, Wait
from rlrun.inspect.times import seconds_of
from rlrun.protocol.messages import annotations as said
from rlrun.protocol.messages.start_times import RESTART_PHASES
from rlrun.runtime.json_types import Manifest
from rlrun.runtime.printable import printable

_T = TypeVar("_T")
_ROLES = ("trainer", "inference", "orchestrator")
_OVER = ("Complete", "Failed", "Suspended")


def snapshot(
    run: Manifest,
    *,
    pods: Sequence[Manifest] = (),
    events: Sequence[Manifest] = (),
    lease: Manifest | None = None,
    now: float,
) -> Snapshot:
    """Snapshot of one RLRun.

    Args:
        run: the RLRun.
        pods: its pods.
        events: events about it, in any order.
        lease: its progress Lease; None: there is none, or it could not be read.
        now: seconds since the epoch.
    """
    meta, spec, status, beat = _map(run, "metadata"), _map(run, "spec"), _map(run, "status"), lease or {}
    phase = _text(status.get("phase")) or "Unserved"
    over = phase in _OVER
    attempt = _count(status.get("attempt"))
    heard = _map(_map(beat, "metadata"), "annotations")
    current = heard if heard.get(said.ATTEMPT) in (None, str(attempt)) else {}
    return Snapshot(
        place="cluster",
        name=str(meta.get("name")),
        where=str(meta.get("namespace")),
        task=str(spec.get("task") or "RL"),
        phase=phase,
        reason=_text(status.get("reason")) or ("Unserved" if phase == "Unserved" else None),
        message=_message(status) or None,
        attempt=attempt,
        restarts=_count(status.get("restarts")),
        restarts_counted=_count(status.get("restartsCountedTowardsMax")),
        max_restarts=_whole(_map(spec, "failurePolicy").get("maxRestarts")),
        progress=_progress(status, spec, current, now),
        conditions=tuple(_condition(one) for one in _list(status, "conditions")),
        wait=None if over else _wait(status, current),
        failures=_failures(status),
        events=_events(events),
        processes=_processes(pods),
        roles=_roles(status),
        heard_seconds=None if over else _age(_map(beat, "spec").get("renewTime"), now),
        next_retry_time=_text(status.get("nextRetryTime")),
        started=_text(status.get("startTime")),
        ended=_text(status.get("completionTime")),
        created=_text(meta.get("creationTimestamp")),
        excluded_nodes=_excluded_nodes(status),
        defaults=_defaults(status),
        storage=_storage(_map(status, "storage")),
        start=_start(_map(status, "lastRestart"), attempt),
        folder=_text(_map(status, "storage").get("path")),
        host=_text(_map(spec, "trainer").get("sharedWith")),
        results=tuple(printable(str(line)) for line in status.get("results") or ()),
        cost=_cost(_map(status, "cost")),
        trained=_trained(_map(status, "cost")),
        budget=_number(_map(spec, "budget").get("gpuHours")),
    )


def _cost(counted: Manifest) -> tuple[CostRow, ...]:
    rows = []
    for row in _list(counted, "attempts"):
        seconds = ((printable(str(use)), _count(found)) for use, found in _map(row, "gpuSeconds").items())
        rows.append(CostRow(_count(row.get("attempt")), _text(row.get("role")) or "", tuple(seconds)))
    return tuple(rows)


def _trained(counted: Manifest) -> tuple[tuple[str, int], ...]:
    found = _map(counted, "trained")
    return tuple((what, count) for what in ("tokens", "samples") if (count := _count(found.get(what))))


def _progress(status: Manifest, spec: Manifest, heard: Manifest, now: float) -> Progress:
    """The Lease's numbers where it has some, for it is newer; the status' else."""
    known, checkpoint = _map(status, "progress"), _map(status, "checkpoint")
    done = seconds_of(known.get("estimatedCompletionTime"))
    eta = _number(heard.get(said.ETA_SECONDS))
    if eta is None and done is not None:
        eta = max(0.0, done - now)
    return Progress(
        step=_first(_whole(heard.get(said.STEP)), _whole(known.get("step"))),
        total_steps=_first(_whole(known.get("totalSteps")), _whole(spec.get("maxSteps"))),
        policy_version=_first(_whole(heard.get(said.POLICY_VERSION)), _whole(known.get("policyVersion"))),
        reward=_first(_number(heard.get(said.REWARD)), _number(known.get("reward"))),
        tokens_per_second=_first(_number(heard.get(said.TOKENS_PER_SECOND)), _number(known.get("tokensPerSecond"))),
        staleness_mean=_first(_number(heard.get(said.STALENESS_MEAN)), _number(known.get("stalenessMean"))),
        last_step_time=_text(known.get("lastStepTime")),
        eta_seconds=eta,
        checkpoint_step=_first(_whole(heard.get(said.CHECKPOINT_STEP)), _whole(checkpoint.get("latestCompleteStep"))),
        resumed_from_step=_whole(checkpoint.get("resumedFromStep")),
        steps_lost=_count(checkpoint.get("stepsLostTotal")),
    )


def _wait(status: Manifest, heard: Manifest) -> Wait | None:
    text = _text(heard.get(said.WAITING_ON)) or _text(_map(status, "progress").get("waitingOn"))
    if text is None:
        return None
    role, phase, since = (heard.get(n) for n in (said.WAITING_ON_ROLE, said.WAITING_ON_PHASE, said.WAITING_ON_SINCE))
    return Wait(text, _text(role), _text(phase), _text(since))


def _condition(one: Manifest) -> Condition:
    return Condition(
        str(one.get("type")),
        str(one.get("status")),
        printable(str(one.get("reason") or "")),
        _message(one),
        _text(one.get("lastTransitionTime")),
    )


def _failure(one: Manifest) -> Failure:
    return Failure(
        attempt=_count(one.get("attempt")),
        role=printable(str(one.get("role"))),
        process=printable(str(one.get("podName"))),
        node=_text(one.get("nodeName")),
        exit_code=_whole(one.get("exitCode")),
        reason=printable(str(one.get("reason"))),
        message=_message(one),
        counted=one.get("counted") is not False,
        step=_whole(one.get("step")),
        time=_text(one.get("time")),
    )


def _failures(status: Manifest) -> tuple[Failure, ...]:
    """All failures that the status lists; else the last one, where it names that alone."""
    last = _map(status, "lastFailure")
    return tuple(_failure(one) for one in _list(status, "failures")) or ((_failure(last),) if last else ())


def _events(events: Sequence[Manifest]) -> tuple[Event, ...]:
    """Events by time, the oldest first."""
    return tuple(sorted((_event(one) for one in events), key=lambda event: event.time or ""))


def _event(one: Manifest) -> Event:
    series = _map(one, "series")
    time = (
        series.get("lastObservedTime") or one.get("lastTimestamp") or one.get("eventTime") or one.get("firstTimestamp")
    )
    return Event(
        printable(str(one.get("reason"))),
        _message(one),
        one.get("type") == "Warning",
        _text(time),
        _whole(series.get("count")) or _whole(one.get("count")) or 1,
    )


def _processes(pods: Sequence[Manifest]) -> tuple[Process, ...]:
    """Pods by role and name."""
    return tuple(sorted((_process(pod) for pod in pods), key=lambda one: (_ROLES.index(one.role), one.name)))


def _process(pod: Manifest) -> Process:
    meta, status = _map(pod, "metadata"), _map(pod, "status")
    labels = _map(meta, "labels")
    role = labels.get("rlrun.io/role")
    role = role if role in _ROLES else "orchestrator"
    own = next((c for c in _list(status, "containerStatuses") if c.get("name") == role), {})
    waiting = _map(_map(own, "state"), "waiting").get("reason")
    ended = _map(_map(own, "state"), "terminated") or _map(_map(own, "lastState"), "terminated")
    state = waiting or (f"{ended.get('reason')} ({ended.get('exitCode')})" if ended else status.get("phase"))
    return Process(
        name=str(meta.get("name")),
        role=role,
        attempt=_whole(labels.get("rlrun.io/attempt")),
        state="Terminating" if meta.get("deletionTimestamp") else printable(str(state)),
        ready=own.get("ready") is True,
        restarts=_count(own.get("restartCount")),
        node=_text(_map(pod, "spec").get("nodeName")),
        gpus=_gpus(pod, role),
    )


def _gpus(pod: Manifest, role: str) -> int:
    """GPUs that NVML may show in a pod's own container, parts of GPUs among them."""
    own = next((c for c in _list(_map(pod, "spec"), "containers") if c.get("name") == role), {})
    limits = _map(_map(own, "resources"), "limits")
    return sum(_count(count) for name, count in limits.items() if name.endswith("/gpu") or "/mig-" in name)


def _message(one: Manifest) -> str:
    """Message for people, of several lines where it has them."""
    return printable(str(one.get("message") or ""), lines=True)


def _roles(status: Manifest) -> tuple[tuple[str, Role], ...]:
    """Roles that should have pods, with the numbers of them."""
    found = [(name, _map(status, name)) for name in _ROLES]
    return tuple(
        (name, Role(_count(one.get("desired")), _count(one.get("ready")), _why(one)))
        for name, one in found
        if one.get("desired")
    )


def _defaults(status: Manifest) -> str:
    found = status.get("defaults")
    if not isinstance(found, dict) or not isinstance(found.get("fields"), list):
        return ""
    fields = [str(_text(each)) for each in found["fields"]]
    return f"{', '.join(fields)} from ConfigMap {_text(found.get('configMap'))}"


def _start(one: Manifest, attempt: int) -> Start | None:
    """The last restart; None: there was none, or its attempt has not begun."""
    seconds = _map(one, "seconds")
    if not seconds:
        return None
    known = [(name, _number(seconds.get(name))) for name in RESTART_PHASES]
    return Start(
        attempt=_whole(one.get("attempt")) or attempt + 1,
        seconds=tuple((name, value) for name, value in known if value is not None),
        total=_number(one.get("totalSeconds")),
        slow=_text(one.get("slow")),
    )


def _why(one: Manifest) -> str | None:
    """Reason for the number of a role's pods, and what another number waits for."""
    waits = f"another number waits for: {one['waitingOn']}" if one.get("waitingOn") else ""
    return printable("; ".join(filter(None, (str(one.get("reason") or ""), waits, _spot(one))))) or None


def _spot(one: Manifest) -> str:
    """Engines on interruptible nodes, and their losses; empty: the role has none."""
    spot = _map(one, "spot")
    if not spot:
        return ""
    lost = f", {_count(spot.get('lost'))} lost so far, the last one: {_text(spot.get('lastLoss'))}"
    there = f"{_count(spot.get('ready'))} of {_count(spot.get('desired'))} spot engines are ready"
    return there + (lost if _count(spot.get("lost")) else "")


def _excluded_nodes(status: Manifest) -> tuple[str, ...]:
    return tuple(f"{_text(one.get('name'))} until {one.get('until')}" for one in _list(status, "excludedNodes"))


def _storage(one: Manifest) -> str | None:
    words = [printable(str(one[key])) for key in ("claimName", "size") if one.get(key)]
    return " ".join(words) or None


def _age(time: object, now: float) -> float | None:
    then = seconds_of(time)
    return None if then is None else max(0.0, now - then)


def _first(*values: _T | None) -> _T | None:
    return next((value for value in values if value is not None), None)


def _map(of: Manifest, key: str) -> Manifest:
    found = of.get(key)
    return found if isinstance(found, Mapping) else {}


def _list(of: Manifest, key: str) -> list[Manifest]:
    found = of.get(key)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def _text(value: object) -> str | None:
    return printable(value) if isinstance(value, str) and value else None


def _whole(value: object) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _count(value: object) -> int:
    return _whole(value) or 0


def _number(value: object) -> float | None:
    """A number, or a text that is one, as in annotations; NaN and infinity are none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None
