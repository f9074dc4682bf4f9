"""Access to a run's folder in object storage through fsspec: S3, Google Cloud Storage, or any other file system of fsspec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
from fsspec.utils import get_protocol

from rlrun.mirror.artifacts import Artifact
from rlrun.protocol.files.paths import COMPLETE
from rlrun.runtime.extras import install_extras

PACKAGES: Mapping[str, tuple[str, str]] = {
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
}
"""Package for an address's scheme, and the extra that installs it."""
_FILES_AT_ONCE = 4


class UnusableError(Exception):
    """Error for an address that cannot be used on this machine. A retry is useless; the message contains the fix."""


class GoneError(Exception):
    """Error for an artifact that was deleted from the volume during the copy."""


class Remote:
    """A folder in object storage.

    Args:
        url: address of the folder, such as `s3://bucket/runs/my-run`.

    Raises:
        UnusableError: a package is missing, or the scheme is unknown.
    """

    def __init__(self, url: str) -> None:
        scheme = get_protocol(url)
        try:
            self._fs: Any
            self._fs, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            package, extra = PACKAGES.get(scheme, (error.name or scheme, ""))
            fix = install_extras(extra) if extra else "install it in the image"
            raise UnusableError(
                f"storage.mirror.url ({url}) needs the package {package}, which is not installed; {fix}"
            ) from None
        except ValueError as error:
            raise UnusableError(
                f"storage.mirror.url ({url}): {error}; use an address such as s3://bucket/folder"
            ) from None

    def copy(self, artifact: Artifact, *, stop: Callable[[], bool] = lambda: False) -> int | None:
        """Copy an artifact to the remote folder. Files that exist there with the same size are skipped.

        The marker is copied last, so a reader that sees it sees all files. An interrupted copy continues with the missing files.

        Args:
            artifact: complete artifact of the volume.
            stop: function that is called before each file and returns whether to stop.

        Returns:
            Number of copied bytes, or None if the copy was stopped.

        Raises:
            GoneError: a file is no longer on the volume; the incomplete copy is removed.
            OSError: the object storage rejects the copy, or cannot be reached.
        """
        target = f"{self._root}/{artifact.name}"
        remote_sizes = self._sizes(target)
        if artifact.marker is not None and artifact.marker in remote_sizes:
            return 0
        try:
            sizes = {name: (artifact.folder / name).stat().st_size for name in artifact.files}
            missing = [name for name, size in sizes.items() if remote_sizes.get(name) != size]

            def put(name: str) -> bool:
                if stop():
                    return False
                self._put(artifact, name, target)
                return True

            with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
                if not all(list(pool.map(put, missing))):
                    return None
            if artifact.marker is not None:
                self._mark(artifact, target)
        except FileNotFoundError as error:
            if all((artifact.folder / name).is_file() for name in artifact.files) and artifact.is_whole():
                raise  # all local files exist, so the remote folder is missing
            if artifact.marker is not None:
                self._remove(target)
            raise GoneError(f"{artifact.name} was deleted from the volume while it was copied: {error}") from None
        return sum(sizes[name] for name in missing)

    def _put(self, artifact: Artifact, name: str, target: str) -> None:
        remote = f"{target}/{name}"
        self._fs.makedirs(remote.rpartition("/")[0], exist_ok=True)
        self._fs.put_file(str(artifact.folder / name), remote)

    def _mark(self, artifact: Artifact, target: str) -> None:
        content = b"" if artifact.marker == COMPLETE else (artifact.folder / str(artifact.marker)).read_bytes()
        self._fs.makedirs(target, exist_ok=True)
        self._fs.pipe_file(f"{target}/{artifact.marker}", content)

    def _sizes(self, target: str) -> dict[str, int]:
        try:
            found = self._fs.find(target, detail=True)
        except FileNotFoundError:
            return {}
        return {path.removeprefix(target).lstrip("/"): int(about["size"]) for path, about in found.items()}

    def _remove(self, target: str) -> None:
        if self._sizes(target):
            self._fs.rm(target, recursive=True)
