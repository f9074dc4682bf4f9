"""The run's folder on the shared volume: whether this run may use it, and its `run.json`. Only the trainer's first pod writes that.

    no run.json                  a new run: write it
    same uid                     the run goes on; its configuration may have changed, name and model not
    another uid                  an earlier run of this name left it: policy Never refuses, the others go on with it

Other pods may have written logs before, so a folder that is not empty says nothing.
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

_REMEDY = "give the RLRun another metadata.name, another spec.storage (claim or subPath), or delete that folder from the volume"


def claim_folder(paths: RunPaths, config: RunConfig, attempt: int, *, say: Callable[[str], None]) -> None:
    """See that the folder may be used, and write its `run.json`, which the attempt keeps a copy of.

    Args:
        paths: of the run.
        config: of the run, as the operator resolved it.
        attempt: that is about to begin.
        say: called with what is found.

    Raises:
        RoleError: the folder is another run's, or cannot be written.
    """
    check_writable(paths.root, remedy="use a larger volume (spec.storage)")
    before, now = recorded_run(paths), config.trainer
    document = (config.model_dump_json(indent=1, by_alias=False) + "\n").encode()
    if before is not None:
        check_same_run(before, now, remedy=_REMEDY)
        if before.uid != now.uid:
            if now.checkpoint.resume.policy == "Never":
                raise RoleError(
                    f"spec.checkpoint.resume.policy is Never, but {paths.root} holds a run of uid {before.uid} (this one is {now.uid}); "
                    f"set the policy to Latest to go on with it, or {_REMEDY}",
                    exit_codes.CONFIGURATION,
                )
            say(f"{paths.root} holds a run of the same name, uid {before.uid}: going on with it")
    same = before is not None and paths.run_json.read_bytes() == document
    if before is not None and not same:
        say("run.json is written anew: the configuration, or the run that uses the folder, is another one")
    with storage_errors(paths.root):
        if not same:
            write_bytes(paths.run_json, document)
        keep_config(paths, attempt, document)


def claim_when_possible(
    paths: RunPaths, config: RunConfig, attempt: int, *, say: Callable[[str], None], signals: Signals
) -> None:
    """Run `claim_folder`; on a volume that is full or read-only wait until it is not: starting again would not help.

    Raises:
        RoleError: the folder is another run's, or its volume can never be written.
        StoppedError: a signal came.
    """

    until_it_passes(lambda: claim_folder(paths, config, attempt, say=say), say=say, signals=signals)


def has_begun(paths: RunPaths, uid: str) -> bool:
    """True if an attempt of this very run has begun.

    Raises:
        RoleError: an attempt's file cannot be read, and no other one is of this run.
    """
    damaged: Exception | None = None
    for file in map(paths.attempt_file, paths.attempts_on_disk()):
        try:
            if read_attempt(file).uid == uid:
                return True
        except (OSError, RoleError) as error:
            damaged = error
    if damaged is not None:  # it may be this run's
        raise RoleError(f"{damaged}; {_REMEDY}", exit_codes.DATA) from damaged
    return False
