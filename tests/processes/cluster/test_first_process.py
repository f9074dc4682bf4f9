"""First process of a machine: no race may end it, because the whole machine would end with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.native import init


def make_daemons(folder: Path) -> init.Daemons:
    control, logs = folder / "control", folder / "logs"
    control.mkdir()
    logs.mkdir()
    sleeper = {"name": "sleeper", "argv": ["sleep", "60"], "after": "", "environment": {}}
    return init.Daemons({"daemons": [sleeper], "control": str(control), "logs": str(logs)})


def test_volume_deleted_during_scan_is_skipped(tmp_path: Path) -> None:
    # A broken link looks like a folder that was deleted between the listing and the check.
    (tmp_path / "a-gone").symlink_to(tmp_path / "nowhere")
    new = tmp_path / "b-new"
    new.mkdir()
    new.chmod(0o750)
    init.open_new_volumes(tmp_path)
    assert new.stat().st_mode & 0o7777 == 0o1777


def test_order_withdrawn_during_tick_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = make_daemons(tmp_path)
    order = tmp_path / "control" / "stopped"
    order.write_text("sleeper\n")
    monkeypatch.setattr(Path, "exists", lambda _: True)  # The file existed at the first check.
    order.unlink()
    supervisor.tick()
    assert (tmp_path / "control" / "sleeper.pid").is_file()
    order.write_text("sleeper\n")
    supervisor.tick()  # This tick kills the process.
    while (tmp_path / "control" / "sleeper.pid").is_file():
        supervisor.tick()  # This tick reaps the process.
