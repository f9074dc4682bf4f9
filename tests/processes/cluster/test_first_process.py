"""The first process of a machine: what it meets at any moment must not end it, for all of the machine would end with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.native import init


def daemons(folder: Path) -> init.Daemons:
    control, logs = folder / "control", folder / "logs"
    control.mkdir()
    logs.mkdir()
    sleeper = {"name": "sleeper", "argv": ["sleep", "60"], "after": "", "environment": {}}
    return init.Daemons({"daemons": [sleeper], "control": str(control), "logs": str(logs)})


def test_a_volume_that_goes_while_one_looks_is_passed_over(tmp_path: Path) -> None:
    # A link to nothing is what a folder looks like that was deleted between the listing and the look.
    (tmp_path / "a-gone").symlink_to(tmp_path / "nowhere")
    new = tmp_path / "b-new"
    new.mkdir()
    new.chmod(0o750)
    init.open_new_volumes(tmp_path)
    assert new.stat().st_mode & 0o7777 == 0o1777


def test_an_order_that_is_withdrawn_while_one_looks_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = daemons(tmp_path)
    order = tmp_path / "control" / "stopped"
    order.write_text("sleeper\n")
    monkeypatch.setattr(Path, "exists", lambda _: True)  # as it was a moment ago
    order.unlink()
    supervisor.tick()
    assert (tmp_path / "control" / "sleeper.pid").is_file()
    order.write_text("sleeper\n")
    supervisor.tick()  # kills it
    while (tmp_path / "control" / "sleeper.pid").is_file():
        supervisor.tick()  # reaps it
