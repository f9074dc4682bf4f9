"""Preparation of a pod: its waits, folders and configuration file, the ownership of the run's folder, and the warm-up data.

Waits for other pods have a deadline and write a log line every half minute.

Folders that the pod's containers mount from the run's volume are created first: the kubelet would create missing ones as root, which some
volumes refuse, and with the permissions of the volume's root folder.

The configuration file must belong to this pod. One ConfigMap holds the file of the current attempt. If another pod of the run is already
on the node, a kubelet may mount an outdated version, which it updates within a minute or two; and a user may edit the ConfigMap.

The claim decides whether this run may use the run's folder on the shared volume. One pod of a run writes the folder's `run.json` (the
trainer's first pod, or the orchestrator's if the run has no trainer pods):

    no run.json                  new run: write it
    same uid                     continued run: its configuration may have changed, but not name and model
    another uid                  left by an earlier run of this name: policy Never refuses it, the other policies continue it

Other pods may have written logs before, so a folder that is not empty proves nothing.

A trainer's process is started once per pod. Kubernetes always restarts the containers of a StatefulSet, but a group that lost a process
cannot continue: the operator replaces all of its pods, with a new attempt. Therefore the first start leaves a mark in the pod, and a
container that finds it idles until the pod is deleted.

An init container runs the code of a tiny model's warm-up environment without secrets of the run: it has neither the run's key nor its
configuration. It writes a file with conversations for the training in the next container.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rlrun.config.models.file_mark import file_mark
from rlrun.config.models.language_models import TinyModelConfig
from rlrun.config.models.run_config import RunConfig
from rlrun.custom import SAFE_PATH_VARIABLE
from rlrun.environments.demonstrations import WARMUP_BATCH, collect_demonstrations, write_demonstrations
from rlrun.pod.container_settings import HANDLED, SIGNALLED, PodSettings, Signals
from rlrun.protocol.files.attempts import read_attempt
from rlrun.protocol.files.durable import make_folder, write_bytes
from rlrun.protocol.files.failures import RoleError, storage_errors
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.run_folder import check_same_run, check_writable, keep_config, recorded_run
from rlrun.protocol.files.volume_faults import RefusedError, may_pass, trouble_of
from rlrun.runtime import exit_codes
from rlrun.runtime.bootstrap import DEMONSTRATIONS_FILE

WAIT_SECONDS = 1800.0
"""Maximum wait: images may have to be pulled and machines created."""
REPORT_SECONDS = 30.0
POLL_SECONDS = 0.5


def wait_until(
    look: Callable[[], str | None],
    *,
    what: str,
    say: Callable[[str], None],
    signals: Signals,
    deadline_seconds: float = WAIT_SECONDS,
    poll_seconds: float = POLL_SECONDS,
) -> None:
    """Return as soon as `look()` returns None.

    Args:
        look: function that returns why the wait is not over, or None.
        what: subject of the wait, as the end of `waiting for ...`.
        say: callback for log lines: at once, and every half minute.
        signals: signals that end the wait.
        deadline_seconds: maximum wait.
        poll_seconds: pause between two calls of `look`.

    Raises:
        RoleError: the wait took too long; the message has the last reason.
        StoppedError: a signal arrived.
    """
    began = time.monotonic()
    reported = -REPORT_SECONDS
    while (reason := look()) is not None:
        elapsed = time.monotonic() - began
        if elapsed > deadline_seconds:
            raise RoleError(f"waited {deadline_seconds:g} s for {what}: {reason}")
        if elapsed - reported >= REPORT_SECONDS:
            say(f"waiting for {what} since {elapsed:.0f} s: {reason}")
            reported = elapsed
        signals.sleep(poll_seconds)


VOLUME_POLL_SECONDS = 5.0
"""Seconds between two checks of a volume that refuses writes."""


def make_folders(paths: Sequence[Path], *, say: Callable[[str], None], signals: Signals) -> None:
    """Create the folders that the pod's containers mount, as their user; wait while the volume is full or read-only.

    Raises:
        RoleError: a folder cannot be created.
        StoppedError: a signal arrived.
    """

    def make() -> None:
        for path in paths:
            try:
                make_folder(path)
            except OSError as error:
                trouble = trouble_of(error, path.parent)
                if trouble is None:
                    raise RoleError(
                        f"cannot create {path} as user {os.getuid()}: {error.strerror}", exit_codes.STORAGE
                    ) from error
                raise RefusedError(f"cannot create {path}: {trouble.text}; {trouble.remedy}", trouble) from error

    until_it_passes(make, say=say, signals=signals)


def until_it_passes(write: Callable[[], None], *, say: Callable[[str], None], signals: Signals) -> None:
    """Call `write` until the run's volume no longer refuses it.

    Raises:
        RoleError: `write` failed for another reason.
        StoppedError: a signal arrived.
    """

    def problem() -> str | None:
        try:
            write()
        except RoleError as error:
            if not may_pass(error):
                raise
            return str(error)
        return None

    wait_until(
        problem,
        what="the run's volume",
        say=say,
        signals=signals,
        deadline_seconds=math.inf,
        poll_seconds=VOLUME_POLL_SECONDS,
    )


CONFIG_FILE_SECONDS = 300.0
"""Maximum wait: a kubelet updates mounted files every 60 to 90 s, and its cache may be another minute old."""


def wait_for_own_file(
    pod: PodSettings,
    role: str,
    *,
    say: Callable[[str], None],
    signals: Signals,
    deadline_seconds: float = CONFIG_FILE_SECONDS,
) -> None:
    """Return once the file is the one that the pod's template names; at once for pods of earlier releases, which name none.

    Args:
        pod: settings with the name of the file and its mark.
        role: command of the container; `model` reads the part of its pod's role.
        say: callback that logs the wait.
        signals: signals that end the wait.
        deadline_seconds: maximum wait.

    Raises:
        RoleError: it is still another file; a restart may help.
        StoppedError: a signal arrived.
    """
    if pod.config_mark is not None:
        wait_until(
            lambda: _file_problem(pod, role),
            what="the configuration of this pod",
            say=say,
            signals=signals,
            deadline_seconds=deadline_seconds,
        )


def _file_problem(pod: PodSettings, role: str) -> str | None:
    try:
        found = file_mark(json.loads(pod.config.read_bytes()), role)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return f"cannot read {pod.config}: {error}"
    if found == pod.config_mark:
        return None
    return (
        f"{pod.config} belongs to another attempt, or was edited (mark {found}, not {pod.config_mark}); the operator renders it into the "
        "run's ConfigMap: edit the RLRun instead"
    )


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


MARK = "started"


def is_first_start(state: Path, attempt: int) -> bool:
    """Return whether this is the first start of a trainer's container in this pod, and leave the mark if so.

    Args:
        state: volume with the lifetime of the pod.
        attempt: number to write into the mark; informational.

    Raises:
        RoleError: the mark cannot be written, so that a second start could not be recognized.
    """
    try:
        state.mkdir(parents=True, exist_ok=True)
        with (state / MARK).open("x") as file:
            file.write(f"{attempt}\n")
    except FileExistsError:
        return False
    except OSError as error:
        raise RoleError(
            f"RLRUN_POD_STATE: cannot write to {state}: {error.strerror}; mount an emptyDir there", exit_codes.FAILURE
        ) from error
    return True


WARMUP_VARIABLE, MODEL_VARIABLE = "RLRUN_WARMUP", "RLRUN_MODEL_FOLDER"
"""Environment variables: fields of `TinyModelConfig` as JSON, and folder of the finished model."""
CANDIDATE = "RLRUN_CANDIDATE_"
"""Prefix of variables for a name that several Secrets define: `RLRUN_CANDIDATE_001_HF_TOKEN`. The last one wins."""


def make_demonstrations(folder: Path, env: MutableMapping[str, str]) -> None:
    """Write the demonstrations for the warm-up, if the model does not exist yet.

    Args:
        folder: empty folder for the file.
        env: environment of the container; candidate variables are replaced by the final variable.

    Raises:
        RoleError: the environment cannot be loaded or has no demonstrations, or the folder is not writable.
    """
    for number in HANDLED:
        # The kernel has no default action for the first process of a container, and code of the environment may never return.
        signal.signal(number, _exit_on_signal)
    if not _is_needed(env):
        return
    tiny = TinyModelConfig.model_validate_json(env[WARMUP_VARIABLE])
    _choose_candidates(env)
    env.setdefault(SAFE_PATH_VARIABLE, "1")  # never import from a folder that code in this container can write
    for part in ("home", "tmp"):
        (folder / part).mkdir(exist_ok=True)
    try:
        count = tiny.warmup_steps * WARMUP_BATCH
        found = collect_demonstrations(tiny.warmup_environment or "", tiny.warmup_args, count)
        write_demonstrations(folder / DEMONSTRATIONS_FILE, found)
    except ValueError as error:
        raise RoleError(f"model.tiny: {error}", exit_codes.CONFIGURATION) from error
    except OSError as error:
        raise RoleError(f"model.tiny: cannot write the demonstrations: {error}", exit_codes.STORAGE) from error


def _exit_on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    os._exit(SIGNALLED + number)


def _is_needed(env: Mapping[str, str]) -> bool:
    """Return whether this pod creates the model: the trainer's first pod or the orchestrator's, once per run."""
    ordinal = re.search(r"-(\d+)$", env.get("RLRUN_POD_NAME", ""))
    if ordinal is not None and int(ordinal[1]):
        return False
    model = Path(env[MODEL_VARIABLE])
    try:
        # List the folder: a network file system answers a lookup of one name from a cache for a while.
        return model.name not in os.listdir(model.parent)  # noqa: PTH208
    except OSError:
        return True  # the next container waits for the volume, and reports an unusable folder


def _choose_candidates(env: MutableMapping[str, str]) -> None:
    for name in sorted(name for name in env if name.startswith(CANDIDATE)):
        env[name.removeprefix(CANDIDATE).partition("_")[2]] = env.pop(name)
