"""Split of a run's GPU time by use: training, waiting, startup, repeated steps, stopping. Pure.

Time belongs to the phase that was recorded before this pass. The parts are whole GPU-seconds, and their sum always equals the counted time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal

from rlrun.api.run_status import COUNT_MAX, CostStatus, RLRunStatus, RoleCost
from rlrun.protocol.messages.lease_annotations import EngineLoad
from rlrun_operator.decide import gpu_time
from rlrun_operator.decide.gpu_time import Ledger, Span
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.names import Role
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import find_condition
from rlrun_operator.status.run_progress import read_lease
from rlrun_operator.times import format_rfc3339, seconds_of

Use = Literal["trained", "waitedForRollouts", "waitedForTrainer", "startup", "repeated", "stopping", "other"]
COUNT_SECONDS = 60
"""Interval of counts while nothing changes; each count writes the status."""
_DIGITS = 4
"""Significant digits of amounts per GPU-hour."""
ATTEMPTS_KEPT = 6
"""Number of attempts with separate rows; older attempts share one row."""
_STARTS = (None, "Unserved", "Pending", "Queued", "Starting")
_WAITS: Mapping[Role, Use] = {"trainer": "waitedForRollouts", "inference": "waitedForTrainer"}
Rows = dict[tuple[int, Role], Counter[str]]


def count_cost(run: RunSnapshot, new: RLRunStatus) -> CostStatus | None:
    """Return `status.cost`, or None if the run has never had a GPU.

    Args:
        run: snapshot of the run.
        new: status to write, without its cost.
    """
    past = run.past.cost
    found = gpu_time.read_ledger(run)
    if past is None and not found.pods:
        return None
    if past is not None and not _is_due(run, new, found):
        return past
    rows: Rows = (
        {(row.attempt, row.role): Counter(row.gpu_seconds) for row in past.attempts} if past is not None else {}
    )
    for (attempt, role), steady in _spread_remainder(run, found.spans, rows, new).items():
        _divide_running_time(rows.setdefault((attempt, role), Counter()), role, steady, run, new)
    return _written_rows(rows, found, _trained_amounts(run))


def _is_due(run: RunSnapshot, new: RLRunStatus, found: Ledger) -> bool:
    """Return whether time has to be counted now: its use changes, or the last count is too old."""
    past = run.past
    assert past.cost is not None
    if list(found.pods) != past.cost.pods:
        return True
    if not found.holds:
        return False
    changed = (new.phase, new.attempt, new.progress.step) != (past.phase, past.attempt, past.progress.step)
    told = seconds_of(past.cost.counted_to)
    return changed or told is None or not 0 <= found.counted_to - told < COUNT_SECONDS


def _spread_remainder(
    run: RunSnapshot, spans: tuple[Span, ...], rows: Rows, new: RLRunStatus
) -> Counter[tuple[int, Role]]:
    """Add time outside of steps to the rows, and return the remaining GPU-seconds by row."""
    steady: Counter[tuple[int, Role]] = Counter()
    current = run.past.attempt or new.attempt or 1
    use = _use_of_phase(run.past)
    for span in spans:
        own = span.pod.attempt if span.pod is not None and span.role != "inference" else 0
        key = (own or current, span.role)
        for part, seconds in _split_stages(span, use):
            if part is None:
                steady[key] += span.gpus * seconds
            else:
                rows.setdefault(key, Counter())[part] += span.gpus * seconds
    return steady


def _use_of_phase(past: RLRunStatus) -> Use | None:
    """Return the use of the time of a phase; None: steps and waits for them."""
    completing = find_condition(past.conditions, reasons.COMPLETE)
    if past.phase in ("Complete", "Failed") or (completing is not None and completing.reason == reasons.GUESTS_JOINED):
        return "other"
    if past.phase in _STARTS:
        return "startup"
    return None if past.phase == "Running" else "stopping"


def _split_stages(span: Span, use: Use | None) -> Iterator[tuple[Use | None, int]]:
    """Yield the seconds of a span by use: an engine starts until it is ready, and a terminating pod stops."""
    pod, asked = span.pod, span.end
    if pod is not None and pod.deleted_at is not None:
        asked = min(max(math.floor(pod.deleted_at), span.start), span.end)
    ready = span.start
    if use is None and pod is not None and span.role == "inference" and pod.deleted_at is None:
        since = gpu_time.ready_at(pod)
        ready = asked if since is None else min(max(since, span.start), asked)
    yield "startup", ready - span.start
    yield use, asked - ready
    yield "stopping", span.end - asked


def _divide_running_time(row: Counter[str], role: Role, seconds: int, run: RunSnapshot, new: RLRunStatus) -> None:
    """Divide time of a running attempt into repeated steps, waiting by the measured share, and training.

    Rounding uses the sums of the row, so that errors do not accumulate over many counts.
    """
    again = round(seconds * _repeated_share(run.past, new))
    first = seconds - again
    wait = _WAITS.get(role)
    share = _waiting_share(run, role) if wait is not None else 0.0
    before = row["trained"] + (row[wait] if wait is not None else 0)
    waited = math.floor((before + first) * share) - math.floor(before * share)
    row["repeated"] += again
    row["trained"] += first - waited
    if wait is not None:
        row[wait] += waited


def _repeated_share(past: RLRunStatus, new: RLRunStatus) -> float:
    """Return the share of the time since the last record in which earlier steps were trained again."""
    before, now, furthest = past.progress.step, new.progress.step, past.progress.furthest_step
    if new.attempt != past.attempt or now <= before:
        return float(before < furthest)
    return (min(now, furthest) - min(before, furthest)) / (now - before)


def _waiting_share(run: RunSnapshot, role: Role) -> float:
    """Return the share of the time in which a role waited for the other over the last steps; colocated trainers do not wait."""
    report = read_lease(run.observed.lease, run.past.attempt)
    load: EngineLoad | None = report.load if report is not None else None
    if load is None or (role == "trainer" and not run.has_own_engines):
        return 0.0
    return load.waited if role == "trainer" else load.idle


def _trained_amounts(run: RunSnapshot) -> dict[str, int] | None:
    """Return the last reported numbers of trained tokens and samples, or None before the first report."""
    report = read_lease(run.observed.lease, run.past.attempt)
    if report is None or report.trained is None:
        return run.past.cost.trained if run.past.cost is not None else None
    return dict(zip(("tokens", "samples"), report.trained, strict=True))


def _written_rows(rows: Rows, found: Ledger, trained: Mapping[str, int] | None) -> CostStatus:
    kept = sorted({attempt for attempt, _ in rows if attempt})[-ATTEMPTS_KEPT:]
    merged: Rows = {}
    for (attempt, role), row in rows.items():
        merged.setdefault((attempt if attempt in kept else 0, role), Counter()).update(row)
    every: Counter[str] = Counter()
    for row in merged.values():
        every.update(row)
    hours = every.total() / 3600
    return CostStatus(
        gpu_hours=round(hours, 4),
        trained=dict(trained) if trained else None,
        per_gpu_hour=_cost_rates(trained, hours) if trained and hours else None,
        gpu_seconds=_plain_row(every),
        attempts=[
            RoleCost(attempt=a, role=r, gpu_seconds=_plain_row(row)) for (a, r), row in sorted(merged.items()) if +row
        ],
        counted_to=format_rfc3339(found.counted_to),
        pods=list(found.pods),
    )


def _plain_row(row: Counter[str]) -> dict[str, int]:
    return {use: min(seconds, COUNT_MAX) for use, seconds in sorted(row.items()) if seconds}


def _cost_rates(trained: Mapping[str, int], hours: float) -> dict[str, float]:
    return {what: float(f"{count / hours:.{_DIGITS}g}") for what, count in trained.items()}
