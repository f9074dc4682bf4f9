"""Process that copies complete artifacts of a run to object storage: `python -m rlrun.mirror --config run.json [--once]`.

In the order of the file: the complete artifacts of the volume; the run's folder in object storage, accessed through fsspec (S3, Google
Cloud Storage, or any other file system of fsspec); the process.

Every few seconds the process lists new complete artifacts and copies them one at a time at the lowest priority. While the object storage
fails, the pauses grow. After SIGTERM it first copies the rest; its starter limits the time for that.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.utils import get_protocol
from loguru import logger

from rlrun.config.loading.loader import load_file
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.checkpoint import MirrorConfig
from rlrun.config.models.run_config import RunConfig
from rlrun.protocol.files.checkpoint_manifest import MANIFEST, ManifestError, complete_checkpoints, read_manifest
from rlrun.protocol.files.paths import COMPLETE, TMP_SUFFIX, RunPaths, artifacts_in_steps
from rlrun.runtime import exit_codes
from rlrun.runtime.extras import install_extras
from rlrun.runtime.processes import Ending, on_sigterm


@dataclass(frozen=True)
class Artifact:
    """Files that are copied together."""

    name: str
    """Path relative to the run's folder and to the mirror's folder."""
    folder: Path
    """Folder on the volume."""
    files: tuple[str, ...]
    """Paths relative to the folder, without the marker."""
    marker: str | None
    """File that marks the artifact as complete. It is copied last, or written empty if the volume has none. None: independent files."""

    def is_whole(self) -> bool:
        """Return whether the volume still has the artifact."""
        return self.folder.is_dir() and (self.marker != MANIFEST or (self.folder / MANIFEST).is_file())


def complete_artifacts(paths: RunPaths, config: MirrorConfig) -> Iterator[Artifact]:
    """Yield the complete artifacts of the volume, newest first within each kind: checkpoints with the attempts' files, exports, traces.

    Args:
        paths: paths of the run.
        config: kinds to copy.
    """
    if config.checkpoints:
        if attempts := _list_files(paths.attempts):  # they define which checkpoints belong together
            yield Artifact(paths.attempts.name, paths.attempts, attempts, None)
        for found in reversed(complete_checkpoints(paths)):
            try:
                files = tuple(entry.path for entry in read_manifest(found.path).files)
            except ManifestError:  # damaged, or deleted in the meantime; a resume reports it
                continue
            yield Artifact(f"{paths.checkpoints.name}/{found.path.name}", found.path, files, MANIFEST)
    if config.exports:
        for found in reversed(artifacts_in_steps(paths.exports)):
            yield Artifact(f"{paths.exports.name}/{found.path.name}", found.path, _list_files(found.path), COMPLETE)
    if config.traces and (files := _list_files(paths.traces)):
        yield Artifact(paths.traces.name, paths.traces, tuple(reversed(files)), None)


def _list_files(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        return ()
    found = (
        path for path in folder.rglob("*") if path.suffix != TMP_SUFFIX and path.name != COMPLETE and path.is_file()
    )
    return tuple(sorted(str(path.relative_to(folder)) for path in found))


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

    def copy_artifact(self, artifact: Artifact, *, stop: Callable[[], bool] = lambda: False) -> int | None:
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
        remote_sizes = self._remote_sizes(target)
        if artifact.marker is not None and artifact.marker in remote_sizes:
            return 0
        try:
            sizes = {name: (artifact.folder / name).stat().st_size for name in artifact.files}
            missing = [name for name, size in sizes.items() if remote_sizes.get(name) != size]

            def put_unless_stopped(name: str) -> bool:
                if stop():
                    return False
                self._put_file(artifact, name, target)
                return True

            with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
                if not all(list(pool.map(put_unless_stopped, missing))):
                    return None
            if artifact.marker is not None:
                self._write_marker(artifact, target)
        except FileNotFoundError as error:
            if all((artifact.folder / name).is_file() for name in artifact.files) and artifact.is_whole():
                raise  # all local files exist, so the remote folder is missing
            if artifact.marker is not None:
                self._remove_copy(target)
            raise GoneError(f"{artifact.name} was deleted from the volume while it was copied: {error}") from None
        return sum(sizes[name] for name in missing)

    def _put_file(self, artifact: Artifact, name: str, target: str) -> None:
        remote = f"{target}/{name}"
        self._fs.makedirs(remote.rpartition("/")[0], exist_ok=True)
        self._fs.put_file(str(artifact.folder / name), remote)

    def _write_marker(self, artifact: Artifact, target: str) -> None:
        content = b"" if artifact.marker == COMPLETE else (artifact.folder / str(artifact.marker)).read_bytes()
        self._fs.makedirs(target, exist_ok=True)
        self._fs.pipe_file(f"{target}/{artifact.marker}", content)

    def _remote_sizes(self, target: str) -> dict[str, int]:
        try:
            found = self._fs.find(target, detail=True)
        except FileNotFoundError:
            return {}
        return {path.removeprefix(target).lstrip("/"): int(about["size"]) for path, about in found.items()}

    def _remove_copy(self, target: str) -> None:
        if self._remote_sizes(target):
            self._fs.rm(target, recursive=True)


LOOK_SECONDS = 5.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 120.0
_NICEST = 19


class Mirror:
    """Copies of one run.

    Args:
        paths: paths of the run.
        config: address and kinds of artifacts.
        name: name of the run, and of its folder at the address.

    Raises:
        UnusableError: the address cannot be used on this machine.
    """

    def __init__(self, paths: RunPaths, config: MirrorConfig, name: str) -> None:
        self._paths, self._config = paths, config
        self.url = f"{config.url.rstrip('/')}/{name}"
        self._remote = Remote(self.url)
        self._copied: set[str] = set()

    def copy_new(self, *, stop: Callable[[], bool] = lambda: False) -> bool:
        """Copy new complete artifacts. Returns whether all artifacts are copied.

        Raises:
            OSError: the object storage rejects the copy, or cannot be reached.
        """
        for artifact in complete_artifacts(self._paths, self._config):
            if artifact.name in self._copied:
                continue
            began = time.monotonic()
            try:
                size = self._remote.copy_artifact(artifact, stop=stop)
            except GoneError as error:
                logger.info(str(error))
                continue
            if size is None:
                return False
            if size:
                seconds = max(time.monotonic() - began, 1e-9)
                logger.info(f"{artifact.name}: {size} bytes copied to {self.url}, {size / seconds / 1e6:.1f} MB/s")
            if artifact.marker is not None:
                self._copied.add(artifact.name)
        return True

    def copy_until(self, over: Ending) -> bool:
        """Copy until `over` is set, then the rest. Returns whether everything is copied."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            # Read before the copies, so that the last round includes every artifact that was complete at the signal.
            last = over.is_set()
            try:
                copied = self.copy_new()
                pause = FIRST_PAUSE_SECONDS
                wait = LOOK_SECONDS
            except Exception as error:  # each file system has its own error classes
                logger.warning(f"{self.url} rejected a copy: {type(error).__name__}: {error}")
                copied, wait = False, pause
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            if last:
                return copied
            over.wait(wait)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rlrun.mirror")
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--once", action="store_true", help="copy all complete artifacts, then end")
    options = parser.parse_args(argv)
    over = Ending()
    if options.once:
        over.set()
    on_sigterm(over.set)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.nice(_NICEST)
    try:
        config = load_file(RunConfig, options.config)
        if config.mirror is None:
            return exit_codes.OK
        paths = RunPaths(Path(config.trainer.output_dir))
        mirror = Mirror(paths, config.mirror, config.trainer.name)
    except ConfigError as error:
        logger.error(str(error))
        return exit_codes.CONFIGURATION
    except UnusableError as error:
        logger.error(str(error))
        return exit_codes.CONFIGURATION
    return exit_codes.OK if mirror.copy_until(over) else exit_codes.FAILURE
