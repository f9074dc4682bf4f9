"""Manifest of a checkpoint: a checkpoint exists if its `manifest.json` exists.

The trainer's rank 0 writes it last, after the shards of all ranks and the orchestrator's part are durable.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from pydantic import TypeAdapter

from rlrun.diagnostics.fault_points import reach
from rlrun.protocol.files.attempts import Attempt, Origin, Segment, read_attempt
from rlrun.protocol.files.durable import document_crc32, fsync_path, fsync_tree, write_json
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import TMP_SUFFIX, Artifact, RunPaths
from rlrun.runtime.printable import escape_controls

MANIFEST = "manifest.json"
TRAINER_PART = "trainer"
ORCHESTRATOR_PART = "orchestrator"
FORMAT_VERSION = 2
_CHUNK_BYTES = 1 << 20
_PATH_CHARACTERS = 256
"""Maximum length of a file's path in a checkpoint; real paths have about 20 characters."""
_READERS = 8
"""Number of files read concurrently: a single reader does not saturate a network volume."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    path: str
    """Path relative to the checkpoint's folder."""
    size: int
    """Size in bytes."""
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """Content of a complete checkpoint."""

    step: int
    attempt: int
    world_size: int
    config_hash: str
    files: tuple[FileEntry, ...]
    created_at: float
    """Seconds since the epoch."""
    format_version: int = FORMAT_VERSION
    lineage: tuple[Segment, ...] = ()
    """Lineage of the attempt that wrote it, which replaces a damaged file of that attempt; empty in manifests of earlier releases."""
    origin: Origin | None = None
    """Origin of the attempt, as in its file."""


_ADAPTER = TypeAdapter(Manifest)


class ManifestError(ValueError):
    """Error for a checkpoint that differs from its manifest."""


def file_checksum(path: Path) -> int:
    """Return the CRC-32 of a file's content."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value


def describe_part(checkpoint: Path, part: Path) -> list[FileEntry]:
    """Return the entries of all files below `part`, a folder inside `checkpoint`; unfinished files are skipped."""
    files = sorted(path for path in part.rglob("*") if path.suffix != TMP_SUFFIX and path.is_file())
    return [FileEntry(str(p.relative_to(checkpoint)), p.stat().st_size, file_checksum(p)) for p in files]


def flush_trainer_part(checkpoint: Path) -> None:
    """Flush the shards and their names. The orchestrator writes and flushes its own part of the folder concurrently."""
    fsync_tree(checkpoint / TRAINER_PART)
    fsync_path(checkpoint)


def remove_trainer_part(checkpoint: Path) -> None:
    """Remove the shards, and the folder if it is then empty: the orchestrator may be writing its part, or have written it."""
    shutil.rmtree(checkpoint / TRAINER_PART, ignore_errors=True)
    with suppress(OSError):
        checkpoint.rmdir()


def write_manifest(checkpoint: Path, manifest: Manifest) -> None:
    """Write the manifest, which makes the checkpoint complete."""
    document = asdict(manifest)
    reach("checkpoint.manifest.before_write")
    write_json(
        checkpoint / MANIFEST,
        document | {"crc32": document_crc32(document)},
        before_rename="checkpoint.manifest.before_rename",
    )
    reach("checkpoint.manifest.written")


def read_manifest(checkpoint: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises:
        ManifestError: it is missing, damaged or of another format.
    """
    try:
        document = json.loads((checkpoint / MANIFEST).read_text())
        written = document["format_version"]
        if written != FORMAT_VERSION:
            raise ManifestError(
                f"{checkpoint / MANIFEST} has format {written!s:.40}, but this version reads {FORMAT_VERSION}"
            )
        if document.pop("crc32") != document_crc32(document):
            raise ManifestError(f"{checkpoint / MANIFEST} is damaged: its checksum is wrong")
        manifest = _ADAPTER.validate_python(document)
        if outside := next((entry.path for entry in manifest.files if not _is_inside(entry.path)), None):
            raise ManifestError(
                f"{checkpoint / MANIFEST} names {outside[:80]!r}, which is not a file of the checkpoint"
            )
        return manifest
    except ManifestError:
        raise
    except FileNotFoundError:
        raise ManifestError(f"{checkpoint.name} has no {MANIFEST}: it was never completed") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = str(error).splitlines() or [type(error).__name__]
        raise ManifestError(escape_controls(f"{checkpoint / MANIFEST} is damaged: {reason[0]}")) from None


def _is_inside(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return bool(parts) and len(path) < _PATH_CHARACTERS and parts[0] != "/" and ".." not in parts and "\0" not in path


def verify_files(checkpoint: Path, manifest: Manifest) -> None:
    """Compare every file with its entry, several files at a time.

    Raises:
        ManifestError: a file is missing, or its size or checksum differs; the message names it.
    """
    check_sizes(checkpoint, manifest.files)
    check_sums(checkpoint, manifest.files)


def check_sums(checkpoint: Path, files: Sequence[FileEntry]) -> None:
    """Compare the checksum of every file with its entry, several files at a time.

    Raises:
        ManifestError: a checksum differs; the message names the file.
    """
    with ThreadPoolExecutor(_READERS) as readers:
        found = readers.map(lambda entry: file_checksum(checkpoint / entry.path), files)
        for entry, value in zip(files, found, strict=True):
            if value != entry.crc32:
                raise ManifestError(f"{checkpoint.name}: the checksum of {entry.path} differs from the manifest")


def check_sizes(checkpoint: Path, files: Iterable[FileEntry]) -> None:
    """Compare the size of every file with its entry.

    Raises:
        ManifestError: a file is missing or its size differs; the message names it.
    """
    for entry in files:
        path = checkpoint / entry.path
        if path.is_symlink() or not path.is_file():
            raise ManifestError(f"{checkpoint.name}: {entry.path} is missing")
        if (size := path.stat().st_size) != entry.size:
            raise ManifestError(f"{checkpoint.name}: {entry.path} has {size} bytes instead of {entry.size}")


def complete_checkpoints(paths: RunPaths) -> list[Artifact]:
    """Return all checkpoints with a manifest, of any attempt, in order of step and attempt."""
    return [a for a in paths.checkpoints_on_disk() if (a.path / MANIFEST).is_file()]


def newest_attempt(paths: RunPaths, log: Callable[[str], object]) -> Attempt | None:
    """Return the newest attempt with a known lineage, or None; without one the run has no checkpoint either.

    An attempt's file records which steps of which attempts belong to the run. If it is damaged, a manifest of that attempt replaces it. If
    that attempt has no complete checkpoint, none of its training was kept, so the attempt before it is used.

    Args:
        paths: folder of the run.
        log: receives a warning for each damaged file, with its consequence.

    Raises:
        RoleError: an attempt's file is damaged, and its complete checkpoints, of an earlier release, do not record its lineage.
        OSError: the volume fails to read a file.
    """
    complete = complete_checkpoints(paths)
    for number in reversed(paths.attempts_on_disk()):
        file = paths.attempt_file(number)
        try:
            return read_attempt(file)
        except RoleError:
            own = [checkpoint for checkpoint in complete if checkpoint.attempt == number]
            recorded = _recorded_attempt(own)
            if own and recorded is None:
                raise
            if recorded is not None:
                log(f"{file} is damaged: the manifest of step {recorded[0].step} of that attempt is used instead")
                return recorded[1]
            log(
                f"{file} is damaged: attempt {number} has no complete checkpoint, so the run continues from the attempt before"
            )
    return None


def _recorded_attempt(checkpoints: Sequence[Artifact]) -> tuple[Artifact, Attempt] | None:
    """Return the newest of an attempt's checkpoints whose manifest records its lineage, and the attempt."""
    for checkpoint in reversed(checkpoints):
        with suppress(ManifestError):
            manifest = read_manifest(checkpoint.path)
            if not manifest.lineage or manifest.lineage[-1].attempt != checkpoint.attempt:
                continue
            bases = manifest.lineage[:-1]
            attempt = Attempt(
                attempt=checkpoint.attempt,
                base_step=manifest.lineage[-1].first - 1,
                base_attempt=bases[-1].attempt if bases else None,
                world_size=manifest.world_size,
                lineage=manifest.lineage,
                config_hash=manifest.config_hash,
                started_at=manifest.created_at,
                origin=manifest.origin,
            )
            return checkpoint, attempt
    return None
