"""Mirroring of complete artifacts to an in-memory fsspec file system."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from rlrun.config.models.checkpoint import MirrorConfig
from rlrun.mirror import copy_process
from rlrun.mirror.copy_process import Mirror
from rlrun.protocol.files.checkpoint_manifest import (
    MANIFEST,
    Manifest,
    describe_part,
    read_manifest,
    verify_files,
    write_manifest,
)
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime.processes import Ending

URL = "memory://bucket/runs"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


@pytest.fixture(autouse=True)
def store() -> Iterator[Any]:
    """Return the empty object storage."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


def checkpoint(paths: RunPaths, step: int, *, complete: bool = True) -> Path:
    folder = paths.checkpoint(step, 1)
    for name in ("trainer/shard_0", "trainer/shard_1", "orchestrator/state.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(f"{step} {name}".encode() * 50)
    if complete:
        files = (*describe_part(folder, folder / "trainer"), *describe_part(folder, folder / "orchestrator"))
        write_manifest(folder, Manifest(step, 1, 2, "hash", files, created_at=0.0))
    return folder


def export(paths: RunPaths, step: int) -> Path:
    folder = paths.export(step, 1)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def copied(store: Any) -> set[str]:
    return {path.removeprefix("/bucket/runs/run/") for path in store.find("/bucket/runs")}


def mirror(paths: RunPaths, **options: bool) -> Mirror:
    return Mirror(paths, MirrorConfig(url=URL, **options), "run")


def test_complete_artifacts_are_copied_with_marker_last(
    paths: RunPaths, store: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = checkpoint(paths, 2)
    checkpoint(paths, 4, complete=False)
    export(paths, 2)
    paths.attempts.mkdir()
    paths.attempt_file(1).write_text("{}")
    paths.export(3, 1).with_suffix(".a0001.tmp").mkdir()
    paths.traces.mkdir()
    (paths.traces / "step_00000002.jsonl").write_text("{}\n")
    order: list[str] = []
    pipe, put = store.pipe_file, store.put_file
    monkeypatch.setattr(type(store), "put_file", lambda s, a, b, **k: (order.append(b), put(a, b, **k))[1])
    monkeypatch.setattr(type(store), "pipe_file", lambda s, a, b, **k: (order.append(a), pipe(a, b, **k))[1])
    copies = mirror(paths)
    assert copies.copy_new()
    assert copied(store) == {
        *(f"checkpoints/step_00000002.a0001/{name}" for name in ("trainer/shard_0", "trainer/shard_1")),
        "checkpoints/step_00000002.a0001/orchestrator/state.json",
        "checkpoints/step_00000002.a0001/manifest.json",
        "exports/step_00000002.a0001/model.safetensors",
        "exports/step_00000002.a0001/COMPLETE",
        "attempts/0001.json",
    }
    assert [path.rpartition("/")[2] for path in order].index(MANIFEST) == 4, "after its three files"
    back = tmp_path / "back"
    store.get(f"/bucket/runs/run/checkpoints/{whole.name}", str(back), recursive=True)
    verify_files(back, read_manifest(back))
    order.clear()
    assert copies.copy_new()
    assert mirror(paths).copy_new(), "another process"
    assert order == [], "what is there is not copied again"
    assert mirror(paths, checkpoints=False, exports=False, traces=True).copy_new()
    assert "traces/step_00000002.jsonl" in copied(store)


def test_interrupted_copy_continues_with_missing_files(
    paths: RunPaths, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(paths, 2)
    put = store.put_file

    def broken(self: Any, local: str, target: str, **options: Any) -> None:
        if target.endswith("shard_1"):
            raise OSError("the connection was reset")
        put(local, target, **options)

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "put_file", broken)
        with pytest.raises(OSError, match="reset"):
            mirror(paths).copy_new()
    assert not any(path.endswith(MANIFEST) for path in copied(store)), "nobody takes a part for the whole"
    again: list[str] = []
    monkeypatch.setattr(type(store), "put_file", lambda s, a, b, **k: (again.append(b), put(a, b, **k))[1])
    assert mirror(paths).copy_new()
    names = [path.rpartition("/")[2] for path in again]
    assert "shard_1" in names
    assert "shard_0" not in names, "it had come already"
    assert any(path.endswith(MANIFEST) for path in copied(store))


def test_artifact_deleted_during_copy_is_not_mirrored(
    paths: RunPaths, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(paths, 2)
    checkpoint(paths, 4)
    put = store.put_file

    def deleted(self: Any, local: str, target: str, **options: Any) -> None:
        put(local, target, **options)
        if folder.name in target:
            shutil.rmtree(folder, ignore_errors=True)

    monkeypatch.setattr(type(store), "put_file", deleted)
    assert mirror(paths).copy_new()
    assert {path.split("/")[1] for path in copied(store)} == {"step_00000004.a0001"}


def test_refused_copy_is_retried_with_backoff(paths: RunPaths, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(paths, 2)
    put = store.put_file
    waits: list[float] = []

    class Clock(Ending):
        def wait(self, seconds: float | None = None) -> bool:
            waits.append(seconds or 0.0)
            if len(waits) == 7:
                monkeypatch.setattr(type(store), "put_file", lambda s, a, b, **k: put(a, b, **k))
            if len(waits) == 8:
                self.set()
            return self.is_set()

    def refuses(self: Any, *args: Any, **options: Any) -> None:
        raise PermissionError("Forbidden")

    over = Clock()
    monkeypatch.setattr(type(store), "put_file", refuses)
    assert mirror(paths).copy_until(over)
    assert waits == [5.0, 10.0, 20.0, 40.0, 80.0, 120.0, 120.0, copy_process.LOOK_SECONDS]


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("s3://bucket/x", r"needs the package s3fs, which is not installed; .* install .*\[s3\]"),
        ("nowhere://bucket/x", "Protocol not known: nowhere"),
    ],
)
def test_unusable_address_is_refused_with_fix(url: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if url.startswith("s3"):

        def missing(*args: object, **options: object) -> None:
            raise ImportError("Install s3fs to access S3", name="s3fs")

        monkeypatch.setattr(copy_process.fsspec.core, "url_to_fs", missing)
    with pytest.raises(copy_process.UnusableError, match=error):
        copy_process.Remote(url)


@pytest.mark.parametrize("url", ["bucket/x", "s3://key:secret@bucket/x", "s3://b/x?token=1", "S3://b"])
def test_address_with_credentials_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="without credentials"):
        MirrorConfig(url=url)
