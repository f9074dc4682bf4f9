"""Folders with the right owner and permissions before a pod's containers mount them."""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from rlrun.pod.container_settings import Signals, StoppedError
from rlrun.pod.pod_command import main
from rlrun.pod.preparation import VOLUME_POLL_SECONDS, make_folders
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes


class Patience(Signals):
    """Signals that count the pauses and run an action in the second."""

    def __init__(self, second: Callable[[], None]) -> None:
        self.pauses: list[float] = []
        self._second = second

    def sleep(self, seconds: float | None) -> None:
        assert seconds is not None
        self.pauses.append(seconds)
        if len(self.pauses) == 2:
            self._second()


def make_refusal(number: int) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, "refused")

    return refuse


def test_missing_folders_are_private_and_existing_ones_unchanged(tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "file").write_text("x")
    wanted = [tmp_path / "run", tmp_path / "host" / "shared", tmp_path / "host"]
    assert main(["make-folders", *map(str, wanted)]) == 0
    assert main(["make-folders", *map(str, wanted)]) == 0
    assert [stat.S_IMODE(path.stat().st_mode) for path in wanted[:2]] == [0o750, 0o750]
    assert (tmp_path / "host" / "file").read_text() == "x"


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_temporarily_unwritable_volume_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    said: list[str] = []
    mkdir = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", make_refusal(number))
    signals = Patience(lambda: monkeypatch.setattr(Path, "mkdir", mkdir))
    make_folders([tmp_path / "run"], say=said.append, signals=signals)
    assert (tmp_path / "run").is_dir()
    assert signals.pauses == [VOLUME_POLL_SECONDS] * 2
    assert said[0].startswith(f"waiting for the run's volume since 0 s: cannot create {tmp_path / 'run'}: the volume")


def test_missing_permission_fails_at_once_with_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Path, "mkdir", make_refusal(errno.EACCES))
    with pytest.raises(RoleError, match=r"cannot create .*/run as user \d+: refused") as caught:
        make_folders([tmp_path / "run"], say=print, signals=Patience(lambda: None))
    assert caught.value.code == exit_codes.STORAGE
    assert main(["make-folders", str(tmp_path / "run")]) == exit_codes.STORAGE
    assert "rlrun-pod: cannot create" in capsys.readouterr().err


def test_signal_ends_wait_for_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "mkdir", make_refusal(errno.EROFS))

    def stop() -> None:
        raise StoppedError(15)

    with pytest.raises(StoppedError):
        make_folders([tmp_path / "run"], say=print, signals=Patience(stop))
