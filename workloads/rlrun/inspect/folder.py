"""Snapshot of a run from its folder on this machine. Reads small files and the ends of large ones, and changes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from rlrun.diagnostics.crash import crash_lines, how
from rlrun.diagnostics.symptoms import symptom_of
from rlrun.inspect.snapshot import Condition, Failure, Progress, Snapshot, Start, Wait
from rlrun.inspect.times import rfc3339
from rlrun.protocol.files.checkpoint_manifest import complete_checkpoints
from rlrun.protocol.files.failures import read_error, telling_lines, volume_is_full
from rlrun.protocol.files.forked import read_fork
from rlrun.protocol.files.launcher import LauncherRecord, read_record
from rlrun.protocol.files.paths import Role, RunPaths
from rlrun.protocol.messages.start_times import start_times
from rlrun.runtime import exit_codes
from rlrun.runtime.printable import printable

_TAIL_BYTES = 256 * 1024
_FAILURES = 5
_STEPS_FOR_ETA = 20
_QUIET_SECONDS = 120.0
"""A run without a launcher's record whose files have not changed for so long does not run."""
_SILENT_SECONDS = 60.0
"""An orchestrator that has not answered its launcher for longer is said to be silent."""
_BY_CODE = {
    exit_codes.DATA: "DataError",
    exit_codes.CONFIGURATION: "ConfigurationError",
    exit_codes.STORAGE: "StorageError",
    exit_codes.ATTEMPT_TAKEN: "AttemptNumberTaken",
}


def is_run(root: Path) -> bool:
    """True if a folder holds a run, or the beginning of one."""
    paths = RunPaths(root)
    return any(path.exists() for path in (paths.run_json, paths.identity, paths.launcher, paths.attempts))


def runs_below(root: Path) -> list[Path]:
    """`root` itself if it holds a run, else the folders in it that do, by name."""
    if is_run(root):
        return [root]
    return sorted(path for path in root.iterdir() if path.is_dir() and is_run(path)) if root.is_dir() else []


def read_folder(root: Path, now: float) -> Snapshot:
    """Snapshot of the run in a folder.

    Args:
        root: the run's folder; `is_run` holds.
        now: seconds since the epoch.
    """
    paths = RunPaths(root)
    record, lines = read_record(paths.launcher), tail_lines(paths.metrics)
    numbers = _attempts(paths, record)
    role = read_config(paths, numbers)
    forked = _forked(paths)
    waits = forked is not None and record is None and len(numbers) < 2  # its one attempt is the other run's
    alive = record.alive(now) if record is not None else not waits and _touched(paths, numbers, now)
    progress = _progress(paths, role, record if alive else None, lines, numbers[-1] if numbers else 0)
    base = Snapshot(
        place="folder",
        name=printable(str(role.get("name") or _json(paths.identity).get("name") or root.name)),
        where=_short(root),
        task=printable(str(role.get("task") or "RL")),
        phase="Running",
        reason=None,
        message=None,
        attempt=numbers[-1] if numbers else 0,
        restarts=max(0, len(numbers) - 1 - (forked is not None)),
        restarts_counted=0,
        max_restarts=None,
        progress=progress,
        failures=_failures(paths, numbers, record),
        host=_text(role.get("shared_with")),
        start=_start(lines),
        forked_from=forked,
        go_on=printable(record.command) if record is not None else None,
        started=_started(paths, numbers, record),
        results=tuple(printable(str(line)) for line in ((record.progress if record else {}).get("results") or ())),
    )
    trained = base.attempt > 0 and (
        _newest_line(lines).get("attempt") == base.attempt or _has_saved(paths, base.attempt)
    )
    judged = _judge(base, record, alive=alive, trained=trained, now=now)
    if waits:
        again = f"rlrun local {base.where}/{paths.manifest.name} --output-dir {base.where} --resume"
        judged = replace(judged, message=f"it is a fork that was not started yet; `{again}` starts it", go_on=again)
    return _with_conditions(judged, paths, role, record if alive else None, now)


def _failures(paths: RunPaths, numbers: Sequence[int], record: LauncherRecord | None) -> tuple[Failure, ...]:
    """Failures of the last attempts, as far as they left a trace."""
    return tuple(found for n in numbers[-_FAILURES:] if (found := _failure(paths, n, record)) is not None)


def _forked(paths: RunPaths) -> str | None:
    fork = read_fork(paths.fork)
    return None if fork is None else printable(f"step {fork.step} of {fork.run} ({fork.folder})")


def _newest_line(lines: Sequence[Mapping[str, object]]) -> Mapping[str, object]:
    """Line of metrics of the last step, of whichever attempt; empty: there is none."""
    return next((line for line in reversed(lines) if _whole(line.get("step"))), {})


_SECONDS_MAX = 1e9
"""Larger numbers of a line are of no interest, and may be ones that no float holds."""


def _start(lines: Sequence[Mapping[str, object]]) -> Start | None:
    """Start of the newest attempt that has trained a step, where its line is among `lines`."""
    for line in reversed(lines):
        numbers = {n: float(v) for n, v in line.items() if isinstance(v, int | float) and abs(v) < _SECONDS_MAX}
        if (seconds := start_times(numbers)) is not None:
            return Start(_whole(line.get("attempt")) or 0, tuple(seconds.items()), sum(seconds.values()))
    return None


def _has_saved(paths: RunPaths, attempt: int) -> bool:
    return any(found.attempt == attempt for found in complete_checkpoints(paths))


def _judge(run: Snapshot, record: LauncherRecord | None, *, alive: bool, trained: bool, now: float) -> Snapshot:
    """Phase, reason and message; `trained`: the volume has a step of the newest attempt, of which its record is to hear yet."""
    if alive and trained and run.task != "Eval":
        return replace(_living(run, record, now), phase="Running", reason=None, message=None)
    if alive:
        return _living(run, record, now)
    step, total = run.progress.step, run.progress.total_steps
    if record is None:
        if step is not None and step == total:
            return _ended(run, "Complete", "Completed", None, None)
        text = "nothing was written into its folder for two minutes, and it has no launcher"
        return _ended(run, "Suspended", "NotRunning", text, None)
    ended = rfc3339(record.time)
    match record.state:
        case "Complete":
            return _ended(run, "Complete", "Completed", None, ended)
        case "Interrupted":
            return _ended(run, "Suspended", "Interrupted", "a signal has stopped it (Ctrl-C, or rlrun suspend)", ended)
        case "Failed":
            last = run.failures[-1] if run.failures else None
            return _ended(run, "Failed", "RoleFailed", last.message if last else "a role has failed", ended)
    text = f"its launcher (process {record.pid} on {record.host}) is gone without a word since {ended}"
    return _ended(run, "Failed", "LauncherGone", text, ended)


def _living(run: Snapshot, record: LauncherRecord | None, now: float) -> Snapshot:
    if record is None:  # roles that were started by hand
        return replace(run, phase="Running" if run.progress.step else "Starting")
    found = record.progress
    if not found:
        text = f"the orchestrator has not answered yet, {int(now - record.began)} s after the start"
        return replace(run, phase="Starting", reason="WaitingForFirstStep", message=text)
    since = found.get("waiting_since")
    wait = Wait(
        printable(str(found.get("waiting_on") or "")),
        _text(found.get("waiting_role")),
        _text(found.get("waiting_phase")),
        rfc3339(since) if isinstance(since, int | float) else None,
    )
    phase = "Running" if run.progress.step is not None and _trained(run, record) else "Starting"
    heard = max(0.0, now - record.progress_time)
    return replace(run, phase=phase, wait=wait if wait.text else None, heard_seconds=heard)


def _trained(run: Snapshot, record: LauncherRecord) -> bool:
    resumed = record.progress.get("resumed_from_step")
    return (run.progress.step or 0) > (resumed if isinstance(resumed, int) else 0)


def _ended(run: Snapshot, phase: str, reason: str, message: str | None, ended: str | None) -> Snapshot:
    return replace(run, phase=phase, reason=reason, message=message or None, ended=ended)


def _with_conditions(
    run: Snapshot, paths: RunPaths, role: Mapping[str, object], record: LauncherRecord | None, now: float
) -> Snapshot:
    """Conditions in the operator's words, as far as they mean something on one machine; and the reason, where there is none."""
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
    """Condition of the run's phase; `served`: a launcher runs it."""
    if run.phase == "Starting":
        waits = run.wait.text if run.wait is not None else run.message or "the roles to start"
        return Condition("Progressing", "Unknown", "WaitingForFirstStep", waits)
    if run.phase == "Running":
        silent = run.heard_seconds or 0.0
        if served and silent > _SILENT_SECONDS:
            text = f"the orchestrator has not answered its launcher for {int(silent)} s"
            return Condition("Progressing", "Unknown", "HeartbeatLost", text)
        return Condition("Progressing", "True", "Training", f"step {run.progress.step}")
    if run.reason is None:
        return None
    kind = run.phase if run.phase in ("Complete", "Failed") else "Suspended"
    return Condition(kind, "True", run.reason, run.message or "", run.ended)


def _storage_condition(paths: RunPaths, record: LauncherRecord | None) -> Condition | None:
    trouble = record.progress.get("storage") if record is not None else None
    if isinstance(trouble, Mapping) and trouble.get("reason"):
        return Condition("StorageReady", "False", str(trouble["reason"]), printable(str(trouble.get("text") or "")))
    if volume_is_full(paths.root):
        return Condition("StorageReady", "False", "StorageFull", f"the volume of {paths.root} is full")
    return None


def _checkpoint_condition(run: Snapshot, role: Mapping[str, object]) -> Condition:
    checkpoint = role.get("checkpoint")
    if isinstance(checkpoint, Mapping) and checkpoint.get("enabled") is False:
        return Condition("CheckpointHealthy", "False", "CheckpointsOff", "checkpoint.enabled is false")
    step = run.progress.checkpoint_step
    if step is None:
        return Condition("CheckpointHealthy", "False", "NoCheckpointYet", "no checkpoint is complete yet")
    return Condition("CheckpointHealthy", "True", "CheckpointsComplete", f"the checkpoint of step {step} is complete")


def _progress(
    paths: RunPaths,
    role: Mapping[str, object],
    record: LauncherRecord | None,
    lines: Sequence[Mapping[str, object]],
    attempt: int,
) -> Progress:
    last = _newest_line(lines)
    said: Mapping[str, object] = record.progress if record is not None else {}
    complete = complete_checkpoints(paths)
    total = _whole(role.get("max_steps"))
    step = _whole(said.get("step")) if said else _whole(last.get("step"))
    # The record is two seconds old at most, and the volume is not. Lines of an earlier attempt may be of steps that are trained again.
    own = [_whole(last.get("step"))] if last.get("attempt") == attempt else []
    own += [found.step for found in complete if found.attempt == attempt]
    step = max((known for known in (step, *own) if known is not None), default=None)
    time = last.get("time")
    return Progress(
        step=step,
        total_steps=_whole(said.get("max_steps")) or total,
        policy_version=_whole(said.get("policy_version")),
        reward=_number(last.get("reward/mean", said.get("reward"))),
        loss=_number(last.get("loss")) if "reward/mean" not in last else None,
        tokens_per_second=_number(last.get("perf/throughput")),
        staleness_mean=_number(last.get("off_policy/mean")),
        last_step_time=rfc3339(float(time)) if isinstance(time, int | float) else None,
        eta_seconds=_number(said.get("eta_seconds")) if said else None,
        checkpoint_step=complete[-1].step if complete else None,
        resumed_from_step=_whole(said.get("resumed_from_step")),
    )


def _failure(paths: RunPaths, attempt: int, record: LauncherRecord | None) -> Failure | None:
    """First cause of an attempt's end.

    A role's own report; else how the process ended that the launcher names; else a report of one that only followed.
    """
    reports = []
    for role in get_args(Role):
        folder = paths.logs(attempt, role)
        if (error := read_error(folder)) is not None:
            reports.append((error.follows, role, error, _mtime(folder / "error.json")))
    first = min(reports, key=lambda report: report[0], default=None)
    if first is None or first[0]:
        named = _named_by(paths, attempt, record)
        if named is not None or first is None:
            return named
    _, role, error, time = first
    text = printable(str(error))
    return _of(attempt, role, error.code, _reason(error.code, text), text, time)


def _named_by(paths: RunPaths, attempt: int, record: LauncherRecord | None) -> Failure | None:
    """Failure of the process that the launcher's record names, with the end of its log."""
    if record is None or record.attempt != attempt or record.state != "Failed":
        return None
    if not isinstance(record.failed_role, str):
        return None
    name, code = printable(record.failed_role), record.exit_code
    role = name.rpartition("-")[0] if name.startswith("inference-") else name
    text = tail_text(paths.root / "logs" / f"attempt_{attempt:04d}" / role / f"{name}.log")
    words = f"{name} {how(code)}" if code is not None else f"{name} ended"
    found = None if crash_lines(text.splitlines()) else symptom_of(text)
    said = f"{words}: {printable(str(found))}" if found is not None else "; ".join([words, *telling_lines(text, 3)])
    return replace(_of(attempt, role, code, _reason(code, text), said, record.time), process=name)


def _of(attempt: int, role: str, code: int | None, reason: str, text: str, time: float | None) -> Failure:
    when = rfc3339(time) if time is not None else None
    return Failure(attempt, role, role, None, code, reason, text, counted=False, time=when)


def _reason(code: int | None, text: str) -> str:
    if code in _BY_CODE:
        return _BY_CODE[code]
    if code is not None and 64 <= code <= 77:
        return "PermanentError"
    found = symptom_of(text)
    if found is not None and found.reason is not None:
        return found.reason
    return "Killed" if code is not None and (code < 0 or code > 128) else "ExitCode"


def _attempts(paths: RunPaths, record: LauncherRecord | None) -> list[int]:
    """Numbers of all attempts that began, or tried to, ascending."""
    logs = paths.root / "logs"
    tried = [path.name.removeprefix("attempt_") for path in logs.iterdir()] if logs.is_dir() else []
    numbers = {*paths.attempts_on_disk(), *(int(name) for name in tried if name.isdecimal())}
    return sorted(numbers | ({record.attempt} if record is not None else set()))


def _started(paths: RunPaths, numbers: Sequence[int], record: LauncherRecord | None) -> str | None:
    began = _json(paths.attempt_file(numbers[0])).get("started_at") if numbers else None
    if not isinstance(began, int | float):
        began = record.began if record is not None else None
    return rfc3339(began) if began else None


def _touched(paths: RunPaths, numbers: Sequence[int], now: float) -> bool:
    """True if something was written a short time ago, for a run whose roles were started by hand."""
    logs = paths.root / "logs" / f"attempt_{numbers[-1]:04d}" if numbers else paths.root
    files = [paths.metrics, *(logs.glob("*/*.log") if logs.is_dir() else ())]
    return any((time := _mtime(file)) is not None and now - time < _QUIET_SECONDS for file in files)


def tail_text(path: Path, size: int = _TAIL_BYTES) -> str:
    """End of a file, from the beginning of a line; empty: there is none."""
    try:
        with path.open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(max(0, length - size))
            content = file.read()
    except OSError:
        return ""
    return (content if length <= size else content.partition(b"\n")[2]).decode(errors="replace")


def tail_lines(path: Path, size: int = _TAIL_BYTES) -> list[dict[str, object]]:
    """Last whole lines of a JSONL file; a torn or damaged one is left out."""
    whole, newline, _ = tail_text(path, size).rpartition("\n")
    return json_lines(whole + newline)


def json_lines(text: str) -> list[dict[str, object]]:
    """Objects of JSON lines; a line that is none is left out."""
    found = []
    for line in text.splitlines():
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if isinstance(document, dict):
            found.append(document)
    return found


def read_config(paths: RunPaths, numbers: Sequence[int]) -> dict[str, object]:
    """Configuration of one role, which has the fields of all; of roles started by hand, that in the logs of the newest attempt."""
    config = _json(paths.run_json)
    found = [one for name in ("trainer", "orchestrator") if isinstance(one := config.get(name), dict)]
    if not found and numbers:
        found = [_json(paths.logs(numbers[-1], role) / "config.json") for role in ("trainer", "orchestrator")]
    return next((one for one in found if one), {})


def _json(path: Path) -> dict[str, object]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _short(root: Path) -> str:
    here = Path.cwd()
    root = root.absolute()
    return str(root.relative_to(here)) if root.is_relative_to(here) and root != here else str(root)


def _whole(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return printable(value) if isinstance(value, str) and value else None
