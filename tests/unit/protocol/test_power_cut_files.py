"""Files, batches, attempts and journals after a power cut, on a simulated disk that loses unflushed data."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlrun.protocol.files.attempts import first_attempt, write_attempt
from rlrun.protocol.files.checkpoint_manifest import MANIFEST
from rlrun.protocol.files.durable import create_json, new_folder, put_in_place, write_bytes, write_json
from rlrun.protocol.files.paths import COMPLETE, RunPaths
from tests.power_cut import Disk


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    (tmp_path / "run").mkdir()
    return Disk(tmp_path / "run", monkeypatch)


def test_files_in_folders_that_were_not_there_are_kept(disk: Disk) -> None:
    write_bytes(disk.root / "a" / "b" / "file", b"content")
    create_json(disk.root / "c" / "d" / "file.json", {"n": 1})
    with new_folder(disk.root / "e" / "f" / "folder") as folder:
        (folder / "file").write_text("content")
    assert disk.promised == ["file", "file.json", "folder"]
    assert not disk.broken
    for path in ("a/b/file", "c/d/file.json", "e/f/folder"):
        assert disk.keeps(disk.root / path), path


def test_replaced_file_survives_power_cut(disk: Disk) -> None:
    for content in (b"one", b"two"):
        write_bytes(disk.root / "file", content)
        assert disk.keeps(disk.root / "file")
    assert not disk.broken


def test_attempt_file_survives_power_cut(disk: Disk) -> None:
    paths = RunPaths(disk.root)
    write_attempt(paths, first_attempt(world_size=1, config_hash="h"))
    assert not disk.broken
    assert disk.keeps(paths.attempt_file(1))


def test_simulated_disk_loses_unflushed_data(disk: Disk) -> None:
    version = disk.root / "version"
    version.mkdir()
    (version / "config.json").write_text("{}")
    (version / COMPLETE).touch()
    assert disk.broken == [f"{COMPLETE} before config.json", f"{COMPLETE} before the name config.json"]
    assert not disk.keeps(version)
    disk.broken.clear()
    (disk.root / "new.tmp").write_text("x")
    (disk.root / "new.tmp").rename(disk.root / "new")
    assert disk.broken == ["new before new.tmp"]
    disk.broken.clear()
    (disk.root / "other.tmp").mkdir()
    (disk.root / "other.tmp" / "file").write_text("x")
    put_in_place(disk.root / "other.tmp", disk.root / "other")
    assert disk.broken == ["other before file", "other before the name file"]
    disk.broken.clear()
    write_json(version / MANIFEST, {})
    assert f"{MANIFEST} before config.json" in disk.broken
    write_bytes(disk.root / "kept", b"1")
    with (disk.root / "kept").open("ab") as file:
        file.write(b"2")
    assert not disk.keeps(disk.root / "kept")
