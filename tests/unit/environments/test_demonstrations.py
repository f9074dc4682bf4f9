"""The file of demonstrations, which user code writes and the model container reads."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlrun.environments.demonstrations import (
    MAX_BYTES,
    collect_demonstrations,
    read_demonstrations,
    write_demonstrations,
)

CONVERSATIONS = [[{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]]


def test_demonstrations_come_from_the_last_tasks(tmp_path: Path) -> None:
    found = collect_demonstrations("reverse-text", {"length": 3}, 5)
    assert len(found) == 5
    assert all(m[-1]["role"] == "assistant" for m in found)
    assert found[:2] == collect_demonstrations("reverse-text", {"length": 3}, 2)
    write_demonstrations(tmp_path / "file", found)
    assert read_demonstrations(tmp_path / "file") == found


def test_environment_without_demonstrations_is_refused_by_name(tmp_path: Path) -> None:
    rows = ({"prompt": f"a{number}", "reward_model": {"ground_truth": "b"}} for number in range(200))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"warmupEnvironment: dataset has no demonstrations"):
        collect_demonstrations("dataset", {"path": str(tmp_path / "rows.jsonl"), "reward": "exact"}, 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"conversations": 3}',
        '{"conversations": [3]}',
        '{"conversations": [[{"content": "x"}]]}',
        '{"conversations": [[{"role": "user", "content": 5}]]}',
        "[" * 100_000,
    ],
)
def test_file_with_something_else_is_refused_without_its_content(tmp_path: Path, text: str) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    with pytest.raises(ValueError, match="contain"):
        read_demonstrations(file)
    file.write_text(json.dumps({"conversations": [["secret-of-the-file"]]}))
    with pytest.raises(ValueError, match="contain") as caught:
        read_demonstrations(file)
    assert "secret-of-the-file" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_unsafe_demonstration_paths_are_refused_immediately(tmp_path: Path) -> None:
    """A link could point to the run's configuration, which the writer cannot read; a pipe would block the reader."""
    write_demonstrations(tmp_path / "secret", CONVERSATIONS)
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    for name in ("link", "pipe", "folder", "huge", "missing"):
        with pytest.raises(ValueError, match="demonstrations"):
            read_demonstrations(tmp_path / name)
