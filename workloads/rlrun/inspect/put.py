"""Copies of local files onto a claim of a cluster: what is sent, through which pod, and the commands that make it visible at once."""

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
"""Last entry of a stream: an archive that was cut off between two files has none."""
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
[ -f "$new/@MARK@" ] || fail "the stream did not come whole"
for name in "$@"; do mv "$new/$name" "$place/$name"; done
""".replace("@MARK@", MARK)
"""Run by `sh -c` where the claim is mounted: MOUNT FOLDER TOKEN FORCE NAME..., with the archive on standard input."""


@dataclass(frozen=True)
class Mount:
    """Place of a claim in a pod that runs."""

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
    """Files and folders to send, in order.

    Args:
        sources: files and folders; each gets its own name on the claim.

    Raises:
        NotFoundError: one is missing, is neither a file nor a folder, or has a name that cannot be used.
        OSError: one cannot be read.
    """
    found: list[Entry] = []
    names: dict[str, Path] = {}
    for source in sources:
        name = source.absolute().name if source.name not in ("", "..") else source.resolve().name
        if not name or name.startswith(".rlrun-") or not name.isprintable():
            raise NotFoundError(f"FILE: {source} has no name that can be used on the claim; copy it under another name")
        if name in names:
            raise NotFoundError(
                f"FILE: {names[name]} and {source} have the same name; put them into two folders (--to)"
            )
        names[name] = source
        found += _list_entries(source, name)
    return found


def _list_entries(path: Path, name: str) -> Iterator[Entry]:
    try:
        status = path.stat()  # a link to a file is sent as the file: folders of models are made of them
    except FileNotFoundError:
        raise NotFoundError(f"FILE: there is no file {path}") from None
    if stat.S_ISREG(status.st_mode):
        yield Entry(name, path, status.st_size, is_folder=False)
    elif stat.S_ISDIR(status.st_mode):
        yield Entry(name, path, 0, is_folder=True)
        for one in sorted(os.scandir(path), key=lambda entry: entry.name):
            if one.is_symlink() and one.is_dir():
                raise NotFoundError(
                    f"FILE: {one.path} is a link to a folder, which is not followed; name that folder too"
                )
            yield from _list_entries(Path(one.path), f"{name}/{one.name}")
    else:
        raise NotFoundError(f"FILE: {path} is neither a file nor a folder")


def folder_of(text: str) -> PurePosixPath:
    """Folder on a claim.

    Raises:
        NotFoundError: it leads out of the claim.
    """
    path = PurePosixPath(text)
    if not text.isprintable() or path.is_absolute() or ".." in path.parts or not path.parts:
        raise NotFoundError(f"--to: got {text!r}, expected a folder below the root of the claim, such as data/maths")
    return path


def write_archive(entries: Sequence[Entry], out: IO[bytes], sent: Callable[[int], None]) -> None:
    """Write entries as a tar stream; a file that shrinks meanwhile ends it.

    Args:
        entries: files and folders.
        out: receives the stream.
        sent: is called with the number of bytes of each part of a file.
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
    """File that reports what was read of it."""

    def __init__(self, file: IO[bytes], sent: Callable[[int], None]) -> None:
        self._file, self._sent = file, sent

    def read(self, size: int = _BLOCK) -> bytes:
        content = self._file.read(size)
        self._sent(len(content))
        return content


def mount_of(pods: Sequence[Json], claim: str) -> Mount | None:
    """A container that runs and has a claim mounted for writing; None: there is none."""
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
    """Pod that mounts a claim and waits, under the restricted Pod Security Standard."""
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
    """All pods of the namespace."""
    return list(ask_json(api, ["get", "pods"]).get("items") or ())
