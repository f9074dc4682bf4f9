"""Advice for "Permission denied" in an environment that is restricted to its private folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlrun.environments.process.containment import enclosure
from rlrun.environments.process.containment.enclosure import refused_hint

WRITES = "can write only in its home folder and TMPDIR"


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Paths that owner and mode deny. The tests may run as root, to which file modes do not apply."""
    paths: set[Path] = set()
    access = os.access
    monkeypatch.setattr(enclosure.os, "access", lambda path, mode: Path(path) not in paths and access(path, mode))
    return paths


@pytest.mark.parametrize(
    "message",
    [
        "PermissionError: [Errno 13] Permission denied: '{}'",
        "sh: 1: cannot create {}: Permission denied",
        "mkdir: cannot create directory ‘{}’: Permission denied",
    ],
)
@pytest.mark.parametrize("name", ["there.txt", "new.txt", "new/folder/x.txt"])
def test_refused_write_names_writable_locations(message: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "there.txt").write_text("x")
    assert WRITES in refused_hint(message.format(tmp_path / name))


def test_refused_read_names_file_and_its_mode(tmp_path: Path, refused: set[Path]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("{}")
    refused.add(file)
    hint = refused_hint(f"PermissionError: [Errno 13] Permission denied: '{file}'")
    assert f"owner and mode of {file} deny access to user {os.getuid()}" in hint
    assert WRITES not in hint


def test_inaccessible_folder_is_named(tmp_path: Path, refused: set[Path]) -> None:
    (tmp_path / "data").mkdir()
    refused.add(tmp_path / "data")
    hint = refused_hint(f"PermissionError: [Errno 13] Permission denied: '{tmp_path}/data/rows.jsonl'")
    assert f"owner and mode of {tmp_path}/data deny access" in hint


def test_refused_credential_is_not_reported_as_refused_write(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("x")
    hint = refused_hint(f"[Errno 13] Permission denied: '{tmp_path}/token'", closed=[str(tmp_path)])
    assert "cannot read the pod's credentials" in hint
    assert WRITES not in hint


@pytest.mark.parametrize("message", ["Permission denied (publickey)", "the server answered: Permission denied", "boom"])
def test_permission_message_without_path_gets_no_advice(message: str) -> None:
    assert refused_hint(message) == ""
