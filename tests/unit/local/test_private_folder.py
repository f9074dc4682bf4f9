"""Access mode of the folder of a local run."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from rlrun.local.preflight import check_folder


@pytest.mark.parametrize("mode", [None, 0o755])
def test_new_run_folder_is_private_and_existing_keeps_mode(mode: int | None, tmp_path: Path) -> None:
    root = tmp_path / "runs" / "demo"
    if mode is not None:
        root.mkdir(parents=True)
        root.chmod(mode)
    check_folder(root, resume=False, engines=False, take_over=False)
    assert stat.S_IMODE(root.stat().st_mode) == (mode or 0o700)
