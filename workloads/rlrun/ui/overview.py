"""Responses about whole runs: list, one run with its explanation, staleness, comparison."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from rlrun.inspect import comparison, configurations
from rlrun.inspect.comparison import RunFields
from rlrun.inspect.gpu_cost import Spent, of_steps, sum_uses
from rlrun.inspect.snapshot import Snapshot
from rlrun.inspect.why import explain_run
from rlrun.protocol.files.metrics_line import FURTHEST
from rlrun.protocol.files.run_folder import ForkedFrom
from rlrun.protocol.messages.lease_annotations import MEASURED, PREFIX
from rlrun.runtime.printable import escape_controls
from rlrun.runtime.redact import HIDDEN, REMOVED, is_secret
from rlrun.runtime.secret_shapes import is_free_path
from rlrun.ui import run_answers
from rlrun.ui.confine import OutsideError
from rlrun.ui.run_registry import OpenRun
from rlrun.ui.shown import ForbiddenError, Run, Runs, UnreadableError
from rlrun.ui.steps import NO_STEPS, StepIndex

_EVENTS = 100
"""Maximum number of events in a response; the newest are kept."""
_CHANGES = 200
"""Maximum number of changed fields of a fork in a response."""


def run_list(runs: Runs) -> run_answers.RunList:
    """Return all runs, and the refused folders."""
    rows, refused = [], []
    for run in runs.list_runs():
        try:
            rows.append(run_row(run.id, run.read_brief_snapshot()))
        except OutsideError as error:
            refused.append(run_answers.Refused(id=run.id, why=str(error)))
    return run_answers.RunList(nothing=runs.nothing, runs=rows, refused=refused)


def run_row(name: str, snapshot: Snapshot) -> run_answers.RunRow:
    """Return the list entry of a run.

    Args:
        name: id of the run in addresses of the UI.
        snapshot: snapshot of the run; the parts of `Run.read_brief_snapshot` are sufficient.
    """
    progress = {
        key: value for key, value in asdict(snapshot.progress).items() if key in run_answers.ProgressView.model_fields
    }
    return run_answers.RunRow(
        id=name,
        name=snapshot.name,
        where=_run_place(snapshot),
        task=snapshot.task,
        phase=snapshot.phase,
        reason=snapshot.reason,
        message=snapshot.message,
        attempt=snapshot.attempt,
        restarts=snapshot.restarts,
        progress=run_answers.ProgressView(**progress),
        started=snapshot.started,
        ended=snapshot.ended,
    )


def _run_place(snapshot: Snapshot) -> str:
    """Return the folder of a run, or namespace/name for a run in a cluster."""
    return snapshot.where if snapshot.place == "folder" else f"{snapshot.where}/{snapshot.name}"


def steps_of(run: Run) -> tuple[StepIndex, str | None]:
    """Return the metrics of a run, and the reason if its files cannot be read here."""
    try:
        return run.open_files().read_steps(), None
    except (ForbiddenError, UnreadableError, OutsideError) as error:
        return NO_STEPS, str(error)


def run_view(run: Run) -> run_answers.RunView:
    """Return one run with its explanation: the current state, the ends of earlier attempts and additional facts (`besides`)."""
    now, snapshot = time.time(), run.read_snapshot()
    index, unread = steps_of(run)
    explanation, bounds = explain_run(snapshot, now), index.bounds
    why = run_answers.Why(
        headline=explanation.headline,
        now=[run_answers.FindingView(**asdict(one)) for one in explanation.now],
        before=[run_answers.FindingView(**asdict(one)) for one in explanation.before],
        besides=list(explanation.besides),
        steps=list(explanation.steps()),
    )
    wanted = run_answers.FailureView.model_fields
    return run_answers.RunView(
        run=run_row(run.id, snapshot),
        place=snapshot.place,
        files=unread is None,
        unread=[*([unread] if unread else []), *snapshot.unread],
        conditions=[run_answers.ConditionView(**asdict(one)) for one in snapshot.conditions],
        events=[run_answers.EventView(**asdict(one)) for one in reversed(snapshot.events[-_EVENTS:])],
        processes=[run_answers.ProcessView(**asdict(one)) for one in snapshot.processes]
        if snapshot.place == "cluster"
        else [],
        wait=run_answers.WaitView(**asdict(snapshot.wait)) if snapshot.wait is not None else None,
        heard_seconds=snapshot.heard_seconds,
        command=snapshot.go_on,
        why=why,
        failures=[
            run_answers.FailureView(**{k: v for k, v in asdict(f).items() if k in wanted}) for f in snapshot.failures
        ],
        attempts=[
            run_answers.AttemptView(attempt=n, first_step=a, last_step=b) for n, (a, b) in index.attempts.items()
        ],
        metrics=index.names,
        first_step=bounds[0] if bounds else None,
        last_step=bounds[1] if bounds else None,
        results=list(snapshot.results),
        cost=_run_cost(run, snapshot, index, now),
    )


def _run_cost(run: Run, snapshot: Snapshot, index: StepIndex, now: float) -> run_answers.CostView | None:
    """Return the cost of a run from its status (in a cluster) or from its metrics (in a folder); None if it is unknown.

    A run in a cluster always counts GPU-seconds. A run in a folder counts seconds of the machine (`gpus` is False) if no GPUs are
    recorded for its roles.
    """
    if snapshot.place == "cluster":
        uses, gpus = sum_uses(snapshot.cost), True
    else:
        uses, gpus = of_steps(
            run.open_files().paths, now, {attempt: _step_seconds(index, attempt) for attempt in index.attempts}
        )
    views = [run_answers.UseView(use=use, seconds=seconds) for use, seconds in uses.items()]
    return run_answers.CostView(gpus=gpus, hours=sum(uses.values()) / 3600, uses=views) if views else None


def _step_seconds(index: StepIndex, attempt: int) -> Spent:
    """Return the time that an attempt spent on steps, divided as in `gpu_cost.Spent`.

    The first step of an attempt ends its startup. Therefore only later steps count for `steps`, `waited` and `repeated`. The start of
    the attempt is the end of the first step minus its duration and minus the phases of the startup that rank 0 measured.
    `gpu_cost._StepSums` computes the same from the lines of `metrics.jsonl`.
    """
    first, last = index.attempts[attempt]
    took = index.metric_line("time/step", first, last)
    if not took.steps:
        return Spent()
    # Only the metrics of a step that was trained before and lost by a restart contain FURTHEST.
    begin, repeated_steps = took.steps[0], set(index.metric_line(FURTHEST, first, last).steps)
    waits = index.metric_line("time/wait_for_batch", first, last)
    (trained, ended), more = index.step_times(begin, last), list(zip(took.steps, took.values, strict=True))[1:]
    start = sum(sum(index.metric_line(PREFIX + phase, begin, begin).values) for phase in MEASURED)
    return Spent(
        steps=sum(seconds for _, seconds in more),
        waited=sum(
            w for step, w in zip(waits.steps, waits.values, strict=True) if step > begin and step not in repeated_steps
        ),
        repeated=sum(seconds for step, seconds in more if step in repeated_steps),
        again=bool(repeated_steps),
        began=max(0.0, trained - took.values[0] - start),
        trained=trained,
        ended=ended,
    )


def staleness_histogram(run: OpenRun, step: int) -> run_answers.Staleness:
    """Return the staleness histogram of a step: the number of sampled tokens for each lag behind the policy that the step trains.

    Raises:
        FileNotFoundError: the step has no trace.
    """
    # A step trains the policy of the previous step: the lag of a token sampled by version `step - 1` is 0.
    lags = run.read_trace_index(run.paths.trace(step)).lag_counts(step - 1)
    return run_answers.Staleness(step=step, lags=list(lags), tokens=list(lags.values()))


def config_history(run: OpenRun, clean: Callable[[dict[str, object]], dict[str, object]]) -> run_answers.History:
    """Return the changes of a run's configuration between its attempts.

    Args:
        run: files of the run.
        clean: function that removes secrets from a configuration. Because only cleaned configurations are compared, a change of only a
            secret is not reported.
    """
    # `fence.open` opens only files in the folders that the server may read, even through symbolic links.
    kept = configurations.attempts_kept(run.paths, run.fence.open, run.read_fork(), lambda config: clean(dict(config)))
    found = configurations.list_edits(kept)
    edits = [
        run_answers.EditView(**asdict(edit) | {"changes": [run_answers.Change(**asdict(one)) for one in edit.changes]})
        for edit in found
    ]
    return run_answers.History(said=configurations.describe_changes(kept, found), edits=edits)


def run_lineage(run: Run, runs: Runs) -> run_answers.Lineage:
    """Return the origin and the forks of a run, among the runs that the caller may see."""
    fork, uid = run.read_fork(), run.read_uid()
    origin, forks = None, []
    for other in runs.list_runs():
        if other.id == run.id:
            continue
        if origin is None and fork is not None and fork.uid and other.read_uid() == fork.uid:
            origin = other
        theirs = other.read_fork()
        if theirs is not None and uid and theirs.uid == uid:
            forks.append(
                run_answers.ForkView(id=other.id, label=other.label, step=theirs.step, changes=_forked_fields(theirs))
            )
    view = None
    if fork is not None:
        view = run_answers.Origin(
            id=None if origin is None else origin.id, run=escape_controls(fork.run), step=fork.step, attempt=fork.attempt,
            folder=escape_controls(fork.folder), changes=_forked_fields(fork),
        )  # fmt: skip
    return run_answers.Lineage(origin=view, forks=sorted(forks, key=lambda one: (one.step, one.label)))


def _forked_fields(fork: ForkedFrom) -> list[run_answers.Change]:
    """Return the changed fields of a fork. Its record contains one line per field: `<field> <value before> -> <value after>`.

    Secrets are replaced with `REMOVED`, and other values in fields that accept any content with `HIDDEN`.
    """
    found = []
    for line in fork.changed[:_CHANGES]:
        field, _, values = escape_controls(line).partition(" ")
        before, _, after = values.partition(" -> ")
        if is_secret(field):
            before = after = REMOVED
        elif is_free_path(field):  # a value of free form may be a secret under any name
            before = after = HIDDEN
        found.append(run_answers.Change(field=field, before=before, after=after))
    return found


def compare_runs(runs: Sequence[Run], fields: Sequence[RunFields]) -> run_answers.Comparison:
    """Return a comparison of runs.

    Args:
        runs: at least two runs.
        fields: manifest fields of each run without secrets, in the order of `runs`.
    """
    found = [steps_of(run) for run in runs]
    indexes, labels = [index for index, _ in found], [run.label for run in runs]
    # `common_metrics` and `manifest_differences` read only names of metrics and fields. One line with all names is therefore sufficient.
    named = [
        comparison.Curve(label, [dict.fromkeys(index.names)], one)
        for label, index, one in zip(labels, indexes, fields, strict=True)
    ]
    metrics = comparison.common_metrics(named)
    common = min((index.bounds or (0, 0))[1] for index in indexes)
    # Last step that all runs have, and the first step of the last tenth of these steps.
    tail = max(1, common - common // 10)
    means = [
        run_answers.Mean(metric=name, means=[_mean_of(index, name, tail, common) for index in indexes])
        for name in metrics
    ]
    differences = [
        run_answers.Difference(field=name, values=values) for name, values in comparison.manifest_differences(named)
    ]
    every = sorted({name for index in indexes for name in index.names})
    return run_answers.Comparison(
        ids=[run.id for run in runs], labels=labels, steps=common, metrics=every, last_tenth=means, differences=differences,
        unread=[f"{label}: {why}" for label, (_, why) in zip(labels, found, strict=True) if why],
    )  # fmt: skip


def _mean_of(index: StepIndex, metric: str, first: int, last: int) -> float | None:
    values = index.metric_line(metric, first, last).values
    return sum(values) / len(values) if values else None
