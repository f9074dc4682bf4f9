"""Retention of published policy versions: decided from the disk alone, without torch."""

from __future__ import annotations

import shutil
from collections.abc import Iterable

from loguru import logger

from rlrun.protocol.files.attempts import Attempt
from rlrun.protocol.files.paths import COMPLETE, Artifact, RunPaths

MIN_KEPT_VERSIONS = 3


def versions_to_delete(
    versions: Iterable[Artifact],
    *,
    attempt: Attempt,
    checkpoints: Iterable[Artifact],
    max_async_level: int,
    deltas: Iterable[Artifact] = (),
) -> list[Artifact]:
    """Versions to delete: all but the newest of this lineage and those that a checkpoint refers to.

    A version that is there as a difference counts as one. With it are kept the newest whole version before it, and the differences since.
    What a later attempt wrote is never touched, should this one be a zombie.
    """
    mine = [version for version in versions if version.attempt <= attempt.attempt]
    lineage = attempt.owned(mine)
    own_deltas = [delta for delta in deltas if delta.attempt <= attempt.attempt]
    current = [one.step for one in own_deltas if one.attempt == attempt.attempt]  # no engine gets another attempt's
    kept_steps = set(
        sorted({version.step for version in lineage} | {*current})[-max(MIN_KEPT_VERSIONS, max_async_level + 2) :]
    )
    whole = [version.step for version in lineage if version.attempt == attempt.attempt]
    # The newest whole version that is not above any of those that are kept: what differs is applied to it.
    first = max((step for step in whole if step <= min(kept_steps)), default=min(whole, default=0))
    referred = {checkpoint.step for checkpoint in attempt.owned(list(checkpoints))} | ({first} if current else set())
    newest_of_step = {version.step: version for version in lineage}  # ordered: the latest attempt's copy wins
    needed = {step for step in current if step > first or step in kept_steps}
    return [
        *(v for v in mine if newest_of_step.get(v.step) != v or v.step not in kept_steps | referred),
        *(one for one in own_deltas if one.attempt != attempt.attempt or one.step not in needed),
    ]


def delete_superfluous(paths: RunPaths, *, attempt: Attempt, max_async_level: int) -> None:
    """Delete old versions, as computed from what is on the disk. Those that the volume does not delete stay until the next call."""
    try:
        _delete_superfluous(paths, attempt, max_async_level)
    except OSError as error:
        logger.warning(f"old versions stay for now: {error}")


def _delete_superfluous(paths: RunPaths, attempt: Attempt, max_async_level: int) -> None:
    for version in versions_to_delete(
        paths.versions_on_disk(),
        attempt=attempt,
        checkpoints=paths.checkpoints_on_disk(),
        max_async_level=max_async_level,
        deltas=paths.deltas_on_disk(),
    ):
        (version.path / COMPLETE).unlink(missing_ok=True)  # first, so that no reader finds a part of it
        shutil.rmtree(version.path, ignore_errors=True)
