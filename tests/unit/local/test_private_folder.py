"""The folder of a run on this machine is closed to other users."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from rlrun.local.preflight import check_folder


@pytest.mark.parametrize("mode", [None, 0o755])
def test_new_folder_is_private_and_an_old_one_keeps_its_mode(mode: int | None, tmp_path: Path) -> None:
    root = tmp_path / "runs" / "demo"
    if mode is not None:
        root.mkdir(parents=True)
        root.chmod(mode)
    check_folder(root, resume=False, engines=False, take_over=False)
    assert stat.S_IMODE(root.stat().st_mode) == (mode or 0o700)
