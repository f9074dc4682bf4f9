"""Retention of published policy versions: decided from the disk alone, without torch."""

from __future__ import annotations

import shutil
from collections.abc import Iterable

from rlrun.protocol.files.attempts import Attempt
from rlrun.protocol.files.paths import COMPLETE, Artifact, RunPaths

MIN_KEPT_VERSIONS = 3


def superfluous(
    versions: Iterable[Artifact], *, attempt: Attempt, checkpoints: Iterable[Artifact], max_async_level: int
) -> list[Artifact]:
    """Versions to delete: all but the newest of this lineage and those that a checkpoint refers to.

    What a later attempt wrote is never touched, should this one be a zombie.
    """
    mine = [version for version in versions if version.attempt <= attempt.attempt]
    lineage = attempt.owned(mine)
    newest = {version.step for version in lineage}
    kept_steps = set(sorted(newest)[-max(MIN_KEPT_VERSIONS, max_async_level + 2) :])
    referred = {checkpoint.step for checkpoint in attempt.owned(list(checkpoints))}
    newest_of_step = {version.step: version for version in lineage}  # ordered: the latest attempt's copy wins
    return [v for v in mine if newest_of_step.get(v.step) != v or v.step not in kept_steps | referred]


def delete_superfluous(paths: RunPaths, *, attempt: Attempt, max_async_level: int) -> None:
    """Delete old versions, as computed from what is on the disk."""
    for version in superfluous(
        paths.versions_on_disk(),
        attempt=attempt,
        checkpoints=paths.checkpoints_on_disk(),
        max_async_level=max_async_level,
    ):
        (version.path / COMPLETE).unlink(missing_ok=True)  # first, so that no reader finds a part of it
        shutil.rmtree(version.path, ignore_errors=True)
