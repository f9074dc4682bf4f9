"""Start of a run on this machine in the background: `rlrun local` in a process group of its own, which outlives a notebook's kernel."""

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
"""The launcher; tests put another one in its place."""


@dataclass(frozen=True)
class Launched:
    """A launcher that this process has started."""

    process: subprocess.Popen[bytes]
    log: Path
    """Its output."""
    begin: int
    """Place in the log at which it began."""

    def code(self) -> int | None:
        """Exit code; None: it goes on."""
        return self.process.poll()

    def interrupt(self) -> None:
        """Ask it to save and stop, as Ctrl-C does."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def said(self) -> str:
        """Last lines that it printed."""
        with suppress(OSError), self.log.open("rb") as file:
            file.seek(self.begin)
            lines = file.read().decode(errors="replace").splitlines()
            return printable("\n".join(lines[-_LINES:]), lines=True)
        return ""


def look(run: Run, api: Api, launched: Launched | None, now: float) -> Snapshot:
    """A look at a run; of one that this process has started, also before its launcher has written anything.

    Args:
        run: the run.
        api: the cluster.
        launched: its launcher, if this process has started it.
        now: seconds since the epoch.
    """
    code = launched.code() if launched is not None else None  # before the look: what it wrote until its end is seen
    seen = read_run(run, api, now)
    if launched is None or (
        (record := _record_of(launched)) is not None and (code is None or record.state != "Running")
    ):
        return seen
    if code is None:
        return _with_condition(seen, "Starting", "Progressing", "Launching", "its launcher looks at what it is to run")
    return _with_condition(
        seen, "Failed", "Failed", "NotBegun", f"its launcher ended with exit code {code}: {launched.said()}"
    )


def _record_of(launched: Launched) -> LauncherRecord | None:
    """Record that this launcher has written; None: it has not yet, and one that is there is of an attempt before."""
    record = read_record(RunPaths(launched.log.parent).launcher)
    return record if record is not None and record.pid == launched.process.pid else None


def _with_condition(seen: Snapshot, phase: str, kind: str, reason: str, message: str) -> Snapshot:
    """A snapshot whose one condition is this."""
    one = Condition(kind, "True", reason, message)
    return replace(seen, phase=phase, reason=reason, message=message, conditions=(one,), failures=(), wait=None)


def launch(manifest: Manifest, root: Path, *, resume: bool, options: Sequence[str]) -> Launched:
    """Start all roles of a run on this machine.

    Args:
        manifest: what to run.
        root: the run's folder, absolute.
        resume: go on with the run in it.
        options: further options of `rlrun local`.

    Raises:
        NotFoundError: the folder is not free.
    """
    if is_run(root) and is_running(FolderRun(root)):
        raise NotFoundError(f"{root} runs already; Run.open({str(root)!r}) follows it")
    if not resume and is_run(root):
        raise NotFoundError(f"{root} holds a run already; resume=True goes on with it, or choose another folder")
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
    """File of the manifest: its own, while it has not been changed; else one in the run's folder."""
    if manifest.file is not None and manifest.file.is_file() and tail_text(manifest.file) == manifest.text:
        return manifest.file
    file = root / LAUNCH_MANIFEST
    file.write_text(manifest.to_yaml())
    return file
