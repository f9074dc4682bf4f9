"""Changes of a run that exists: a launcher on this machine is asked to stop, an RLRun in a cluster is patched or applied."""

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
    """Record of the run's launcher; None: it was started by hand."""
    return read_record(RunPaths(run.root).launcher)


def is_running(run: FolderRun) -> bool:
    """True if a launcher looks after the run now."""
    record = launcher_of(run)
    return record is not None and record.alive(time.time())


def go_on_command(run: FolderRun) -> str:
    """Command that goes on with a run on this machine."""
    record = launcher_of(run)
    return record.command if record is not None else "the command that started it, with --resume"


def ask_to_stop(run: FolderRun, *, dry_run: bool = False) -> int:
    """Ask a run's launcher to save and stop, as Ctrl-C does; its process.

    Raises:
        NotFoundError: nobody runs it here.
    """
    record = launcher_of(run)
    if record is None:
        raise NotFoundError(f"no launcher looks after {run.root}: end the roles where they were started")
    if not record.alive(time.time()):
        raise NotFoundError(f"{run.root} does not run; go on with it: {record.command}")
    if record.host != os.uname().nodename:
        raise NotFoundError(f"{run.root} runs on {record.host} (process {record.pid}); stop it there")
    if not dry_run:
        os.kill(record.pid, signal.SIGINT)
    return record.pid


def patch(api: Api, name: str, change: Json, *, dry_run: bool = False) -> None:
    """Ask first whether the API server takes all of a merge patch, then patch.

    Raises:
        ClusterError: it refuses the patch, or would drop a field of it.
    """
    words = ["patch", RUNS, name, "--type=merge", f"--patch={json.dumps(change)}"]
    tried = ask_json(api, [*words, "--dry-run=server"])
    if lost := dropped_fields(change, tried):
        raise ClusterError(
            f"{', '.join(lost)}: the RLRun has no such field; `kubectl explain rlrun.spec --recursive` lists all",
            exit_codes.USAGE,
        )
    if not dry_run:
        api.ask(words)


def apply(api: Api, document: Json) -> Json:
    """Apply a manifest; the object as the API server has it.

    Raises:
        ClusterError: it refuses the manifest.
    """
    with tempfile.TemporaryDirectory(prefix="rlrun-") as folder:
        file = Path(folder, "run.json")
        file.write_text(json.dumps(document))
        return ask_json(api, ["apply", "-f", str(file)])
