"""Base checkpoint of an attempt, and retention of checkpoints; both depend only on the files on the volume."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlrun.config.models.checkpoint import CheckpointConfig, ResumeConfig
from rlrun.config.models.roles import TrainerConfig
from rlrun.diagnostics.fault_points import reach
from rlrun.protocol.files.attempts import (
    Attempt,
    Origin,
    check_number,
    first_attempt,
    next_attempt,
    write_attempt,
)
from rlrun.protocol.files.checkpoint_manifest import (
    MANIFEST,
    ORCHESTRATOR_PART,
    Manifest,
    ManifestError,
    complete_checkpoints,
    newest_attempt,
    read_manifest,
    verify_files,
)
from rlrun.protocol.files.failures import FAILING, RoleError, refusal_number, storage_errors
from rlrun.protocol.files.paths import Artifact, RunPaths
from rlrun.runtime import exit_codes

Verify = Callable[[Path, Manifest], None]
"""Function that compares the files of a checkpoint with its manifest and raises ManifestError or OSError on a difference."""


UNREADABLE_SECONDS = 120.0
"""Time limit of retries for a checkpoint that the volume cannot read, before an older one is used."""


class Beginning:
    """State of an attempt's start over several tries on a faulty volume.

    Args:
        clock: monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unreadable_since: dict[Path, float] = {}
        self.written: Attempt | None = None
        """Content of the attempt's file in the previous try; the file may exist although its fsync failed."""

    def gives_up(self, checkpoint: Path) -> bool:
        """Return whether the checkpoint has been unreadable for `UNREADABLE_SECONDS`; a shorter failure may be temporary."""
        return self._clock() - self._unreadable_since.setdefault(checkpoint, self._clock()) >= UNREADABLE_SECONDS


@dataclass(frozen=True)
class Base:
    """Base checkpoint of an attempt, and the lineage that contains it."""

    checkpoint: Artifact
    lineage: Attempt


def choose_base(
    paths: RunPaths,
    resume: ResumeConfig,
    *,
    with_orchestrator: bool,
    required: bool = False,
    log: Callable[[str], None] = print,
    check: Verify = verify_files,
    beginning: Beginning | None = None,
) -> Base | None:
    """Return the newest complete checkpoint of the newest attempt's lineage that matches its manifest, or None to start from the model.

    Args:
        paths: paths of the run.
        resume: policy of the run.
        with_orchestrator: the checkpoint needs the orchestrator's part; false in a replay.
        required: raise an error instead of returning None if all complete checkpoints are damaged.
        log: receiver of a message about each skipped checkpoint.
        check: comparison of the files with the manifest.
        beginning: state of retries on a faulty volume. Default: no retries.

    Raises:
        RoleError: the policy forbids the found files, the requested step does not exist, or all checkpoints are damaged or unreadable.
        OSError, ManifestError: the volume cannot read a checkpoint now; retry later.
    """
    # The policy may forbid the files of earlier attempts, or require them.
    attempts = paths.attempts_on_disk()
    if resume.policy == "Never" and attempts:
        raise RoleError(
            f"checkpoint.resume.policy is Never, but {paths.root} contains a run (attempt {attempts[-1]}); "
            "choose another folder, or the policy Latest",
            exit_codes.CONFIGURATION,
        )
    if not attempts:
        if resume.policy == "Step":
            raise RoleError(
                f"checkpoint.resume.step is {resume.step}, but {paths.root} contains no run", exit_codes.CONFIGURATION
            )
        return None
    lineage = newest_attempt(paths, log)
    # Only checkpoints of this lineage: files of an abandoned branch may have higher steps, but the
    # run has continued from an earlier one.
    candidates = lineage.owned(complete_checkpoints(paths)) if lineage is not None else []
    if resume.policy == "Step":
        return _choose_step(resume.step, candidates, lineage, with_orchestrator, check, beginning)
    # Use the newest usable checkpoint of the lineage.
    is_unreadable = False
    for candidate in reversed(candidates):
        problem = _find_problem(candidate, with_orchestrator, check, beginning)
        if problem is None and lineage is not None:
            return Base(candidate, lineage)
        is_unreadable |= isinstance(problem, _Unreadable)
        log(f"cannot resume from step {candidate.step}: {problem}; trying the previous checkpoint")
    # An unreadable checkpoint may be intact. Starting from the model would silently discard its
    # training.
    if candidates and (is_unreadable or required):
        raise _unusable_error(paths, candidates, problem, is_unreadable=is_unreadable)
    return None


def _unusable_error(
    paths: RunPaths, candidates: Sequence[Artifact], problem: str | None, *, is_unreadable: bool
) -> RoleError:
    """Return the error of a resume without a usable checkpoint; an unreadable one may be intact."""
    if is_unreadable:
        return RoleError(
            f"cannot resume, because no complete checkpoint of {paths.root} can be used or read; last problem: {problem}; "
            "repair the storage or the connection to it",
            exit_codes.STORAGE,
        )
    steps = ", ".join(str(c.step) for c in candidates)
    return RoleError(
        f"cannot resume, because no complete checkpoint (steps {steps}) can be used; step "
        f"{candidates[0].step}: {problem}; restore its files from a copy, or start a new run in another --output-dir",
        exit_codes.DATA,
    )


def _choose_step(
    step: int | None,
    candidates: Sequence[Artifact],
    lineage: Attempt | None,
    with_orchestrator: bool,
    check: Verify,
    beginning: Beginning | None,
) -> Base:
    """Return the checkpoint of the configured step; raise `RoleError` if it does not exist or is damaged."""
    wanted = [c for c in candidates if c.step == step]
    if not wanted:
        steps = ", ".join(str(c.step) for c in candidates) or "none"
        raise RoleError(
            f"checkpoint.resume.step is {step}, but the complete checkpoints are of steps: {steps}",
            exit_codes.CONFIGURATION,
        )
    problem = _find_problem(wanted[-1], with_orchestrator, check, beginning)
    if problem:
        raise RoleError(f"checkpoint.resume.step is {step}, but {problem}", exit_codes.DATA)
    assert lineage is not None  # a candidate exists only with a lineage
    return Base(wanted[-1], lineage)


def choose_origin(
    paths: RunPaths, resume: ResumeConfig, *, log: Callable[[str], None] = print, check: Verify = verify_files
) -> Origin | None:
    """Return the checkpoint of another run that `resume.from_run` names, or None to start from the model.

    An earlier attempt of this run pins its origin, because the other run may have continued. The other run's retention does not protect
    the pinned checkpoint: if it is deleted and `from_step` does not require it, the newest checkpoint is used.

    Raises:
        RoleError: the other run does not exist, or has no complete checkpoint.
    """
    if resume.from_run is None:
        return None
    field = f"checkpoint.resume.fromRun is {resume.from_run}"
    other = RunPaths(paths.root.parent / resume.from_run)
    if other.root.resolve() == paths.root.resolve():
        raise RoleError(
            f"{field}, which is this run itself; omit the field to resume this run", exit_codes.CONFIGURATION
        )
    attempts = other.attempts_on_disk()
    if not attempts:
        raise RoleError(f"{field}, but {other.root} contains no run", exit_codes.CONFIGURATION)
    # Complete checkpoints of the other run's newest lineage, restricted to `fromStep`.
    lineage = newest_attempt(other, log)
    candidates = lineage.owned(complete_checkpoints(other)) if lineage is not None else []
    if not candidates or resume.from_step not in (None, *(c.step for c in candidates)):
        wanted = "" if resume.from_step is None else f" and fromStep {resume.from_step}"
        steps = ", ".join(str(c.step) for c in candidates) or "none"
        raise RoleError(
            f"{field}{wanted}, but its complete checkpoints are of steps: {steps}", exit_codes.CONFIGURATION
        )
    wanted_ones = [c for c in candidates if resume.from_step in (None, c.step)]
    # Prefer the checkpoint that an earlier attempt of this run has used.
    mine = newest_attempt(paths, lambda message: None)  # `choose_base` has logged it
    before = mine.origin if mine is not None else None
    pinned = [c for c in wanted_ones if before is not None and str(c.path) == before.path]
    for candidate in [*pinned, *(c for c in reversed(wanted_ones) if c not in pinned)]:
        problem = _find_problem(candidate, False, check)
        if problem is None:
            return Origin(str(candidate.path), candidate.step, candidate.attempt)
        log(f"cannot start from step {candidate.step} of {other.root}: {problem}")
    raise RoleError(
        f"{field}, but all of its matching checkpoints are damaged; last problem: {problem}", exit_codes.DATA
    )


class _Unreadable(str):
    """Problem of a checkpoint that the volume cannot read."""


def _find_problem(
    checkpoint: Artifact, with_orchestrator: bool, check: Verify, beginning: Beginning | None = None
) -> str | None:
    try:
        manifest = read_manifest(checkpoint.path)
        check(checkpoint.path, manifest)
    except (ManifestError, OSError) as error:
        if refusal_number(error) not in FAILING:
            return str(error)
        if beginning is not None and not beginning.gives_up(checkpoint.path):
            raise
        return _Unreadable(error)
    if (manifest.step, manifest.attempt) != (checkpoint.step, checkpoint.attempt):
        return f"{checkpoint.path.name} contains the manifest of step {manifest.step}, attempt {manifest.attempt}"
    if with_orchestrator and not any(entry.path.startswith(f"{ORCHESTRATOR_PART}/") for entry in manifest.files):
        return f"{checkpoint.path.name} has no {ORCHESTRATOR_PART} part"
    return None


@dataclass(frozen=True)
class NewAttempt:
    """Attempt that is about to start."""

    number: int
    world_size: int
    """Number of ranks of the group."""
    config_hash: str
    """Hash of the run's configuration."""
    with_orchestrator: bool
    """The base checkpoint needs the orchestrator's part; false in a replay."""
    required: bool = False
    """Raise an error instead of starting from the model if all complete checkpoints are damaged."""


def start_attempt(
    paths: RunPaths,
    config: TrainerConfig,
    new: NewAttempt,
    *,
    log: Callable[[str], None],
    check: Verify = verify_files,
    beginning: Beginning | None = None,
) -> Attempt:
    """Choose the start of an attempt and write its file; called only on rank 0.

    Raises:
        RoleError: see `choose_base`, `choose_origin` and `begin_attempt`; or the volume refuses the write.
    """
    resume = config.checkpoint.resume
    with storage_errors(paths.attempts, "write the attempt's file"):
        base = choose_base(
            paths,
            resume,
            with_orchestrator=new.with_orchestrator,
            required=new.required,
            log=log,
            check=check,
            beginning=beginning,
        )
        origin = choose_origin(paths, resume, log=log, check=check) if base is None else None
        return begin_attempt(
            paths,
            base,
            origin=origin,
            attempt=new.number,
            world_size=new.world_size,
            config_hash=new.config_hash,
            uid=config.uid,
            beginning=beginning,
        )


def begin_attempt(
    paths: RunPaths,
    base: Base | None,
    *,
    attempt: int,
    world_size: int,
    config_hash: str,
    uid: str = "",
    origin: Origin | None = None,
    beginning: Beginning | None = None,
) -> Attempt:
    """Write the attempt's file.

    Args:
        paths: paths of the run.
        base: base checkpoint of this run, or None to start at step 0.
        attempt: number of the attempt.
        world_size: number of ranks of the group.
        config_hash: hash of the run's configuration.
        uid: unique identifier of the run.
        origin: origin of version 0 if there is no base. Default: the model.
        beginning: state of earlier tries of this process.

    Raises:
        RoleError: the number is in use or not above those on the volume, because another group of this run is or was active.
    """
    # A previous try of this process may have created the file although its fsync failed. Its number
    # is then in use by this process and not by another group.
    before = beginning.written if beginning is not None else None
    if before is not None and paths.attempt_file(attempt).exists():
        write_attempt(paths, before)  # completes the previous try; raises if another group wrote the file
        return before
    # Checked first for its message. The exclusive creation of the file below closes the race
    # between two groups.
    check_number(paths, attempt)
    if base is None:
        this = first_attempt(world_size=world_size, config_hash=config_hash, attempt=attempt, uid=uid, origin=origin)
    else:
        this = next_attempt(
            base.lineage, base.checkpoint.step, attempt=attempt, world_size=world_size, config_hash=config_hash, uid=uid
        )
    if beginning is not None:
        beginning.written = this
    try:
        write_attempt(paths, this)
    # Another group has created the file since `check_number` looked.
    except FileExistsError:
        check_number(paths, attempt)
        raise
    return this


def checkpoints_to_delete(
    checkpoints: Iterable[Artifact], *, complete: Iterable[Artifact], attempt: Attempt, config: CheckpointConfig
) -> list[Artifact]:
    """Return the checkpoints to delete.

    These are complete checkpoints beyond `keep_last` that `keep_interval` does not keep, and incomplete checkpoints older than the newest
    complete one. Files of later attempts are never deleted.
    """
    # A later attempt may run already while this process has not ended. Its files belong to it.
    mine = [c for c in checkpoints if c.attempt <= attempt.attempt]
    usable = attempt.owned([c for c in complete if c.attempt <= attempt.attempt])
    if not usable:
        return []
    kept = set(usable[-config.keep_last :])
    if config.keep_interval is not None:
        kept |= {c for c in usable if c.step % config.keep_interval == 0}
    # Checkpoints of this attempt above the newest complete one are still being written.
    unfinished = {c for c in mine if c.attempt == attempt.attempt and c.step > usable[-1].step}
    return [c for c in mine if c not in kept | unfinished]


def delete_superfluous(paths: RunPaths, *, attempt: Attempt, config: CheckpointConfig) -> None:
    """Delete the checkpoints that `checkpoints_to_delete` selects from the files on the volume."""
    for checkpoint in checkpoints_to_delete(
        paths.checkpoints_on_disk(), complete=complete_checkpoints(paths), attempt=attempt, config=config
    ):
        reach("retention.before_remove")
        # Delete the manifest first, so that a partly deleted checkpoint never counts as complete.
        (checkpoint.path / MANIFEST).unlink(missing_ok=True)
        reach("retention.manifest_removed")
        shutil.rmtree(checkpoint.path, ignore_errors=True)
        reach("retention.removed")
