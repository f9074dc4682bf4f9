"""Base of an attempt and retention of checkpoints: decided from the disk alone."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
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
"""Compares the files of a checkpoint's folder with its manifest, and raises ManifestError or OSError where they differ."""


UNREADABLE_SECONDS = 120.0
"""Longest time for which a checkpoint that the volume fails to read is tried again, before an older one is taken."""


class Beginning:
    """Begin of an attempt over several tries, where the volume refuses or fails.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unreadable_since: dict[Path, float] = {}
        self.written: Attempt | None = None
        """Content of the attempt's file in the try before, whose name may be there although its last flush failed."""

    def gives_up(self, checkpoint: Path) -> bool:
        """True if the checkpoint could not be read for `UNREADABLE_SECONDS`: one that is away for a while has lost nothing."""
        return self._clock() - self._unreadable_since.setdefault(checkpoint, self._clock()) >= UNREADABLE_SECONDS


@dataclass(frozen=True)
class Base:
    """The checkpoint that an attempt starts from, and the lineage up to it."""

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
    """Newest complete checkpoint of the newest attempt's lineage that matches its manifest; None: start from the model.

    Args:
        paths: of the run.
        resume: the policy.
        with_orchestrator: whether a checkpoint needs the orchestrator's part (in a replay there is none).
        required: do not start from the model if there are complete checkpoints and all are damaged.
        log: gets every checkpoint that is passed over, and why.
        check: reads the files.
        beginning: time for a volume that fails to read a checkpoint; None: none.

    Raises:
        RoleError: the policy forbids what was found, or asks for a step that is not there; or all checkpoints are damaged, or unreadable.
        OSError, ManifestError: the volume fails to read a checkpoint, and may read it at the next try.
    """
    attempts = paths.attempts_on_disk()
    if resume.policy == "Never" and attempts:
        raise RoleError(
            f"checkpoint.resume.policy is Never, but {paths.root} holds a run (attempt {attempts[-1]}): "
            "choose another folder, or the policy Latest",
            exit_codes.CONFIGURATION,
        )
    if not attempts:
        if resume.policy == "Step":
            raise RoleError(
                f"checkpoint.resume.step is {resume.step}, but {paths.root} holds no run", exit_codes.CONFIGURATION
            )
        return None
    lineage = newest_attempt(paths, log)
    candidates = lineage.owned(complete_checkpoints(paths)) if lineage is not None else []
    if resume.policy == "Step":
        wanted = [c for c in candidates if c.step == resume.step]
        if not wanted:
            steps = ", ".join(str(c.step) for c in candidates) or "none"
            raise RoleError(
                f"checkpoint.resume.step is {resume.step}, but the complete checkpoints are of steps: {steps}",
                exit_codes.CONFIGURATION,
            )
        problem = _find_problem(wanted[-1], with_orchestrator, check, beginning)
        if problem:
            raise RoleError(f"checkpoint.resume.step is {resume.step}, but {problem}", exit_codes.DATA)
        assert lineage is not None  # it owns the candidate
        return Base(wanted[-1], lineage)
    is_unreadable = False
    for candidate in reversed(candidates):
        problem = _find_problem(candidate, with_orchestrator, check, beginning)
        if problem is None and lineage is not None:
            return Base(candidate, lineage)
        is_unreadable |= isinstance(problem, _Unreadable)
        log(f"not resuming from step {candidate.step}: {problem}; trying the one before")
    if is_unreadable:  # it may be whole: no reason to start from the model
        raise RoleError(
            f"no complete checkpoint of {paths.root} can be used or read, so nothing is resumed; the last problem: {problem}; "
            "repair the storage, or the way to it",
            exit_codes.STORAGE,
        )
    if candidates and required:
        steps = ", ".join(str(c.step) for c in candidates)
        raise RoleError(
            f"none of the complete checkpoints (of steps {steps}) can be used, so nothing is resumed; that of step "
            f"{candidates[0].step}: {problem}; restore its files from a copy, or start a new run in another --output-dir",
            exit_codes.DATA,
        )
    return None


def choose_origin(
    paths: RunPaths, resume: ResumeConfig, *, log: Callable[[str], None] = print, check: Verify = verify_files
) -> Origin | None:
    """The checkpoint of another run that `resume.from_run` names; None: start from the model.

    An earlier attempt that began with one pins it: the other run may have gone on since. The other run's retention does not know of this
    run: where the pinned one is deleted, and `from_step` does not demand it, the newest is taken.

    Raises:
        RoleError: there is no such run, or no complete checkpoint in it.
    """
    if resume.from_run is None:
        return None
    field = f"checkpoint.resume.fromRun is {resume.from_run}"
    other = RunPaths(paths.root.parent / resume.from_run)
    if other.root.resolve() == paths.root.resolve():
        raise RoleError(f"{field}, which is this run itself; to go on with it set nothing", exit_codes.CONFIGURATION)
    attempts = other.attempts_on_disk()
    if not attempts:
        raise RoleError(f"{field}, but {other.root} holds no run", exit_codes.CONFIGURATION)
    lineage = newest_attempt(other, log)
    candidates = lineage.owned(complete_checkpoints(other)) if lineage is not None else []
    if not candidates or resume.from_step not in (None, *(c.step for c in candidates)):
        wanted = "" if resume.from_step is None else f" and fromStep {resume.from_step}"
        steps = ", ".join(str(c.step) for c in candidates) or "none"
        raise RoleError(
            f"{field}{wanted}, but its complete checkpoints are of steps: {steps}", exit_codes.CONFIGURATION
        )
    wanted_ones = [c for c in candidates if resume.from_step in (None, c.step)]
    mine = newest_attempt(paths, lambda message: None)  # `choose_base` has logged it
    before = mine.origin if mine is not None else None
    pinned = [c for c in wanted_ones if before is not None and str(c.path) == before.path]
    for candidate in [*pinned, *(c for c in reversed(wanted_ones) if c not in pinned)]:
        problem = _find_problem(candidate, False, check)
        if problem is None:
            return Origin(str(candidate.path), candidate.step, candidate.attempt)
        log(f"not starting from step {candidate.step} of {other.root}: {problem}")
    raise RoleError(
        f"{field}, but every checkpoint that could be used is damaged; the last problem: {problem}", exit_codes.DATA
    )


class _Unreadable(str):
    """Problem of a checkpoint that the volume fails to read."""


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
        return f"{checkpoint.path.name} holds the manifest of step {manifest.step}, attempt {manifest.attempt}"
    if with_orchestrator and not any(entry.path.startswith(f"{ORCHESTRATOR_PART}/") for entry in manifest.files):
        return f"{checkpoint.path.name} has no {ORCHESTRATOR_PART} part"
    return None


def start_attempt(
    paths: RunPaths,
    config: TrainerConfig,
    *,
    attempt: int,
    world_size: int,
    config_hash: str,
    with_orchestrator: bool,
    required: bool = False,
    log: Callable[[str], None],
    check: Verify = verify_files,
    beginning: Beginning | None = None,
) -> Attempt:
    """Decide from the disk where an attempt starts, and write its file; called on rank 0 alone.

    Raises:
        RoleError: as `choose_base`, `choose_origin` and `begin_attempt`, or the volume refuses to write.
    """
    resume = config.checkpoint.resume
    with storage_errors(paths.attempts, "write the attempt's file"):
        base = choose_base(
            paths,
            resume,
            with_orchestrator=with_orchestrator,
            required=required,
            log=log,
            check=check,
            beginning=beginning,
        )
        origin = choose_origin(paths, resume, log=log, check=check) if base is None else None
        return begin_attempt(
            paths,
            base,
            origin=origin,
            attempt=attempt,
            world_size=world_size,
            config_hash=config_hash,
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
        paths: of the run.
        base: the checkpoint of this run that it starts from; None: it starts at step 0.
        attempt: its number.
        world_size: ranks of the group.
        config_hash: of the run's configuration.
        uid: of the run.
        origin: without a base, what version 0 is; None: the model.
        beginning: earlier tries of this process.

    Raises:
        RoleError: the number was used before, or is not above those on the disk: another group of this run lives or has lived.
    """
    before = beginning.written if beginning is not None else None
    if before is not None and paths.attempt_file(attempt).exists():
        write_attempt(paths, before)  # completes that try; a file of another group is refused
        return before
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
    except FileExistsError:
        check_number(paths, attempt)
        raise
    return this


def checkpoints_to_delete(
    checkpoints: Iterable[Artifact], *, complete: Iterable[Artifact], attempt: Attempt, config: CheckpointConfig
) -> list[Artifact]:
    """Checkpoints to delete: complete ones beyond `keep_last` that no `keep_interval` holds, and unfinished ones that are older than
    the newest complete one. What a later attempt wrote is never touched."""
    mine = [c for c in checkpoints if c.attempt <= attempt.attempt]
    usable = attempt.owned([c for c in complete if c.attempt <= attempt.attempt])
    if not usable:
        return []
    kept = set(usable[-config.keep_last :])
    if config.keep_interval is not None:
        kept |= {c for c in usable if c.step % config.keep_interval == 0}
    unfinished = {c for c in mine if c.attempt == attempt.attempt and c.step > usable[-1].step}
    return [c for c in mine if c not in kept | unfinished]


def delete_superfluous(paths: RunPaths, *, attempt: Attempt, config: CheckpointConfig) -> None:
    """Delete old checkpoints, as computed from what is on the disk."""
    for checkpoint in checkpoints_to_delete(
        paths.checkpoints_on_disk(), complete=complete_checkpoints(paths), attempt=attempt, config=config
    ):
        reach("retention.before_remove")
        # The manifest first, so that a part of a checkpoint is never taken for one.
        (checkpoint.path / MANIFEST).unlink(missing_ok=True)
        reach("retention.manifest_removed")
        shutil.rmtree(checkpoint.path, ignore_errors=True)
        reach("retention.removed")
