"""Copies of local files onto a claim of a cluster: the files, the pod, and the commands that make them visible at once."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from rlrun.inspect.kubectl import Api, ask_json
from rlrun.inspect.source import NotFoundError
from rlrun.runtime.json_types import Json

MARK = ".rlrun-complete"
"""Last entry of a stream, which is missing if the archive was truncated between two files."""
_BLOCK = 1 << 20
_USER = 1000
"""User and group of the roles' pods (`rlrun_operator.render.security`)."""
_HELPER_SECONDS = 6 * 3600
HELPER_MOUNT = "/claim"

SCRIPT = r"""
set -eu
root=$(cd "$1" && pwd -P); folder=$2; token=$3; force=$4; shift 4
fail() { echo "$1" >&2; exit 1; }
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
