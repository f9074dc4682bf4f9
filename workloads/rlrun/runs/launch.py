"""Start of a run on this machine in the background: `rlrun local` in a separate process group, which outlives a
notebook's kernel.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rlrun.inspect.folder.reader import is_run
from rlrun.inspect.folder.small_files import tail_text
from rlrun.inspect.kubectl import Api
from rlrun.inspect.snapshot import Condition, Snapshot
from rlrun.inspect.source import FolderRun, NotFoundError, Run, read_run
from rlrun.protocol.files.durable import make_private_folder
from rlrun.protocol.files.launcher import LAUNCH_LOG, LAUNCH_MANIFEST, LauncherRecord, read_record
from rlrun.protocol.files.paths import RunPaths
from rlrun.runs.acts import is_running
from rlrun.runs.manifest import Manifest
from rlrun.runtime.bootstrap import module_command
from rlrun.runtime.printable import printable

_LINES = 40
PROGRAM = tuple(module_command("rlrun.cli.main"))
"""Command of the launcher; tests replace it."""


@dataclass(frozen=True)
class Launched:
    """A launcher started by this process."""

    process: subprocess.Popen[bytes]
    log: Path
    """File with its output."""
    begin: int
    """Offset in the log at which its output starts."""

    def code(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self.process.poll()

    def interrupt(self) -> None:
        """Request a save and stop, like Ctrl-C."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def last_output(self) -> str:
        """Return the last lines of its output."""
        with suppress(OSError), self.log.open("rb") as file:
            file.seek(self.begin)
            lines = file.read().decode(errors="replace").splitlines()
            return printable("\n".join(lines[-_LINES:]), lines=True)
        return ""


def read_snapshot(run: Run, api: Api, launched: Launched | None, now: float) -> Snapshot:
    """Return a snapshot of a run; for a run started by this process also before its launcher has written a record.

    Args:
        run: run to read.
        api: access to the cluster.
        launched: launcher of the run, if this process started it.
        now: seconds since the epoch.
    """
    code = (
        launched.code() if launched is not None else None
    )  # before the read, so that the last writes of an ended launcher are included
    seen = read_run(run, api, now)
    if launched is None or (
        (record := _record_of(launched)) is not None and (code is None or record.state != "Running")
    ):
        return seen
    if code is None:
        return _with_condition(seen, "Starting", "Progressing", "Launching", "its launcher reads the manifest")
    return _with_condition(
        seen, "Failed", "Failed", "NotBegun", f"its launcher ended with exit code {code}: {launched.last_output()}"
    )


def _record_of(launched: Launched) -> LauncherRecord | None:
    """Return the record written by this launcher, or None. An existing record may belong to an earlier attempt."""
    record = read_record(RunPaths(launched.log.parent).launcher)
    return record if record is not None and record.pid == launched.process.pid else None


def _with_condition(seen: Snapshot, phase: str, kind: str, reason: str, message: str) -> Snapshot:
    """Return a snapshot with only this condition."""
    one = Condition(kind, "True", reason, message)
    return replace(seen, phase=phase, reason=reason, message=message, conditions=(one,), failures=(), wait=None)


def launch(manifest: Manifest, root: Path, *, resume: bool, options: Sequence[str]) -> Launched:
    """Start all roles of a run on this machine.

    Args:
        manifest: manifest of the run.
        root: absolute path of the run's folder.
        resume: whether to resume the run in the folder.
        options: additional options of `rlrun local`.

    Raises:
        NotFoundError: the folder is not free.
    """
    if is_run(root) and is_running(FolderRun(root)):
        raise NotFoundError(f"{root} is already running; follow it with Run.open({str(root)!r})")
    if not resume and is_run(root):
        raise NotFoundError(f"{root} already contains a run; resume it with resume=True, or choose another folder")
    make_private_folder(root)
    file, log = _file(manifest, root), root / LAUNCH_LOG
    words = ["local", str(file), "--plain", "--output-dir", str(root), *(["--resume"] if resume else []), *options]
    with log.open("ab") as out:
        process = subprocess.Popen(
            [*PROGRAM, *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        return Launched(process, log, out.tell())


def _file(manifest: Manifest, root: Path) -> Path:
    """Return the manifest's file if it is unchanged, otherwise a new file in the run's folder."""
    if manifest.file is not None and manifest.file.is_file() and tail_text(manifest.file) == manifest.text:
        return manifest.file
    file = root / LAUNCH_MANIFEST
    file.write_text(manifest.to_yaml())
    return file
