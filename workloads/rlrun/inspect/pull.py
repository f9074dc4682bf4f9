"""Copies of a run's parts from the volume of a cluster: selection of the folder, and transfer as a tar stream."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from rlrun.inspect.source import NotFoundError
from rlrun.protocol.files.paths import COMPLETE, TMP_SUFFIX, RunPaths

Part = Literal["model", "checkpoint", "traces", "metrics", "logs", "run"]
PARTS: tuple[Part, ...] = ("model", "checkpoint", "traces", "metrics", "logs", "run")
MANIFEST = "manifest.json"
Names = Callable[[PurePosixPath], list[str]]
"""Function that returns the names in a folder of the run."""


def place_of(part: Part, step: int | None, names: Names) -> PurePosixPath:
    """Return the path of a part in the run's folder; for a model or a checkpoint the newest complete one, or the one of a step.

    Raises:
        NotFoundError: the part does not exist; the message lists the existing steps.
    """
    paths = RunPaths(Path())
    match part:
        case "model":
            return _newest_folder(PurePosixPath(paths.weights.name), "v", COMPLETE, step, names)
        case "checkpoint":
            return _newest_folder(PurePosixPath(paths.checkpoints.name), "step_", MANIFEST, step, names)
    if step is not None:
        raise NotFoundError(f"--step is for a model or a checkpoint, not for {part}")
    return PurePosixPath({"traces": paths.traces.name, "metrics": paths.metrics.name, "run": ""}.get(part, "logs"))


def _newest_folder(folder: PurePosixPath, prefix: str, mark: str, step: int | None, names: Names) -> PurePosixPath:
    """Return the last complete folder; names sort by step and attempt."""
    there = [
        name
        for name in sorted(names(folder), reverse=True)
        if name.startswith(prefix) and not name.endswith(TMP_SUFFIX)
    ]
    wanted = [name for name in there if step is None or name.startswith(f"{prefix}{step:08d}.")]
    found = next((name for name in wanted if mark in names(folder / name)), None)
    if found is None:
        steps = sorted({name.removeprefix(prefix).partition(".")[0].lstrip("0") or "0" for name in there}, key=int)
        known = f"existing steps: {', '.join(steps)}" if steps else "there are no steps yet"
        raise NotFoundError(f"no complete folder in {folder}{'' if step is None else f' of step {step}'}; {known}")
    return folder / found


@dataclass
class Unpacked:
    """Result of unpacking a stream."""

    files: int = 0
    left_out: list[str] = field(default_factory=list)
    """Skipped symbolic links, pipes and devices; their targets are not in the stream."""


def unpack_part(stream: IO[bytes], part: PurePosixPath, target: Path) -> Unpacked:
    """Unpack regular files and folders of a tar stream to a new path.

    Nothing is written outside of `target`: names are checked by their parts, each folder is opened relative to its parent without following
    links, and no link is created. `tarfile`'s filter allowed escapes through chains of links before Python 3.11.13, 3.12.11 and 3.13.4.

    Raises:
        tarfile.TarError: the stream is damaged, or contains an escaping path or a duplicate name.
    """
    temporary = target.with_name(target.name + TMP_SUFFIX)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    unpacked = Unpacked()
    root = os.open(temporary, _FOLDER)
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for entry in archive:
                _unpack_entry(archive, entry, root, unpacked)
        (temporary / part).rename(target)
    finally:
        os.close(root)
        shutil.rmtree(temporary, ignore_errors=True)
    return unpacked


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def _unpack_entry(archive: tarfile.TarFile, entry: tarfile.TarInfo, root: int, unpacked: Unpacked) -> None:
    parts = _path_parts(entry.name)
    if entry.isdir():
        with _open_folder(root, parts):
            return
    content = archive.extractfile(entry) if entry.isreg() else None
    if not parts or (content is None and not entry.islnk()):
        unpacked.left_out.append(entry.name)
        return
    with _open_folder(root, parts[:-1]) as folder:
        try:
            if content is None:  # a hard link to a file that was unpacked before
                *above, name = _path_parts(entry.linkname)
                with _open_folder(root, above) as other:
                    os.link(name, parts[-1], src_dir_fd=other, dst_dir_fd=folder, follow_symlinks=False)
            else:
                with os.fdopen(os.open(parts[-1], _NEW_FILE, 0o644, dir_fd=folder), "wb") as file:
                    shutil.copyfileobj(content, file)
        except (FileExistsError, FileNotFoundError) as error:
            raise tarfile.TarError(f"{entry.name}: {error.strerror}") from None
    unpacked.files += 1


def _path_parts(name: str) -> list[str]:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise tarfile.TarError(f"{name!r} leads out of its folder")
    return list(path.parts)


@contextmanager
def _open_folder(root: int, parts: Sequence[str]) -> Iterator[int]:
    """Open a folder below another one, and create missing folders."""
    folder = os.dup(root)
    try:
        for name in parts:
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=folder)
            try:
                below = os.open(name, _FOLDER, dir_fd=folder)
            except OSError as error:
                raise tarfile.TarError(f"{'/'.join(parts)}: {error.strerror}") from None
            os.close(folder)
            folder = below
        yield folder
    finally:
        os.close(folder)
