"""Failures of a run's attempts, from error reports of roles, the launcher's record and the ends of logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from rlrun.diagnostics.crash import crash_lines, describe_end
from rlrun.diagnostics.symptoms import symptom_of
from rlrun.inspect.folder.small_files import modified_at, tail_text
from rlrun.inspect.snapshot import Failure
from rlrun.inspect.times import rfc3339
from rlrun.protocol.files.failures import read_error, telling_lines
from rlrun.protocol.files.launcher import LauncherRecord
from rlrun.protocol.files.paths import Role, RunPaths
from rlrun.runtime import exit_codes
from rlrun.runtime.printable import printable

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
    text = printable(str(error))
    return _failure_of(attempt, role, error.code, _failure_reason(error.code, text), text, time)


def _named_by(paths: RunPaths, attempt: int, record: LauncherRecord | None) -> Failure | None:
    """Return the failure of the process in the launcher's record, with the end of its log."""
    if record is None or record.attempt != attempt or record.state != "Failed":
        return None
    if not isinstance(record.failed_role, str):
        return None
    name, code = printable(record.failed_role), record.exit_code
    role = name.rpartition("-")[0] if name.startswith("inference-") else name
    text = tail_text(paths.root / "logs" / f"attempt_{attempt:04d}" / role / f"{name}.log")
    words = f"{name} {describe_end(code)}" if code is not None else f"{name} ended"
    found = None if crash_lines(text.splitlines()) else symptom_of(text)
    said = f"{words}: {printable(str(found))}" if found is not None else "; ".join([words, *telling_lines(text, 3)])
    return replace(_failure_of(attempt, role, code, _failure_reason(code, text), said, record.time), process=name)


def _failure_of(attempt: int, role: str, code: int | None, reason: str, text: str, time: float | None) -> Failure:
    when = rfc3339(time) if time is not None else None
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
