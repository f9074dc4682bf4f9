"""Snapshot of a run from its folder on this machine.

Failures of attempts come from error reports of roles, the launcher's record and the ends of logs. Conditions have the operator's types and
reasons. The module reads small files and the ends of large files, and changes nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from rlrun.diagnostics.stacks import crash_lines, describe_end
from rlrun.diagnostics.symptoms import symptom_of
from rlrun.inspect.small_files import modified_at, read_config, read_json, tail_lines, tail_text
from rlrun.inspect.snapshot import Condition, Failure, Progress, Snapshot, Start, Wait, format_rfc3339
from rlrun.protocol.files.checkpoint_manifest import complete_checkpoints
from rlrun.protocol.files.failures import read_error, telling_lines, volume_is_full
from rlrun.protocol.files.launcher_record import LauncherRecord, read_record
from rlrun.protocol.files.paths import Role, RunPaths
from rlrun.protocol.files.run_folder import read_fork
from rlrun.protocol.messages.lease_annotations import start_times
from rlrun.runtime import exit_codes
from rlrun.runtime.printable import escape_controls

_FAILURES = 5
_BY_CODE = {
    exit_codes.DATA: "DataError",
    exit_codes.CONFIGURATION: "ConfigurationError",
    exit_codes.STORAGE: "StorageError",
    exit_codes.ATTEMPT_TAKEN: "AttemptNumberTaken",
}


def failures_of(paths: RunPaths, numbers: Sequence[int], record: LauncherRecord | None) -> tuple[Failure, ...]:
    """Return the failures of the last attempts, if they left a trace."""
    return tuple(found for n in numbers[-_FAILURES:] if (found := _first_cause(paths, n, record)) is not None)


def _first_cause(paths: RunPaths, attempt: int, record: LauncherRecord | None) -> Failure | None:
    """Return the first cause of an attempt's end.

    Order: a role's own report, the exit of the process in the launcher's record, a report of a role that failed as a consequence.
    """
    reports = []
    for role in get_args(Role):
        folder = paths.logs(attempt, role)
        if (error := read_error(folder)) is not None:
            reports.append((error.follows, role, error, modified_at(folder / "error.json")))
    first = min(reports, key=lambda report: report[0], default=None)
    if first is None or first[0]:
        named = _named_by(paths, attempt, record)
        if named is not None or first is None:
            return named
    _, role, error, time = first
    text = escape_controls(str(error))
    return _failure_of(attempt, role, error.code, _failure_reason(error.code, text), text, time)


def _named_by(paths: RunPaths, attempt: int, record: LauncherRecord | None) -> Failure | None:
    """Return the failure of the process in the launcher's record, with the end of its log."""
    if record is None or record.attempt != attempt or record.state != "Failed":
        return None
    if not isinstance(record.failed_role, str):
        return None
    name, code = escape_controls(record.failed_role), record.exit_code
    role = name.rpartition("-")[0] if name.startswith("inference-") else name
    text = tail_text(paths.root / "logs" / f"attempt_{attempt:04d}" / role / f"{name}.log")
    words = f"{name} {describe_end(code)}" if code is not None else f"{name} ended"
    found = None if crash_lines(text.splitlines()) else symptom_of(text)
    said = (
        f"{words}: {escape_controls(str(found))}" if found is not None else "; ".join([words, *telling_lines(text, 3)])
    )
    return replace(_failure_of(attempt, role, code, _failure_reason(code, text), said, record.time), process=name)


def _failure_of(attempt: int, role: str, code: int | None, reason: str, text: str, time: float | None) -> Failure:
    when = format_rfc3339(time) if time is not None else None
    return Failure(attempt, role, role, None, code, reason, text, counted=False, time=when)


def _failure_reason(code: int | None, text: str) -> str:
    if code in _BY_CODE:
        return _BY_CODE[code]
    if code is not None and 64 <= code <= 77:
        return "PermanentError"
    found = symptom_of(text)
    if found is not None and found.reason is not None:
        return found.reason
    return "Killed" if code is not None and (code < 0 or code > 128) else "ExitCode"


_SILENT_SECONDS = 60.0
"""Seconds without a response of the orchestrator after which the run gets the reason HeartbeatLost."""


def with_conditions(
    run: Snapshot, paths: RunPaths, role: Mapping[str, object], record: LauncherRecord | None, now: float
) -> Snapshot:
    """Add the operator's conditions that apply to one machine, and a reason if the run has none."""
    storage, progress = _storage_condition(paths, record), _progress_condition(run, served=record is not None)
    checkpoint = _checkpoint_condition(run, role) if role.get("task") != "Eval" else None
    known = [one for one in (storage, checkpoint, progress) if one is not None]
    if run.reason is None:
        first = next(
            (one for one in known if one.reason.startswith("Storage") or one.reason == "HeartbeatLost"), known[-1]
        )
        run = replace(run, reason=first.reason, message=first.message)
    return replace(run, conditions=tuple(known))


def _progress_condition(run: Snapshot, *, served: bool) -> Condition | None:
    """Return the condition of the run's phase. `served`: whether a launcher runs it."""
    if run.phase == "Starting":
        waits = run.wait.text if run.wait is not None else run.message or "the roles to start"
        return Condition("Progressing", "Unknown", "WaitingForFirstStep", waits)
    if run.phase == "Running":
        silent = run.heard_seconds or 0.0
        if served and silent > _SILENT_SECONDS:
            text = f"the orchestrator has not responded to its launcher for {int(silent)} s"
            return Condition("Progressing", "Unknown", "HeartbeatLost", text)
        return Condition("Progressing", "True", "Training", f"step {run.progress.step}")
    if run.reason is None:
        return None
    kind = run.phase if run.phase in ("Complete", "Failed") else "Suspended"
    return Condition(kind, "True", run.reason, run.message or "", run.ended)


def _storage_condition(paths: RunPaths, record: LauncherRecord | None) -> Condition | None:
    trouble = record.progress.get("storage") if record is not None else None
    if isinstance(trouble, Mapping) and trouble.get("reason"):
        return Condition(
            "StorageReady", "False", str(trouble["reason"]), escape_controls(str(trouble.get("text") or ""))
        )
    if volume_is_full(paths.root):
        return Condition("StorageReady", "False", "StorageFull", f"the volume of {paths.root} is full")
    return None


def _checkpoint_condition(run: Snapshot, role: Mapping[str, object]) -> Condition:
    checkpoint = role.get("checkpoint")
    if isinstance(checkpoint, Mapping) and checkpoint.get("enabled") is False:
        return Condition("CheckpointHealthy", "False", "CheckpointsOff", "checkpoint.enabled is false")
    step = run.progress.checkpoint_step
    if step is None:
        return Condition("CheckpointHealthy", "False", "NoCheckpointYet", "there is no complete checkpoint yet")
    return Condition("CheckpointHealthy", "True", "CheckpointsComplete", f"the checkpoint of step {step} is complete")


_QUIET_SECONDS = 120.0
"""Seconds without a change of files after which a run without a launcher's record counts as stopped."""


def is_run(root: Path) -> bool:
    """Return whether a folder contains a run, or the start of a run."""
    paths = RunPaths(root)
    return any(path.exists() for path in (paths.run_json, paths.identity, paths.launcher, paths.attempts))


def runs_below(root: Path) -> list[Path]:
    """Return `root` if it contains a run, otherwise the direct subfolders with runs, by name."""
    if is_run(root):
        return [root]
    return sorted(path for path in root.iterdir() if path.is_dir() and is_run(path)) if root.is_dir() else []


def read_folder(root: Path, now: float) -> Snapshot:
    """Return the snapshot of the run in a folder.

    Args:
        root: folder of the run, for which `is_run` is true.
        now: seconds since the epoch.
    """
    paths = RunPaths(root)
    record, lines = read_record(paths.launcher), tail_lines(paths.metrics)
    numbers = _attempt_numbers(paths, record)
    role = read_config(paths, numbers)
    forked = _fork_origin(paths)
    waits = forked is not None and record is None and len(numbers) < 2  # the only attempt belongs to the original run
    alive = record.alive(now) if record is not None else not waits and _is_touched(paths, numbers, now)
    progress = _read_progress(paths, role, record if alive else None, lines, numbers[-1] if numbers else 0)
    base = Snapshot(
        place="folder",
        name=escape_controls(str(role.get("name") or read_json(paths.identity).get("name") or root.name)),
        where=_short_path(root),
        task=escape_controls(str(role.get("task") or "RL")),
        phase="Running",
        reason=None,
        message=None,
        attempt=numbers[-1] if numbers else 0,
        restarts=max(0, len(numbers) - 1 - (forked is not None)),
        restarts_counted=0,
        max_restarts=None,
        progress=progress,
        failures=failures_of(paths, numbers, record),
        host=_read_text(role.get("shared_with")),
        start=_read_start(lines),
        forked_from=forked,
        go_on=escape_controls(record.command) if record is not None else None,
        started=_started_at(paths, numbers, record),
        results=tuple(
            escape_controls(str(line)) for line in ((record.progress if record else {}).get("results") or ())
        ),
    )
    trained = base.attempt > 0 and (
        _newest_line(lines).get("attempt") == base.attempt or _has_saved(paths, base.attempt)
    )
    judged = _judge_phase(base, record, alive=alive, trained=trained, now=now)
    if waits:
        again = shlex.join(
            ["rlrun", "local", f"{base.where}/{paths.manifest.name}", "--output-dir", base.where, "--resume"]
        )
        judged = replace(judged, message=f"this fork has not been started yet; start it with `{again}`", go_on=again)
    return with_conditions(judged, paths, role, record if alive else None, now)


def _fork_origin(paths: RunPaths) -> str | None:
    fork = read_fork(paths.fork)
    return None if fork is None else escape_controls(f"step {fork.step} of {fork.run} ({fork.folder})")


def _newest_line(lines: Sequence[Mapping[str, object]]) -> Mapping[str, object]:
    """Return the line of metrics of the last step of any attempt, or an empty mapping."""
    return next((line for line in reversed(lines) if _read_whole(line.get("step"))), {})


_SECONDS_MAX = 1e9
"""Larger values in a line are invalid durations, and may not fit into a float."""


def _read_start(lines: Sequence[Mapping[str, object]]) -> Start | None:
    """Return the startup of the newest attempt with a trained step, if its line is among `lines`."""
    for line in reversed(lines):
        numbers = {n: float(v) for n, v in line.items() if isinstance(v, int | float) and abs(v) < _SECONDS_MAX}
        if (seconds := start_times(numbers)) is not None:
            return Start(_read_whole(line.get("attempt")) or 0, tuple(seconds.items()), sum(seconds.values()))
    return None


def _has_saved(paths: RunPaths, attempt: int) -> bool:
    return any(found.attempt == attempt for found in complete_checkpoints(paths))


def _judge_phase(run: Snapshot, record: LauncherRecord | None, *, alive: bool, trained: bool, now: float) -> Snapshot:
    """Set phase, reason and message. `trained`: the volume has a step of the newest attempt, which its record may not contain yet."""
    if alive and trained and run.task != "Eval":
        return replace(_judge_living(run, record, now), phase="Running", reason=None, message=None)
    if alive:
        return _judge_living(run, record, now)
    step, total = run.progress.step, run.progress.total_steps
    if record is None:
        if step is not None and step == total:
            return _with_end(run, "Complete", "Completed", None, None)
        text = "the run has no launcher, and its folder has not changed for two minutes"
        return _with_end(run, "Suspended", "NotRunning", text, None)
    ended = format_rfc3339(record.time)
    match record.state:
        case "Complete":
            return _with_end(run, "Complete", "Completed", None, ended)
        case "Interrupted":
            return _with_end(
                run, "Suspended", "Interrupted", "a signal stopped the run (Ctrl-C, or rlrun suspend)", ended
            )
        case "Failed":
            last = run.failures[-1] if run.failures else None
            return _with_end(run, "Failed", "RoleFailed", last.message if last else "a role has failed", ended)
    text = f"the launcher (process {record.pid} on {record.host}) disappeared without a report at {ended}"
    return _with_end(run, "Failed", "LauncherGone", text, ended)


def _judge_living(run: Snapshot, record: LauncherRecord | None, now: float) -> Snapshot:
    if record is None:  # roles that were started by hand
        return replace(run, phase="Running" if run.progress.step else "Starting")
    found = record.progress
    if not found:
        text = f"the orchestrator has not responded yet, {int(now - record.began)} s after the start"
        return replace(run, phase="Starting", reason="WaitingForFirstStep", message=text)
    since = found.get("waiting_since")
    wait = Wait(
        escape_controls(str(found.get("waiting_on") or "")),
        _read_text(found.get("waiting_role")),
        _read_text(found.get("waiting_phase")),
        format_rfc3339(since) if isinstance(since, int | float) else None,
    )
    phase = "Running" if run.progress.step is not None and _has_trained(run, record) else "Starting"
    heard = max(0.0, now - record.progress_time)
    return replace(run, phase=phase, wait=wait if wait.text else None, heard_seconds=heard)


def _has_trained(run: Snapshot, record: LauncherRecord) -> bool:
    resumed = record.progress.get("resumed_from_step")
    return (run.progress.step or 0) > (resumed if isinstance(resumed, int) else 0)


def _with_end(run: Snapshot, phase: str, reason: str, message: str | None, ended: str | None) -> Snapshot:
    return replace(run, phase=phase, reason=reason, message=message or None, ended=ended)


def _read_progress(
    paths: RunPaths,
    role: Mapping[str, object],
    record: LauncherRecord | None,
    lines: Sequence[Mapping[str, object]],
    attempt: int,
) -> Progress:
    last = _newest_line(lines)
    said: Mapping[str, object] = record.progress if record is not None else {}
    complete = complete_checkpoints(paths)
    total = _read_whole(role.get("max_steps"))
    step = _read_whole(said.get("step")) if said else _read_whole(last.get("step"))
    # The record is at most two seconds old, the volume can be newer. Lines of an earlier attempt may be of steps that are trained again.
    own = [_read_whole(last.get("step"))] if last.get("attempt") == attempt else []
    own += [found.step for found in complete if found.attempt == attempt]
    step = max((known for known in (step, *own) if known is not None), default=None)
    time = last.get("time")
    return Progress(
        step=step,
        total_steps=_read_whole(said.get("max_steps")) or total,
        policy_version=_read_whole(said.get("policy_version")),
        reward=_read_number(last.get("reward/mean", said.get("reward"))),
        loss=_read_number(last.get("loss")) if "reward/mean" not in last else None,
        tokens_per_second=_read_number(last.get("perf/throughput")),
        staleness_mean=_read_number(last.get("off_policy/mean")),
        sent_bytes=_read_number(last.get("weights/sent_bytes")),
        version_bytes=_read_number(last.get("weights/bytes")),
        last_step_time=format_rfc3339(float(time)) if isinstance(time, int | float) else None,
        eta_seconds=_read_number(said.get("eta_seconds")) if said else None,
        checkpoint_step=complete[-1].step if complete else None,
        resumed_from_step=_read_whole(said.get("resumed_from_step")),
    )


def _attempt_numbers(paths: RunPaths, record: LauncherRecord | None) -> list[int]:
    """Return the numbers of all attempts that started, or tried to start, in ascending order."""
    logs = paths.root / "logs"
    tried = [path.name.removeprefix("attempt_") for path in logs.iterdir()] if logs.is_dir() else []
    numbers = {*paths.attempts_on_disk(), *(int(name) for name in tried if name.isdecimal())}
    return sorted(numbers | ({record.attempt} if record is not None else set()))


def _started_at(paths: RunPaths, numbers: Sequence[int], record: LauncherRecord | None) -> str | None:
    began = read_json(paths.attempt_file(numbers[0])).get("started_at") if numbers else None
    if not isinstance(began, int | float):
        began = record.began if record is not None else None
    return format_rfc3339(began) if began else None


def _is_touched(paths: RunPaths, numbers: Sequence[int], now: float) -> bool:
    """Return whether files were written recently, for a run whose roles were started by hand."""
    logs = paths.root / "logs" / f"attempt_{numbers[-1]:04d}" if numbers else paths.root
    files = [paths.metrics, *(logs.glob("*/*.log") if logs.is_dir() else ())]
    return any((time := modified_at(file)) is not None and now - time < _QUIET_SECONDS for file in files)


def _short_path(root: Path) -> str:
    here = Path.cwd()
    root = root.absolute()
    return str(root.relative_to(here)) if root.is_relative_to(here) and root != here else str(root)


def _read_whole(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _read_number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _read_text(value: object) -> str | None:
    return escape_controls(value) if isinstance(value, str) and value else None
