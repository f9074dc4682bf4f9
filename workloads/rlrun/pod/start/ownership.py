"""Claim of the run's folder on the shared volume: whether this run may use it, and its `run.json`. Only the trainer's first pod writes it.

    no run.json                  new run: write it
    same uid                     continued run: its configuration may have changed, but not name and model
    another uid                  left by an earlier run of this name: policy Never refuses it, the other policies continue it

Other pods may have written logs before, so a folder that is not empty proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from rlrun.config.models.run import RunConfig
from rlrun.pod.signals import Signals
from rlrun.pod.start.folders import until_it_passes
from rlrun.protocol.files.attempts import read_attempt
from rlrun.protocol.files.durable import write_bytes
from rlrun.protocol.files.failures import RoleError, storage_errors
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.run_folder import check_same_run, check_writable, keep_config, recorded_run
from rlrun.runtime import exit_codes

_REMEDY = "change the RLRun's metadata.name or spec.storage (claim or subPath), or delete that folder from the volume"


def claim_folder(paths: RunPaths, config: RunConfig, attempt: int, *, say: Callable[[str], None]) -> None:
    """Check that the run may use the folder, write its `run.json`, and keep a copy for the attempt.

    Args:
        paths: paths of the run.
        config: configuration of the run, resolved by the operator.
        attempt: number of the attempt that is about to start.
        say: callback that logs decisions.

    Raises:
        RoleError: the folder belongs to another run, or is not writable.
    """
    check_writable(paths.root, remedy="use a larger volume (spec.storage)")
    before, now = recorded_run(paths), config.trainer
    document = (config.model_dump_json(indent=1, by_alias=False) + "\n").encode()
    if before is not None:
        check_same_run(before, now, remedy=_REMEDY)
        if before.uid != now.uid:
            if now.checkpoint.resume.policy == "Never":
                raise RoleError(
                    f"spec.checkpoint.resume.policy is Never, but {paths.root} contains a run with UID {before.uid} (here: {now.uid}); "
                    f"set the policy to Latest to continue it, or {_REMEDY}",
                    exit_codes.CONFIGURATION,
                )
            say(f"{paths.root} contains a run of the same name with UID {before.uid}: continuing it")
    same = before is not None and paths.run_json.read_bytes() == document
    if before is not None and not same:
        say("replacing run.json: the configuration, or the run that uses the folder, has changed")
    with storage_errors(paths.root):
        if not same:
            write_bytes(paths.run_json, document)
        keep_config(paths, attempt, document)


def claim_when_possible(
    paths: RunPaths, config: RunConfig, attempt: int, *, say: Callable[[str], None], signals: Signals
) -> None:
    """Run `claim_folder`; wait while the volume is full or read-only, because a restart would not help.

    Raises:
        RoleError: the folder belongs to another run, or its volume can never be written.
        StoppedError: a signal arrived.
    """

    until_it_passes(lambda: claim_folder(paths, config, attempt, say=say), say=say, signals=signals)


def has_begun(paths: RunPaths, uid: str) -> bool:
    """Return whether an attempt of this run has started.

    Raises:
        RoleError: an attempt's file is unreadable, and no other one belongs to this run.
    """
    damaged: Exception | None = None
    for file in map(paths.attempt_file, paths.attempts_on_disk()):
        try:
            if read_attempt(file).uid == uid:
                return True
        except (OSError, RoleError) as error:
            damaged = error
    if damaged is not None:  # it may belong to this run
        raise RoleError(f"{damaged}; {_REMEDY}", exit_codes.DATA) from damaged
    return False
