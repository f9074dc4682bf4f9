"""Checks of a run's folder, the record of a fork, and trust in code that the folder names.

Record of a fork, `fork.json` in the new run's folder: the source run, its step, and the changed fields.

Trust in code that a run's folder names: it runs only if its user started that run on this machine, or passes a flag.

`run.json`, the kept manifest and the recorded commits come from the author of a folder. Therefore a launcher records each run that it
starts in its user's cache, as an empty file whose name is a digest of the folder's path, the run's UID and all code that the run names. A
copy of the folder, another path or other code has another digest. File ownership proves nothing, because the user who unpacks an archive
owns its files.

Checks of a run's folder: it is writable, and it belongs to the same run. The rules are the same on one machine and in a cluster.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rlrun.config.loading.loader import load_file
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.roles import TrainerConfig
from rlrun.config.models.run_config import RunConfig
from rlrun.config.named_code import NamedCode, code_of_run
from rlrun.protocol.files.durable import make_folder, make_private_folder, write_bytes
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.volume_faults import RefusedError, show_size, trouble_at, trouble_of
from rlrun.runtime import exit_codes


@dataclass(frozen=True)
class ForkedFrom:
    """Origin of a forked run."""

    run: str
    """Name of the other run."""
    uid: str
    step: int
    attempt: int
    """Attempt that wrote the checkpoint."""
    folder: str
    """Folder of the other run at the time of the fork."""
    changed: tuple[str, ...] = ()
    """Fields that differ from the other run's manifest, each with both values."""


_ADAPTER = TypeAdapter(ForkedFrom)


def fork_document(fork: ForkedFrom) -> str:
    """Return the content of the file."""
    return json.dumps({"forkedFrom": asdict(fork)}, indent=1) + "\n"


def read_fork(path: Path) -> ForkedFrom | None:
    """Return the record in a run's folder, or None if the run is not a fork or the file is damaged."""
    try:
        return fork_of(path.read_bytes())
    except OSError:
        return None


def fork_of(content: bytes) -> ForkedFrom | None:
    """Return the record in a document of `fork_document`, or None if it is damaged."""
    try:
        return _ADAPTER.validate_python(json.loads(content)["forkedFrom"])
    except (ValueError, KeyError, TypeError, RecursionError, ValidationError):
        return None


FLAG = "--trust-recorded-code"
"""Option of every command that can run code named by a run's folder."""
HELP = "run code that the run's folder names (import paths, interpreters, the model's own code); needed unless you started the run here"


def check_recorded_code(
    root: Path, code: Sequence[NamedCode], *, trusted: bool, variables: Mapping[str, str] = os.environ
) -> None:
    """Refuse to run code that only a run's folder names.

    Args:
        root: folder of the run.
        code: code that the folder names and the command would run.
        trusted: whether the caller trusts the folder.
        variables: environment variables, which name the user's cache.

    Raises:
        RoleError: the caller neither trusts the folder nor started the run; the message has fields, values, folder and flag.
    """
    if not code or trusted or is_own_run(root, variables):
        return
    named = ", ".join(one.text for one in code)
    raise RoleError(
        f"{root} names code that this command would run as you: {named}. Read that code first; if you trust it, add {FLAG}",
        exit_codes.USAGE,
    )


def note_started_run(root: Path, config: RunConfig, variables: Mapping[str, str] = os.environ) -> None:
    """Record in the user's cache that this user started a run in a folder of this machine; without a cache nothing is recorded."""
    with suppress(OSError, RuntimeError):
        folder = _notes_folder(variables)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _code_name(root, config)).touch()


def is_own_run(root: Path, variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether this user started the run in a folder on this machine, with the code that its configuration names now."""
    with suppress(OSError, RuntimeError, ConfigError):
        config = load_file(RunConfig, RunPaths(root).run_json)
        return (_notes_folder(variables) / _code_name(root, config)).is_file()
    return False


def _notes_folder(variables: Mapping[str, str]) -> Path:
    return Path(variables.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlrun" / "started"


def _code_name(root: Path, config: RunConfig) -> str:
    code = [[one.field, one.value] for one in code_of_run(config)]
    parts = [str(root.resolve()), config.trainer.uid, code]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


MIN_FREE_BYTES = 64 * 1024 * 1024
"""Minimum free bytes on the run's volume at the start of a run."""


def check_writable(root: Path, *, remedy: str, private: bool = False) -> None:
    """Create the folder, and check that it is writable.

    Args:
        root: folder of the run.
        remedy: alternative to freeing space, as the end of `free space or ...`.
        private: whether a new folder is closed to other users.

    Raises:
        RoleError: it is not writable, or its volume is full.
    """
    try:
        (make_private_folder if private else make_folder)(root)
        probe = root / ".writable"
        probe.write_bytes(b"x")
        probe.unlink(missing_ok=True)
    except OSError as error:
        trouble = trouble_of(error, root)
        if trouble is not None:
            raise RefusedError(
                f"cannot write to {root}: {trouble.text}; {trouble.remedy} or {remedy}", trouble
            ) from None
        raise RoleError(f"cannot write to {root}: {error.strerror}; {remedy}", exit_codes.STORAGE) from None
    if (trouble := trouble_at(root, least=MIN_FREE_BYTES)) is not None:
        raise RefusedError(
            f"{trouble.text}; a run in {root} needs at least {show_size(MIN_FREE_BYTES)}: make space or {remedy}",
            trouble,
        )


def recorded_run(paths: RunPaths) -> TrainerConfig | None:
    """Return the trainer's section of the folder's `run.json`, or None if there is none.

    Raises:
        RoleError: the file is damaged.
    """
    if not paths.run_json.is_file():
        return None
    try:
        return load_file(TrainerConfig, paths.run_json, section="trainer")
    except ConfigError as error:
        raise RoleError(" / ".join(str(error).splitlines()), exit_codes.CONFIGURATION) from None


def keep_config(paths: RunPaths, attempt: int, document: bytes) -> None:
    """Keep the configuration of an attempt next to its file, because `run.json` always belongs to the newest attempt.

    Args:
        paths: paths of the run.
        attempt: attempt that is about to start; a repeated start with another configuration replaces it.
        document: content of `run.json`.

    Raises:
        OSError: the volume refuses the write.
    """
    file = paths.attempt_config(attempt)
    if not file.is_file() or file.read_bytes() != document:
        write_bytes(file, document)


def check_same_run(before: TrainerConfig, now: TrainerConfig, *, remedy: str) -> None:
    """Refuse a change of a run's name or model when it continues in its folder. All other fields may change.

    Args:
        before: trainer section of the folder's `run.json`.
        now: trainer section of the run that would use the folder.
        remedy: fix for the user.

    Raises:
        RoleError: name or model differ; the message names the field.
    """
    for field, label in (("name", "metadata.name"), ("model", "spec.model")):
        if getattr(before, field) != getattr(now, field):
            raise RoleError(
                f"{label} differs from the run in {before.output_dir}: {_show_path(getattr(before, field))} there, "
                f"{_show_path(getattr(now, field))} here; {remedy}",
                exit_codes.CONFIGURATION,
            )


def _show_path(value: object) -> str:
    dump = getattr(value, "model_dump", None)
    if dump is None:
        return repr(value)
    given = dump(exclude_defaults=True, by_alias=True)
    return ", ".join(f"{key} {content!r}" for key, content in given.items())[:160]
