"""Attempts and their lineage, which determines the artifacts that a reader may trust.

An attempt starts from a checkpoint of an earlier attempt (its base) or from the model (base step 0). The lineage of an attempt is the chain
of these bases: attempt `a` owns the steps after its base, and each ancestor owns the steps up to the next base. A writer puts its attempt
into every name, so that files of a stale process of an older attempt are outside of the lineage and are never read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from rlrun.diagnostics.fault_points import reach
from rlrun.protocol.files.durable import KEY, check_document, create_json, document_crc32
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import Artifact, RunPaths
from rlrun.runtime import exit_codes
from rlrun.runtime.printable import escape_controls


@dataclass(frozen=True)
class Segment:
    """Steps `first..last` of the run, trained by `attempt`; `last` is None for the current attempt."""

    attempt: int
    first: int
    last: int | None


@dataclass(frozen=True)
class Origin:
    """Checkpoint of another run with which a run starts: parameters and optimizer."""

    path: str
    """Folder of the checkpoint."""
    step: int
    attempt: int


@dataclass(frozen=True)
class Attempt:
    """One life of the trainer group, recorded in `attempts/0003.json`."""

    attempt: int
    base_step: int
    """Step of the checkpoint from which it starts; 0 for the model itself."""
    base_attempt: int | None
    """Attempt that wrote that checkpoint; None for the model itself."""
    world_size: int
    lineage: tuple[Segment, ...]
    """Segments of the ancestors, then its own."""
    config_hash: str
    started_at: float
    """Seconds since the epoch."""
    uid: str = ""
    """UID of the run: a folder may contain attempts of an earlier run of the same name."""
    origin: Origin | None = None
    """Origin of version 0 of this lineage; None: the model."""

    def owns(self, step: int, attempt: int) -> bool:
        """Return whether an artifact of `step` (or policy version) written by `attempt` belongs to this lineage.

        Version `n` belongs to the segment that trained step `n`. Version 0 belongs to it too, and so does the base version, which an
        attempt publishes again when it starts.
        """
        for segment in self.lineage:
            if segment.attempt == attempt:
                return segment.first - 1 <= step and (segment.last is None or step <= segment.last)
        return False

    def owned(self, artifacts: list[Artifact]) -> list[Artifact]:
        """Return the items of `artifacts` that belong to this lineage, in order."""
        return [a for a in artifacts if self.owns(a.step, a.attempt)]


_ADAPTER = TypeAdapter(Attempt)
RESUME_REQUIRED_VARIABLE = "RLRUN_RESUME_REQUIRED"
"""Environment variable of the trainer, set by a launcher for a required resume: damaged checkpoints are an error, not a new start."""


def first_attempt(
    *,
    world_size: int,
    config_hash: str,
    attempt: int = 1,
    started_at: float | None = None,
    uid: str = "",
    origin: Origin | None = None,
) -> Attempt:
    """Return an attempt that starts from the model, or from another run's checkpoint."""
    lineage = (Segment(attempt, 1, None),)
    return Attempt(attempt, 0, None, world_size, lineage, config_hash, started_at or time.time(), uid, origin)


def next_attempt(
    base: Attempt,
    base_step: int,
    *,
    attempt: int,
    world_size: int,
    config_hash: str,
    started_at: float | None = None,
    uid: str = "",
) -> Attempt:
    """Return an attempt that starts from the checkpoint of `base_step`, which `base` wrote or inherited."""
    segments: list[Segment] = []
    owner: int | None = None
    for segment in base.lineage:
        if segment.first > base_step:
            break
        last = base_step if segment.last is None else min(segment.last, base_step)
        segments.append(Segment(segment.attempt, segment.first, last))
        owner = segment.attempt
    segments.append(Segment(attempt, base_step + 1, None))
    began = started_at or time.time()
    return Attempt(attempt, base_step, owner, world_size, tuple(segments), config_hash, began, uid, base.origin)


def write_attempt(paths: RunPaths, attempt: Attempt) -> None:
    """Create `attempts/<n>.json`.

    Raises:
        FileExistsError: this attempt number is taken; two groups with one number never both run.
    """
    reach("attempt.before_write")
    document = json.loads(json.dumps(asdict(attempt)))  # the form of a read document: lists instead of tuples
    document[KEY] = document_crc32(document)
    create_json(paths.attempt_file(attempt.attempt), document, before_link="attempt.before_link")
    reach("attempt.written")


def read_attempt(path: Path) -> Attempt:
    """Read one attempt file.

    Raises:
        RoleError: the file is damaged.
    """
    try:
        document = json.loads(path.read_text())
        check_document(document)  # files of earlier releases have no checksum
        return attempt_of(document)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = str(error).splitlines() or [type(error).__name__]
        fix = "restore it from a copy, or start a new run with checkpoint.resume.fromRun"
        raise RoleError(escape_controls(f"{path} is damaged: {reason[0]}; {fix}"), exit_codes.DATA) from None


def attempt_of(document: dict[str, object]) -> Attempt:
    """Return the attempt in a document written by `asdict`."""
    return _ADAPTER.validate_python(document)


def check_number(paths: RunPaths, attempt: int) -> None:
    """Refuse an attempt number that is not above those on disk, because another group of this run uses or used it.

    Raises:
        RoleError: the number is taken; the message has the next free number.
    """
    newest = max(paths.attempts_on_disk(), default=0)
    if attempt <= newest:
        raise RoleError(
            f"RLRUN_ATTEMPT is {attempt}, but {paths.attempts} already contains attempt {newest}; the next is {newest + 1}",
            exit_codes.ATTEMPT_TAKEN,
        )


def next_number(paths: RunPaths, at_least: int = 1) -> int:
    """Return 1 + the highest attempt on disk, but at least `at_least`."""
    return max([at_least, *(n + 1 for n in paths.attempts_on_disk())])


def _trained_by(attempt: Attempt, version: int) -> int | None:
    """Return the attempt that trained a policy version; 0 for the model itself, None if the lineage has no such version."""
    if version == 0:
        return 0
    for segment in attempt.lineage:
        if segment.first <= version and (segment.last is None or version <= segment.last):
            return segment.attempt
    return None


def is_lost(version: int, writer: Attempt, attempt: Attempt) -> bool:
    """Return whether a policy version that `writer` sampled from is different or missing in the lineage of `attempt`.

    The base of an attempt fixes all versions before it: if a version is not lost, no older one is.
    """
    return writer.origin != attempt.origin or _trained_by(writer, version) != _trained_by(attempt, version)


def earlier_attempts(paths: RunPaths, attempt: Attempt, *, log: Callable[[str], object]) -> dict[int, Attempt]:
    """Return the earlier attempts with undamaged files, by number; `log` receives a line for each damaged file.

    Batches and rollouts of an attempt with a damaged file are produced again.
    """
    found = {}
    for number in paths.attempts_on_disk():
        if number < attempt.attempt:
            try:
                found[number] = read_attempt(paths.attempt_file(number))
            except RoleError as error:
                log(f"nothing of attempt {number} is reused: {error}")
    return found
