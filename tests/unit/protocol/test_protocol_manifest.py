"""Checkpoint manifests: completeness, and detection of damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlrun.protocol.files.checkpoint_manifest import (
    MANIFEST,
    Manifest,
    ManifestError,
    complete_checkpoints,
    describe_part,
    read_manifest,
    verify_files,
    write_manifest,
)
from rlrun.protocol.files.paths import RunPaths


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = RunPaths(tmp_path).checkpoint(20, 1)
    for name, content in (
        ("trainer/rank0", b"weights" * 200_000),
        ("trainer/sub/rank1", b""),
        ("orchestrator/s", b"s"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    files = describe_part(folder, folder / "trainer") + describe_part(folder, folder / "orchestrator")
    write_manifest(folder, Manifest(20, 1, 2, "hash", tuple(files), 1.5))
    return folder


def test_complete_checkpoint_passes_verification(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    verify_files(checkpoint, manifest)
    assert [entry.path for entry in manifest.files] == ["trainer/rank0", "trainer/sub/rank1", "orchestrator/s"]
    assert (manifest.step, manifest.attempt, manifest.world_size, manifest.config_hash) == (20, 1, 2, "hash")


def test_checkpoint_without_manifest_is_incomplete(checkpoint: Path) -> None:
    paths = RunPaths(checkpoint.parents[1])
    paths.checkpoint(40, 1).mkdir()
    assert [a.step for a in complete_checkpoints(paths)] == [20]
    (checkpoint / MANIFEST).unlink()
    assert complete_checkpoints(paths) == []
    with pytest.raises(ManifestError, match=r"step_00000020\.a0001 has no manifest\.json: it was never completed"):
        read_manifest(checkpoint)


def test_truncated_checkpoint_file_is_detected(checkpoint: Path) -> None:
    file = checkpoint / "trainer/rank0"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ManifestError, match="trainer/rank0 has 1399999 bytes instead of 1400000"):
        verify_files(checkpoint, read_manifest(checkpoint))


def test_flipped_bit_is_detected(checkpoint: Path) -> None:
    file = checkpoint / "trainer/rank0"
    content = bytearray(file.read_bytes())
    content[1_300_000] ^= 1
    file.write_bytes(content)
    with pytest.raises(ManifestError, match="the checksum of trainer/rank0 differs"):
        verify_files(checkpoint, read_manifest(checkpoint))


def test_missing_checkpoint_file_is_detected(checkpoint: Path) -> None:
    (checkpoint / "orchestrator/s").unlink()
    with pytest.raises(ManifestError, match="orchestrator/s is missing"):
        verify_files(checkpoint, read_manifest(checkpoint))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        "{}",
        '{"format_version": 2, "files": [{}]}',
        '{"format_version": 2, "crc32": 1, "files": 3}',
    ],
)
def test_damaged_manifest_is_refused(checkpoint: Path, content: str) -> None:
    (checkpoint / MANIFEST).write_text(content)
    with pytest.raises(ManifestError, match="is damaged"):
        read_manifest(checkpoint)


def test_binary_manifest_is_refused(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_bytes(b"\xff\xfe")
    with pytest.raises(ManifestError, match="is damaged"):
        read_manifest(checkpoint)


def test_newer_manifest_format_is_not_reported_as_damage(checkpoint: Path) -> None:
    document = json.loads((checkpoint / MANIFEST).read_text()) | {"format_version": 3, "new_field": 1}
    (checkpoint / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(ManifestError, match="has format 3, but this version reads 2"):
        read_manifest(checkpoint)


def test_flipped_manifest_bit_is_detected_or_harmless(checkpoint: Path) -> None:
    file = checkpoint / MANIFEST
    whole, written = file.read_bytes(), read_manifest(checkpoint)
    undetected = 0
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        try:
            assert read_manifest(checkpoint) == written, bit
            undetected += 1
        except ManifestError:
            continue
    assert undetected < len(whole) / 10
