"""Checks of a run's folder, and the record of a fork.

A fork has a `fork.json` in the new run's folder: the source run, its step, and the changed fields. The checks ensure that the folder is
writable and belongs to the same run; the rules are the same on one machine and in a cluster.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rlrun.config.loading.loader import load_file
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.durable import make_folder, make_private_folder, write_bytes
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.volume_faults import RefusedError, show_size, trouble_at, trouble_of
from rlrun.runtime import exit_codes


@dataclass(frozen=True)
class ForkedFrom:
    """Origin of a forked run."""

    run: str
    """Name of the source run."""
    uid: str
    step: int
    """Step of the source run's checkpoint."""
    attempt: int
    """Attempt that wrote the checkpoint."""
    folder: str
    """Folder of the source run at the time of the fork."""
    changed: tuple[str, ...] = ()
    """Fields that differ from the source run's manifest, each with both values."""


_ADAPTER = TypeAdapter(ForkedFrom)


def fork_document(fork: ForkedFrom) -> str:
    """Return the content of `fork.json`."""
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


MIN_FREE_BYTES = 64 * 1024 * 1024
"""Minimum free bytes on the run's volume at the start of a run."""


def check_writable(root: Path, *, remedy: str, private: bool = False) -> None:
    """Create the folder, and check that it is writable.

    Args:
        root: folder of the run.
        remedy: fix for the user, as a phrase that can follow `make space or`.
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
    """Store the configuration of an attempt in its own file, because `run.json` always belongs to the newest attempt.

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
    """Return a name, or the fields of a model that differ from its defaults, as text."""
    dump = getattr(value, "model_dump", None)
    if dump is None:
        return repr(value)
    given = dump(exclude_defaults=True, by_alias=True)
    return ", ".join(f"{key} {content!r}" for key, content in given.items())[:160]
