"""Process of a run: changes, start on this machine, local state, and waits.

Changes of an existing run are stop requests to a launcher on this machine, and patches of an RLRun in a cluster.

A start on this machine is `rlrun local` in the background, in a separate process group, which outlives a notebook's
kernel. The state of a `Run` object is its manifest, its place, its launcher process, and its access to a cluster.
Waits end at a phase, at a step or at the run's end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlrun.inspect import screen
from rlrun.inspect.comparison import Curve
from rlrun.inspect.folder_reader import is_run
from rlrun.inspect.kubectl import RUNS, Api, ClusterError, Kubectl, ask_json
from rlrun.inspect.run_changes import dropped_fields
from rlrun.inspect.small_files import tail_text
from rlrun.inspect.snapshot import Condition, Snapshot
from rlrun.inspect.source import ClusterRun, FolderRun, NotFoundError, Run, read_run
from rlrun.inspect.why import explain_run
from rlrun.protocol.files.durable import make_private_folder
from rlrun.protocol.files.launcher_record import LAUNCH_LOG, LAUNCH_MANIFEST, LauncherRecord, read_record
from rlrun.protocol.files.paths import RunPaths
from rlrun.runs import volume_reader
from rlrun.runs.blocks import RunError, RunFailedError, WaitTimeoutError
from rlrun.runs.written_manifest import Manifest
from rlrun.runtime import exit_codes
from rlrun.runtime.bootstrap import module_command
from rlrun.runtime.json_types import Json
from rlrun.runtime.printable import escape_controls

if TYPE_CHECKING:
    from rlrun.runs.written_manifest import Manifest


def launcher_of(run: FolderRun) -> LauncherRecord | None:
    """Return the record of the run's launcher, or None if the roles were started by hand."""
    return read_record(RunPaths(run.root).launcher)


def is_running(run: FolderRun) -> bool:
    """Return whether a launcher supervises the run now."""
    record = launcher_of(run)
    return record is not None and record.alive(time.time())


def resume_command(run: FolderRun) -> str:
    """Return the command that resumes a run on this machine."""
    record = launcher_of(run)
    return record.command if record is not None else "the command that started it, with --resume"


def request_stop(run: FolderRun, *, dry_run: bool = False) -> int:
    """Request a save and stop from a run's launcher, like Ctrl-C, and return its process id.

    Raises:
        NotFoundError: no launcher on this machine runs it.
    """
    record = launcher_of(run)
    if record is None:
        raise NotFoundError(f"{run.root} has no launcher; stop the roles in the terminals where they were started")
    if not record.alive(time.time()):
        raise NotFoundError(f"{run.root} is not running; resume it with: {record.command}")
    if record.host != os.uname().nodename:
        raise NotFoundError(f"{run.root} runs on {record.host} (process {record.pid}); stop it there")
    if not dry_run:
        os.kill(record.pid, signal.SIGINT)
    return record.pid


def patch_run(api: Api, name: str, change: Json, *, dry_run: bool = False) -> None:
    """Check with a server-side dry run that the API server accepts all fields of a merge patch, then patch.

    Raises:
        ClusterError: the API server refuses the patch or would drop a field.
    """
    words = ["patch", RUNS, name, "--type=merge", f"--patch={json.dumps(change)}"]
    tried = ask_json(api, [*words, "--dry-run=server"])
    if lost := dropped_fields(change, tried):
        raise ClusterError(
            f"{', '.join(lost)}: unknown field of the RLRun; list all fields with `kubectl explain rlrun.spec --recursive`",
            exit_codes.USAGE,
        )
    if not dry_run:
        api.read_output(words)


def apply_manifest(api: Api, document: Json) -> Json:
    """Apply a manifest and return the object in the API server.

    Raises:
        ClusterError: the API server refuses the manifest.
    """
    with tempfile.TemporaryDirectory(prefix="rlrun-") as folder:
        file = Path(folder, "run.json")
        file.write_text(json.dumps(document))
        return ask_json(api, ["apply", "-f", str(file)])


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

    def poll_code(self) -> int | None:
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
            return escape_controls("\n".join(lines[-_LINES:]), lines=True)
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
        launched.poll_code() if launched is not None else None
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


def launch_roles(manifest: Manifest, root: Path, *, resume: bool, options: Sequence[str]) -> Launched:
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
    file, log = _manifest_file(manifest, root), root / LAUNCH_LOG
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


def _manifest_file(manifest: Manifest, root: Path) -> Path:
    """Return the manifest's file if it is unchanged, otherwise a new file in the run's folder."""
    if manifest.file is not None and manifest.file.is_file() and tail_text(manifest.file) == manifest.text:
        return manifest.file
    file = root / LAUNCH_MANIFEST
    file.write_text(manifest.to_yaml())
    return file


def make_kubectl(namespace: str | None, context: str | None, kubeconfig: str | Path | None) -> Kubectl:
    """Return `kubectl` with the flags of a call. None: the configured value."""
    given = (("namespace", namespace), ("context", context), ("kubeconfig", kubeconfig))
    return Kubectl([f"--{name}={value}" for name, value in given if value is not None])


class Held:
    """Local state of a run."""

    _manifest: Manifest | None
    _place: FolderRun | ClusterRun | None
    _launched: Launched | None

    def _set_manifest(self, manifest: Manifest | None) -> None:
        self._manifest, self._place, self._launched, self._api = manifest, None, None, Kubectl()

    def _read_snapshot(self, now: float) -> Snapshot:
        place = self._require_place()
        if self._launched is None:
            return read_run(place, self._api, now)

        return read_snapshot(place, self._api, self._launched, now)

    def _require_place(self) -> FolderRun | ClusterRun:
        if self._place is None:
            raise NotFoundError(
                f"{self._require_manifest().name} was not started; start it with .local() or .apply(), or use Run.open"
            )
        return self._place

    def _require_manifest(self) -> Manifest:
        if self._manifest is not None:
            return self._manifest
        if isinstance(self._place, ClusterRun):
            from rlrun.runs.written_manifest import manifest_from_resource

            return manifest_from_resource(ask_json(self._api, ["get", RUNS, self._place.name]))
        raise NotFoundError("a run opened from a folder has no manifest; read it with Run.load(FILE)")

    def _read_curve(self) -> Curve:
        place = self._require_place()
        label = place.root.name if isinstance(place, FolderRun) else place.name
        return volume_reader.read_curve(place, self._api, label)


_OVER = ("Complete", "Failed")
PHASES = (
    "Pending",
    "Starting",
    "Running",
    "Restarting",
    "Suspending",
    "Suspended",
    "Completing",
    *_OVER,
)
_OFTEN_SECONDS = 0.2


def wait_for(
    run: Run, api: Api, launched: Launched | None, *, phase: str, step: int | None, timeout: float | None, every: float
) -> None:
    """Wait for a phase or for a step; see `Run.wait`."""
    if step is None and phase not in PHASES:
        raise RunError(f"phase: got {phase!r}; expected one of {', '.join(PHASES)}")
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        seen = read_snapshot(run, api, launched, time.time())
        if (seen.progress.step or 0) >= step if step is not None else seen.phase == phase:
            return
        stopped = isinstance(run, FolderRun) and seen.phase == "Suspended"
        if seen.phase in _OVER or stopped:
            now = time.time()
            raise RunFailedError(screen.explanation_text(explain_run(seen, now), now))
        lacks = f"has not trained step {step}" if step is not None else f"is not {phase}"
        _pause_or_raise(
            deadline, every, f"{seen.name} {lacks}", timeout, f": {seen.phase}, step {screen.show_steps(seen)}"
        )


def wait_until_stopped(run: Run, api: Api, launched: Launched | None, *, timeout: float | None) -> None:
    """Wait until all roles of a run have stopped, however it ended."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while not _is_stopped(run, api, launched):
        name = str(run.root) if isinstance(run, FolderRun) else run.name
        _pause_or_raise(deadline, _OFTEN_SECONDS, f"{name} has not stopped", timeout)


def _is_stopped(run: Run, api: Api, launched: Launched | None) -> bool:
    if isinstance(run, FolderRun):
        return (launched is None or launched.poll_code() is not None) and not is_running(run)
    return read_run(run, api, time.time(), events=False).phase in (*_OVER, "Suspended")


def _pause_or_raise(deadline: float | None, every: float, what: str, timeout: float | None, now: str = "") -> None:
    left = every if deadline is None else deadline - time.monotonic()
    if left <= 0:
        raise WaitTimeoutError(f"{what} after {timeout:g} s{now}; it continues")
    time.sleep(min(every, left))
