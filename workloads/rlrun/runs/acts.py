"""Changes of an existing run: stop requests to a launcher on this machine, and patches of an RLRun in a cluster."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from pathlib import Path

from rlrun.inspect.change import dropped_fields
from rlrun.inspect.kubectl import RUNS, Api, ClusterError, ask_json
from rlrun.inspect.source import FolderRun, NotFoundError
from rlrun.protocol.files.launcher import LauncherRecord, read_record
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from rlrun.runtime.json_types import Json


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
        api.ask(words)


def apply_manifest(api: Api, document: Json) -> Json:
    """Apply a manifest and return the object in the API server.

    Raises:
        ClusterError: the API server refuses the manifest.
    """
    with tempfile.TemporaryDirectory(prefix="rlrun-") as folder:
        file = Path(folder, "run.json")
        file.write_text(json.dumps(document))
        return ask_json(api, ["apply", "-f", str(file)])
