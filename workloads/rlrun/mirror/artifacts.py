"""Parts of a run's folder that can be copied: complete artifacts of the volume."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlrun.config.models.checkpoint import MirrorConfig
from rlrun.protocol.files.checkpoint_manifest import MANIFEST, ManifestError, complete_checkpoints, read_manifest
from rlrun.protocol.files.paths import COMPLETE, TMP_SUFFIX, RunPaths, artifacts_in_steps


@dataclass(frozen=True)
class Artifact:
    """Files that are copied together."""

    name: str
    """Path relative to the run's folder and to the mirror's folder."""
    folder: Path
    """Folder on the volume."""
    files: tuple[str, ...]
    """Paths relative to the folder, without the marker."""
    marker: str | None
    """File that marks the artifact as complete. It is copied last, or written empty if the volume has none. None: independent files."""

    def is_whole(self) -> bool:
        """Return whether the volume still has the artifact."""
        return self.folder.is_dir() and (self.marker != MANIFEST or (self.folder / MANIFEST).is_file())


def complete_artifacts(paths: RunPaths, config: MirrorConfig) -> Iterator[Artifact]:
    """Yield the complete artifacts of the volume, newest first within each kind: checkpoints with the attempts' files, exports, traces.

    Args:
        paths: paths of the run.
        config: kinds to copy.
    """
    if config.checkpoints:
        if attempts := _list_files(paths.attempts):  # they define which checkpoints belong together
            yield Artifact(paths.attempts.name, paths.attempts, attempts, None)
        for found in reversed(complete_checkpoints(paths)):
            try:
                files = tuple(entry.path for entry in read_manifest(found.path).files)
            except ManifestError:  # damaged, or deleted in the meantime; a resume reports it
                continue
            yield Artifact(f"{paths.checkpoints.name}/{found.path.name}", found.path, files, MANIFEST)
    if config.exports:
        for found in reversed(artifacts_in_steps(paths.exports)):
            yield Artifact(f"{paths.exports.name}/{found.path.name}", found.path, _list_files(found.path), COMPLETE)
    if config.traces and (files := _list_files(paths.traces)):
        yield Artifact(paths.traces.name, paths.traces, tuple(reversed(files)), None)


def _list_files(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        return ()
    found = (
        path for path in folder.rglob("*") if path.suffix != TMP_SUFFIX and path.name != COMPLETE and path.is_file()
    )
    return tuple(sorted(str(path.relative_to(folder)) for path in found))
