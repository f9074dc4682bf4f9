"""Retention of published versions, which depends only on the files on the volume. Does not import torch."""

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
    """Return the versions to delete: all except for the newest of this lineage and versions of checkpoints.

    Differences count as versions. The newest complete version before a kept difference and all differences in between are kept too. Files
    of later attempts are never deleted, because this attempt may be outdated.
    """
    mine = [version for version in versions if version.attempt <= attempt.attempt]
    lineage = attempt.owned(mine)
    own_deltas = [delta for delta in deltas if delta.attempt <= attempt.attempt]
    # Engines never use differences of other attempts.
    current = [one.step for one in own_deltas if one.attempt == attempt.attempt]
    kept_steps = set(
        sorted({version.step for version in lineage} | {*current})[-max(MIN_KEPT_VERSIONS, max_async_level + 2) :]
    )
    whole = [version.step for version in lineage if version.attempt == attempt.attempt]
    # The newest complete version not above any kept version: the differences are applied to it.
    first = max((step for step in whole if step <= min(kept_steps)), default=min(whole, default=0))
    referred = {checkpoint.step for checkpoint in attempt.owned(list(checkpoints))} | ({first} if current else set())
    newest_of_step = {version.step: version for version in lineage}  # ordered: the latest attempt's copy wins
    needed = {step for step in current if step > first or step in kept_steps}
    return [
        *(v for v in mine if newest_of_step.get(v.step) != v or v.step not in kept_steps | referred),
        *(one for one in own_deltas if one.attempt != attempt.attempt or one.step not in needed),
    ]


def delete_superfluous(paths: RunPaths, *, attempt: Attempt, max_async_level: int) -> None:
    """Delete the versions that `versions_to_delete` selects; failed deletions are repeated at the next call."""
    try:
        _delete_superfluous(paths, attempt, max_async_level)
    except OSError as error:
        logger.warning(f"cannot delete old versions yet: {error}")


def _delete_superfluous(paths: RunPaths, attempt: Attempt, max_async_level: int) -> None:
    for version in versions_to_delete(
        paths.versions_on_disk(),
        attempt=attempt,
        checkpoints=paths.checkpoints_on_disk(),
        max_async_level=max_async_level,
        deltas=paths.deltas_on_disk(),
    ):
        (version.path / COMPLETE).unlink(missing_ok=True)  # first, so that readers ignore a partly deleted version
        shutil.rmtree(version.path, ignore_errors=True)
