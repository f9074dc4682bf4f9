"""Copies between this machine and a claim of a cluster, as tar streams.

From the claim: the folder of a run's part, and the unpacking of its stream. To the claim: the files, the pod that receives them, and the
commands that make them visible at once.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from rlrun.inspect.kubectl import Api, ask_json
from rlrun.inspect.source import NotFoundError
from rlrun.protocol.files.paths import COMPLETE, TMP_SUFFIX, RunPaths
from rlrun.runtime.json_types import Json

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


MARK = ".rlrun-complete"
"""Last entry of a stream, which is missing if the archive was truncated between two files."""
_BLOCK = 1 << 20
_USER = 1000
"""User and group of the roles' pods (`rlrun_operator.render.container_parts`)."""
_HELPER_SECONDS = 6 * 3600
HELPER_MOUNT = "/claim"

SCRIPT = r"""
set -eu
root=$(cd "$1" && pwd -P); folder=$2; token=$3; force=$4; shift 4
fail() { echo "${1#"$root"/}" >&2; exit 1; }  # paths of the claim: the mount is that of a pod unknown to the user
place=$root
IFS=/
for part in $folder; do
  place=$place/$part
  if [ -L "$place" ]; then fail "$place is a link; name another folder with --to"; fi
  [ -d "$place" ] || mkdir "$place"
done
unset IFS
for name in "$@"; do
  if [ -d "$place/$name" ]; then fail "$place/$name is a folder that exists; delete it, or name another folder with --to"; fi
  [ -e "$place/$name" ] || [ -L "$place/$name" ] || continue
  [ "$force" = yes ] || fail "$place/$name exists; add --force to replace it"
done
new=$place/.rlrun-put-$token
trap 'rm -rf "$new"' EXIT
mkdir "$new"
tar -C "$new" -xof -
[ -f "$new/@MARK@" ] || fail "the received archive is incomplete"
for name in "$@"; do mv "$new/$name" "$place/$name"; done
""".replace("@MARK@", MARK)
"""Script for `sh -c` in a container that mounts the claim: MOUNT FOLDER TOKEN FORCE NAME..., with the archive on standard input."""


@dataclass(frozen=True)
class Mount:
    """Mount of a claim in a running pod."""

    pod: str
    container: str
    path: str


@dataclass(frozen=True)
class Entry:
    """File or folder of an archive."""

    name: str
    """Path in the archive."""
    path: Path
    size: int
    is_folder: bool


def entries_of(sources: Sequence[Path]) -> list[Entry]:
    """Return the files and folders to send, in order.

    Args:
        sources: files and folders; the copy on the claim keeps the name.

    Raises:
        NotFoundError: a source is missing, is neither a file nor a folder, or has an invalid or duplicate name.
        OSError: a source cannot be read.
    """
    found: list[Entry] = []
    names: dict[str, Path] = {}
    for source in sources:
        name = source.absolute().name if source.name not in ("", "..") else source.resolve().name
        if not name or name.startswith(".rlrun-") or not name.isprintable():
            raise NotFoundError(f"FILE: the name of {source} is not allowed on the claim; rename it")
        if name in names:
            raise NotFoundError(
                f"FILE: {names[name]} and {source} have the same name; copy them into two folders (--to)"
            )
        names[name] = source
        found += _list_entries(source, name)
    return found


def _list_entries(path: Path, name: str) -> Iterator[Entry]:
    try:
        status = (
            path.stat()
        )  # a link to a file is sent as a file, because model folders of the Hugging Face cache consist of links
    except FileNotFoundError:
        raise NotFoundError(f"FILE: there is no file {path}") from None
    if stat.S_ISREG(status.st_mode):
        yield Entry(name, path, status.st_size, is_folder=False)
    elif stat.S_ISDIR(status.st_mode):
        yield Entry(name, path, 0, is_folder=True)
        for one in sorted(os.scandir(path), key=lambda entry: entry.name):
            if one.is_symlink() and one.is_dir():
                raise NotFoundError(f"FILE: {one.path} is a link to a folder and is not followed; also name its target")
            yield from _list_entries(Path(one.path), f"{name}/{one.name}")
    else:
        raise NotFoundError(f"FILE: {path} is neither a file nor a folder")


def folder_of(text: str) -> PurePosixPath:
    """Return the folder on a claim.

    Raises:
        NotFoundError: the path is outside of the claim.
    """
    path = PurePosixPath(text)
    if not text.isprintable() or path.is_absolute() or ".." in path.parts or not path.parts:
        raise NotFoundError(f"--to: got {text!r}, expected a folder below the root of the claim, such as data/maths")
    return path


def write_archive(entries: Sequence[Entry], out: IO[bytes], sent: Callable[[int], None]) -> None:
    """Write entries as a tar stream; if a file shrinks during the copy, the stream fails.

    Args:
        entries: files and folders.
        out: target of the stream.
        sent: callback with the number of bytes of each chunk.
    """
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            info.mtime = int(entry.path.stat().st_mtime)
            if entry.is_folder:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(info)
                continue
            info.size, info.mode = entry.size, 0o644
            with entry.path.open("rb") as file:
                archive.addfile(info, _Counted(file, sent))
        archive.addfile(tarfile.TarInfo(MARK))


class _Counted:
    """File that reports the number of bytes of each read."""

    def __init__(self, file: IO[bytes], sent: Callable[[int], None]) -> None:
        self._file, self._sent = file, sent

    def read(self, size: int = _BLOCK) -> bytes:
        content = self._file.read(size)
        self._sent(len(content))
        return content


def mount_of(pods: Sequence[Json], claim: str) -> Mount | None:
    """Return a running container that mounts a claim for writing, or None."""
    for pod in pods:
        spec = pod.get("spec") or {}
        volumes = {
            volume.get("name")
            for volume in spec.get("volumes") or ()
            if (volume.get("persistentVolumeClaim") or {}).get("claimName") == claim
            and not volume["persistentVolumeClaim"].get("readOnly")
        }
        running = {one["name"] for one in (pod.get("status") or {}).get("containerStatuses") or () if _is_running(one)}
        if pod["metadata"].get("deletionTimestamp"):
            continue
        for container in spec.get("containers") or ():
            for mount in container.get("volumeMounts") or ():
                whole = not mount.get("subPath") and not mount.get("readOnly")
                if mount.get("name") in volumes and whole and container["name"] in running:
                    return Mount(pod["metadata"]["name"], container["name"], mount["mountPath"])
    return None


def _is_running(status: Mapping[str, object]) -> bool:
    state = status.get("state")
    return isinstance(state, Mapping) and "running" in state


def helper_pod(name: str, claim: str, image: str) -> Json:
    """Return a pod that mounts a claim and waits, for the restricted Pod Security Standard."""
    container = {
        "name": "put",
        "image": image,
        "command": ["sh", "-c", f"sleep {_HELPER_SECONDS}"],
        "volumeMounts": [{"name": "claim", "mountPath": HELPER_MOUNT}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    identity = {"runAsNonRoot": True, "runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER}
    spec = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": _HELPER_SECONDS,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
        "securityContext": {
            **identity, "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"}
        },
        "containers": [container],
        "volumes": [{"name": "claim", "persistentVolumeClaim": {"claimName": claim}}],
    }  # fmt: skip
    labels = {"app.kubernetes.io/name": "rlrun-put"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


def pods_of_namespace(api: Api) -> list[Json]:
    """Return all pods of the namespace."""
    return list(ask_json(api, ["get", "pods"]).get("items") or ())
