"""Failure of each file system call: a reader then finds the old content, the new content or nothing."""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlrun.protocol.files.batch import Batch, Sample, read_batch, write_batch
from rlrun.protocol.files.durable import create_json, new_folder, write_bytes, write_json
from rlrun.protocol.files.failures import RoleError, exit_code_of
from rlrun.protocol.files.volume_faults import FAILING_SECONDS, RefusedError, Volume, trouble_of
from rlrun.runtime import exit_codes

CALLS = ("open", "fsync", "replace", "rename", "link", "mkdir", "unlink", "rmdir", "scandir")
"""Functions behind Python's files, folders and paths."""
OLD, NEW = {"step": 1, "text": "old" * 9}, {"step": 2, "text": "new" * 9}
Seen = dict[str, Any] | None


class Faults:
    """Fault injection: calls number `first` to `last` fail, counted from the call of `arm`."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int) -> None:
        self.calls, self.first, self.last, self.armed = 0, 0, 0, False
        for name in CALLS:
            patch.setattr(os, name, self._wrap(getattr(os, name), number))
        real = io.open

        def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:  # pathlib's
            writes = bool(set(mode) & set("wax"))
            return (self._wrap(real, number) if writes else real)(file, mode, *arguments, **options)

        patch.setattr(io, "open", opened)

    def _wrap(self, real: Callable[..., Any], number: int) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.armed:
                self.calls += 1
                made = {"mkdir": arguments[:1], "link": arguments[1:2]}.get(real.__name__, ())
                if any(os.path.lexists(path) for path in made):  # the kernel checks this before it calls the volume
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(made[0]))
                if self.first <= self.calls <= self.last:
                    raise OSError(number, os.strerror(number))
            return real(*arguments, **options)

        return call

    def arm(self, first: int, last: int) -> None:
        self.calls, self.first, self.last, self.armed = 0, first, last, True


def read_file(path: Path) -> Seen:
    return json.loads(path.read_text()) if path.exists() else None


def write_folder(path: Path, document: dict[str, Any]) -> None:
    with new_folder(path) as folder:
        (folder / "a").write_text(json.dumps(document))
        (folder / "b").write_text(json.dumps(document))


def read_folder(path: Path) -> Seen:
    if not path.exists():
        return None
    first, second = (json.loads((path / name).read_text()) for name in "ab")
    assert first == second, "half of a folder is taken for the whole"
    return dict(first)


def batch_of(step: int) -> Batch:
    columns = {
        "input_ids": np.array([1, 2], np.int32),
        "loss_mask": np.array([False, True]),
        "logprobs": np.array([0, -0.1], np.float32),
        "versions": np.array([-1, 0], np.int32),
        "advantages": np.array([0, 1], np.float32),
    }
    about = {"temperature": 1.0, "environment": "e", "task_id": "t", "group": 0, "rollout": 0, "dispatch_version": 0}
    return Batch(step, 1, (Sample(**columns, **about, reward=1.0),))  # type: ignore[arg-type]


def write_samples(path: Path, document: dict[str, Any]) -> None:
    write_batch(path, batch_of(document["step"]))


def read_samples(path: Path) -> Seen:
    return (OLD if read_batch(path).step == OLD["step"] else NEW) if path.exists() else None


WRITERS: dict[str, tuple[Callable[[Path, Any], None], Callable[[Path], Seen], bool]] = {
    "write_json": (write_json, read_file, True),
    "create_json": (create_json, read_file, False),
    "new_folder": (write_folder, read_folder, True),
    "write_batch": (write_samples, read_samples, True),
}


@pytest.mark.parametrize("lasts", [False, True], ids=["one call", "that call and all later ones"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("writer", WRITERS)
def test_failed_call_leaves_consistent_content_and_retry_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str, number: int, lasts: bool
) -> None:
    write, read, replaces = WRITERS[writer]
    with monkeypatch.context() as patch:
        faults = Faults(patch, number)
        failures = 0
        for call in range(1, 100):
            path = tmp_path / str(call) / "thing"
            faults.armed = False
            if replaces:
                write(path, OLD)
            faults.arm(call, 10**9 if lasts else call)
            failed = False
            try:
                write(path, NEW)
            except OSError as error:
                failed = error.errno == number
            reached = faults.calls
            faults.armed = False
            seen = read(path)
            assert seen in ([OLD, NEW, None] if replaces else [NEW, None]), f"call {call}"
            if not failed:
                assert seen == NEW, f"call {call}: told as written, and it is not"
            failures += failed
            if replaces or seen is None:
                write(path, NEW)
            assert read(path) == NEW
            if replaces:
                assert [p.name for p in path.parent.iterdir()] == ["thing"], f"call {call}: something is left behind"
            if reached < call:
                break
        else:
            raise AssertionError("not every call was reached")
    assert failures >= 4, "the faults hit nothing"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("writer", WRITERS)
def test_repeated_refusals_from_any_call_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str, number: int
) -> None:
    """A failed try may leave files that it cannot remove; the next try meets them and is also refused by the volume."""
    write, read, replaces = WRITERS[writer]
    with monkeypatch.context() as patch:
        faults = Faults(patch, number)
        volume = Volume(tmp_path)
        for call in range(1, 100):
            path = tmp_path / str(call) / "thing"
            faults.armed = False
            if replaces:
                write(path, OLD)
            waited: list[float] = []

            def wait(seconds: float, waited: list[float] = waited) -> None:
                waited.append(seconds)
                faults.armed = len(waited) < 3

            faults.arm(call, 10**9)
            volume.insist("write the thing", lambda path=path: write(path, NEW), wait=wait)  # type: ignore[misc]
            assert read(path) == NEW, f"call {call}"
            if not waited:
                break
        else:
            raise AssertionError("not every call was reached")
    assert call >= 4, "the faults hit nothing"


def test_refused_write_is_reported_until_it_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    volume = Volume(tmp_path, say=said.append)
    with monkeypatch.context() as patch:
        faults = Faults(patch, errno.ENOSPC)
        faults.arm(1, 10**9)

        def wait(seconds: float) -> None:
            told = volume.trouble()
            assert told is not None
            assert told.reason == "StorageFull"
            assert told.text.startswith("the volume is full: ")
            assert "; cannot write the thing since " in told.text
            waited.append(seconds)
            faults.armed = len(waited) < 8

        waited: list[float] = []
        volume.insist("write the thing", lambda: write_bytes(tmp_path / "thing", b"x"), wait=wait)
    assert waited == [0.5, 1, 2, 3, 3, 3, 3, 3], "the run stands still no longer than that once there is space"
    assert (tmp_path / "thing").read_bytes() == b"x"
    assert volume.trouble() is None
    assert len(said) == 2


def test_blocking_trouble_is_reported_before_checkpoint_trouble(tmp_path: Path) -> None:
    now = [0.0]
    volume = Volume(tmp_path, clock=lambda: now[0])

    def refused(number: int, doing: str, blocks: bool) -> None:
        def act() -> None:
            raise OSError(number, os.strerror(number))

        with pytest.raises(RefusedError):
            volume.attempt(doing, act, blocks=blocks)

    def told() -> str:
        trouble = volume.trouble()
        return "" if trouble is None else f"{trouble.reason}: {trouble.text} ({trouble.blocks})"

    refused(errno.EDQUOT, "save a checkpoint", blocks=False)
    assert "StorageFull: the volume's quota is used up; cannot save a checkpoint since" in told()
    assert told().endswith("(False)")
    with volume.using("write the batch"):
        now[0] += 29
        assert "quota" in told()
        now[0] += 1
        assert "StorageSlow: the volume does not answer; cannot write the batch since" in told()
        refused(errno.EROFS, "publish weights", blocks=True)
        assert "StorageReadOnly: the volume is read-only; cannot publish weights since" in told()
        assert told().endswith("(True)")
        volume.accept("publish weights")
        assert "StorageSlow" in told()
    assert "quota" in told()
    volume.accept("save a checkpoint")
    assert told() == ""


def test_volume_check_reports_full_and_read_only_volumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume, real = Volume(tmp_path / "not made yet"), os.statvfs(tmp_path)

    def like(**changes: int) -> None:
        names = [name for name in dir(real) if name.startswith("f_")]
        found = type("Found", (), {name: getattr(real, name) for name in names} | changes)
        monkeypatch.setattr(os, "statvfs", lambda path: found)
        volume.look()

    like(f_bavail=100, f_frsize=4096, f_blocks=1 << 20, f_files=0)
    trouble = volume.trouble()
    assert trouble is not None
    assert trouble.text.startswith("the volume is full: 400 KiB free of 4.0 GiB since ")
    assert not trouble.blocks
    like(f_bavail=1 << 20, f_frsize=4096, f_blocks=1 << 20, f_files=500, f_favail=0)
    trouble = volume.trouble()
    assert trouble is not None
    assert "no inodes are left of 500" in trouble.text
    like(f_flag=os.ST_RDONLY)
    trouble = volume.trouble()
    assert trouble is not None
    assert trouble.reason == "StorageReadOnly"
    like(f_bavail=1 << 20, f_frsize=4096, f_blocks=1 << 20, f_files=0, f_flag=0)
    assert volume.trouble() is None


def test_permission_error_is_not_volume_trouble(tmp_path: Path) -> None:
    volume = Volume(tmp_path)
    with pytest.raises(PermissionError):
        volume.attempt("write", lambda: (_ for _ in ()).throw(PermissionError(errno.EACCES, "no")))
    assert volume.trouble() is None


@pytest.mark.parametrize(
    ("blocks", "number", "ends"), [(True, errno.EIO, True), (False, errno.EIO, False), (True, errno.ENOSPC, False)]
)
def test_long_volume_failure_ends_only_waiting_role(tmp_path: Path, blocks: bool, number: int, ends: bool) -> None:
    now = [0.0]
    volume = Volume(tmp_path, clock=lambda: now[0])

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    for now[0] in (0.0, FAILING_SECONDS - 1):
        with pytest.raises(RefusedError):
            volume.attempt("write", fail, blocks=blocks)
    now[0] = FAILING_SECONDS
    with pytest.raises(RoleError) as caught:
        volume.attempt("write", fail, blocks=blocks)
    assert (not isinstance(caught.value, RefusedError), caught.value.code) == (ends, exit_codes.STORAGE)
    volume.attempt("write", lambda: None, blocks=blocks)
    with pytest.raises(RefusedError):
        volume.attempt("write", fail, blocks=blocks)


def test_storage_trouble_names_reason_and_fix(tmp_path: Path) -> None:
    for number, reason, fix in (
        (errno.EIO, "StorageFailing", "look at the storage and the way to it"),
        (errno.ESTALE, "StorageFailing", "look at the storage and the way to it"),
        (errno.EROFS, "StorageReadOnly", "make it writable"),
        (errno.EDQUOT, "StorageFull", "make space"),
    ):
        trouble = trouble_of(OSError(number, os.strerror(number)), tmp_path)
        assert trouble is not None
        assert (trouble.reason, trouble.remedy) == (reason, fix)


def test_role_ended_by_volume_has_storage_exit_code(tmp_path: Path) -> None:
    """Such a restart does not count, and an unreadable file is not reported as a data error."""

    def behind(cause: OSError, code: int) -> RoleError:
        try:
            raise cause
        except OSError as error:
            try:
                raise RoleError("cannot resume", code) from error
            except RoleError as role:
                return role

    stale = OSError(errno.ESTALE, "Stale file handle", "state.json")
    assert exit_code_of(behind(stale, exit_codes.DATA)) == exit_codes.STORAGE
    assert exit_code_of(stale) == exit_codes.STORAGE
    assert exit_code_of(OSError(errno.ETIMEDOUT, "Connection timed out", "weights")) == exit_codes.STORAGE
    assert exit_code_of(OSError(errno.ETIMEDOUT, "Connection timed out")) == exit_codes.FAILURE, "a socket"
    assert exit_code_of(behind(FileNotFoundError(errno.ENOENT, "no"), exit_codes.DATA)) == exit_codes.DATA
    assert exit_code_of(ValueError("a bug")) == exit_codes.FAILURE


def test_failed_folder_rename_keeps_previous_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "thing"
    write_folder(path, OLD)
    real, calls = os.rename, []

    def second_fails(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(*arguments)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(OSError, match="Input/output error"):
        write_folder(path, NEW)
    assert read_folder(path) == OLD
