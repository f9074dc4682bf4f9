"""Durable writes: after a crash, a reader finds the old or the new content."""

from __future__ import annotations

import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlrun.protocol.files.durable import create_json, make_private_folder, new_folder, write_bytes, write_json


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Killed(BaseException):
    """Simulated end of the process."""


@pytest.fixture
def dies(monkeypatch: pytest.MonkeyPatch) -> Any:
    def at(owner: Any, name: str, error: BaseException) -> None:
        def raise_(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(owner, name, raise_)

    return at


def test_content_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.json"
    write_json(path, {"b": 1, "a": 2})
    write_json(path, {"b": 3})
    assert path.read_text() == '{\n "b": 3\n}\n'
    assert names(path.parent) == ["a.json"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_crash_before_rename_keeps_old_content(tmp_path: Path, dies: Any, step: str) -> None:
    path = tmp_path / "a"
    write_bytes(path, b"old")
    dies(os if step == "fsync" else Path, step, Killed())
    with pytest.raises(Killed):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"


def test_full_disk_keeps_old_content_without_leftovers(tmp_path: Path, dies: Any) -> None:
    path = tmp_path / "a"
    write_bytes(path, b"old")
    dies(os, "fsync", OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        write_bytes(path, b"new")
    with pytest.raises(OSError, match="No space left"):
        create_json(tmp_path / "b", {})
    assert names(tmp_path) == ["a"]
    assert path.read_bytes() == b"old"


def test_content_is_flushed_before_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def spy_fsync(descriptor: int) -> None:
        done.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def spy_replace(self: Path, target: Path) -> Path:
        done.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(Path, "replace", spy_replace)
    write_bytes(tmp_path / "a", b"x")
    assert done == ["file", "rename", "directory"]


def test_concurrent_creators_produce_one_complete_file(tmp_path: Path) -> None:
    path = tmp_path / "0001.json"

    def create(number: int) -> bool:
        try:
            create_json(path, {"who": number, "padding": "x" * 10_000})
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:  # all with one process id, as in containers
        won = list(pool.map(create, range(64)))
    assert won.count(True) == 1
    assert f'"who": {won.index(True)}' in path.read_text()
    assert names(tmp_path) == ["0001.json"]


def test_new_folder_appears_only_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "v1"

    def write_half() -> None:
        with new_folder(path) as folder:
            (folder / "a").write_text("half")
            assert not path.exists()
            raise Killed

    with pytest.raises(Killed):
        write_half()
    assert names(tmp_path) == []
    with new_folder(path) as folder:
        (folder / "a").write_text("whole")
    assert names(tmp_path) == ["v1"]


def test_leftovers_of_killed_writer_are_removed(tmp_path: Path) -> None:
    (tmp_path / "v1.tmp").mkdir()
    (tmp_path / "v1.tmp" / "left").touch()
    with new_folder(tmp_path / "v1") as folder:
        (folder / "a").touch()
    assert names(tmp_path / "v1") == ["a"]


def test_failed_folder_write_keeps_previous_folder(tmp_path: Path, dies: Any) -> None:
    with new_folder(tmp_path / "v1") as folder:
        (folder / "a").write_text("old")
    dies(os, "fsync", OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match="No space left"), new_folder(tmp_path / "v1") as folder:
        (folder / "a").write_text("new")
    assert (tmp_path / "v1" / "a").read_text() == "old"


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_private_folder_has_mode_700_under_any_umask(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        assert make_private_folder(tmp_path / "runs" / "demo")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "runs" / "demo").stat().st_mode) == 0o700
    assert make_private_folder(tmp_path / "runs" / "demo")


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701])
def test_open_folder_of_before_is_reported_and_kept(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    folder.mkdir()
    folder.chmod(mode)
    assert not make_private_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == mode
