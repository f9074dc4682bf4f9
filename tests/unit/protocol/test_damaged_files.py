"""Damaged files that a run reads back: either refused by name, or read with the same value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlrun.protocol.files.attempts import earlier_attempts, first_attempt, next_attempt, read_attempt, write_attempt
from rlrun.protocol.files.batch import BatchError, read_batch, write_batch
from rlrun.protocol.files.checkpoint_manifest import (
    Manifest,
    ManifestError,
    describe_part,
    read_manifest,
    write_manifest,
)
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from tests.support.damage import damages
from tests.support.failing_volume.writers import batch_of

Read = Callable[[], object]


def attempt_file(paths: RunPaths) -> tuple[Path, Read, type[Exception]]:
    write_attempt(paths, first_attempt(world_size=2, config_hash="h", uid="u"))
    file = paths.attempt_file(1)
    return file, lambda: read_attempt(file), RoleError


def manifest(paths: RunPaths) -> tuple[Path, Read, type[Exception]]:
    folder = paths.checkpoint(2, 1)
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "a").write_bytes(b"shard")
    write_manifest(folder, Manifest(2, 1, 1, "h", tuple(describe_part(folder, folder)), 1.0))
    return folder / "manifest.json", lambda: read_manifest(folder), ManifestError


def batch_document(paths: RunPaths) -> tuple[Path, Read, type[Exception]]:
    write_batch(paths.batch(1, 1), batch_of(1, 1))
    return paths.batch(1, 1) / "batch.json", lambda: read_batch(paths.batch(1, 1)), BatchError


def batch_columns(paths: RunPaths) -> tuple[Path, Read, type[Exception]]:
    _, read, error = batch_document(paths)
    return paths.batch(1, 1) / "samples.safetensors", read, error


@pytest.mark.parametrize("make", [attempt_file, manifest, batch_document, batch_columns])
def test_damaged_file_is_refused_or_reads_the_same(
    tmp_path: Path, make: Callable[[RunPaths], tuple[Path, Read, type[Exception]]]
) -> None:
    path, read, error = make(RunPaths(tmp_path))
    content, whole = path.read_bytes(), repr(read())
    refused: list[tuple[str, str]] = []
    for what, damaged in damages(content, every=max(1, len(content) // 60)):
        path.write_bytes(damaged)
        try:
            assert repr(read()) == whole, what
        except error as told:
            refused.append((what, str(told)))
    assert len(refused) > 100
    assert [what for what, message in refused if path.parent.name not in message] == []


def test_files_of_earlier_releases_without_checksum_are_read(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for file, read, _ in (attempt_file(paths), batch_document(paths)):
        before, document = repr(read()), json.loads(file.read_text())
        assert document.pop("crc32")
        document.pop("samples_crc32", None)
        file.write_text(json.dumps(document))
        assert repr(read()) == before


def test_damaged_file_of_previous_attempt_is_skipped(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    attempts = [first_attempt(world_size=1, config_hash="h")]
    for number in (2, 3):
        attempts.append(next_attempt(attempts[-1], 0, attempt=number, world_size=1, config_hash="h"))
    for attempt in attempts:
        write_attempt(paths, attempt)
    paths.attempt_file(1).write_bytes(b"{")
    assert list(earlier_attempts(paths, attempts[-1], log=print)) == [2]
