"""Receiver of a version from the trainer's memory: requests to the trainer, and the shared memory of the engine's machine.

A version is assembled in shared memory before the engine is changed. It is a folder with one safetensors file per bucket, which the workers
load like a published folder: each worker reads only its parts, and all workers share one copy.

For a transfer, the engine sends a request to the trainer, joins its groups and receives. Messages:
`rlrun.protocol.messages.trainer_channel`.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import mmap
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp
from pydantic import ValidationError

from rlrun.inference.weights.preflight import INDEX, Shapes, problem_of_tensors
from rlrun.protocol.messages.buckets import Bucket
from rlrun.protocol.messages.trainer_channel import TRANSFERS, TransferOffer, TransferRequest

SHARED_MEMORY = Path("/dev/shm")  # each process uses its own folder in it
_PREFIX, _LOCK = "rlrun-weights-", "lock"


@dataclass(frozen=True)
class Whole:
    """Complete version in shared memory."""

    folder: Path
    checksum: int
    """Checksum of the version, see `buckets.version_checksum`."""


class NoRoomError(Exception):
    """Error for a version that does not fit; the message contains the settings to change."""


class Staging:
    """Folders of versions, in a folder of this process that is deleted with it. Used by one thread at a time.

    Args:
        memory: folder in memory. Default: the machine's shared memory, or the folder for temporary files if there is none.
    """

    def __init__(self, memory: Path | None = None) -> None:
        self._memory = memory or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()))
        self._folder: Path | None = None
        self._lock: int | None = None
        self.whole: Whole | None = None
        """Complete, verified version, which can be the base of the next version."""

    def open(self, version: int, buckets: Sequence[Bucket]) -> Path:
        """Create a folder for a version with the index of its bucket files; older versions are deleted.

        Raises:
            NoRoomError: the version does not fit.
        """
        root = self._process_folder()
        self.drop_all()
        size = sum(bucket.size + len(bucket.header()) for bucket in buckets)
        free = shutil.disk_usage(root).free
        if free < size:
            raise NoRoomError(
                f"version {version} needs {_show_gib(size)} of the engine's shared memory ({self._memory}), "
                f"but {_show_gib(free)} are free;  "
                "increase inference.sharedMemory and the memory of the engine's container, or set weightSync.transport: Filesystem "
                "with deltas: Never"
            )
        return self._new_folder(version, buckets)

    def open_next_version(self, version: int, buckets: Sequence[Bucket]) -> tuple[Path, Path]:
        """Return the folder of the current version and a new folder for the next version.

        Files are moved or replaced one by one, so memory contains at most one version plus a few buckets. The current version is no longer
        complete afterwards.

        Raises:
            NoRoomError: there is no current version.
        """
        if self.whole is None:
            raise NoRoomError(f"the base of version {version} is no longer in {self._memory}")
        before = self.whole.folder.rename(self._process_folder() / f"v{version}.base")
        self.whole = None
        return before, self._new_folder(version, buckets)

    def record_complete(self, folder: Path, checksum: int) -> None:
        """Record the version in the folder as complete and verified; delete all other versions."""
        self.whole = Whole(folder, checksum)
        for path in self._process_folder().glob("v*"):
            if path != folder:
                shutil.rmtree(path, ignore_errors=True)

    def _new_folder(self, version: int, buckets: Sequence[Bucket]) -> Path:
        folder = self._process_folder() / f"v{version}"
        folder.mkdir()
        size = sum(bucket.size + len(bucket.header()) for bucket in buckets)
        names = {slot.tensor.name: file_name(bucket, len(buckets)) for bucket in buckets for slot in bucket.slots}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": names}))
        return folder

    def drop_all(self) -> None:
        """Delete all versions."""
        self.whole = None
        if self._folder is not None:
            for path in self._folder.glob("v*"):
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Delete the folder of this process."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self._folder = self._lock = self.whole = None

    def _process_folder(self) -> Path:
        """Return the folder of this process; on first use, delete folders of processes that have ended."""
        if self._folder is None:
            for path in self._memory.glob(f"{_PREFIX}*"):
                _remove_if_left(path)
            new = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=self._memory))
            self._lock = os.open(new / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            # The final name appears only after the lock is taken, so other processes never see an unlocked folder in use.
            self._folder = new.rename(new.with_name(new.name.removeprefix(".")))
        return self._folder


def file_name(bucket: Bucket, count: int) -> str:
    """Return the file name of a bucket of `count`."""
    return f"model-{bucket.index + 1:05d}-of-{count:05d}.safetensors"


def make_file(path: Path, bucket: Bucket) -> tuple[mmap.mmap, int]:
    """Create a bucket's file with its header; returns the mapped memory and the offset of the body.

    Raises:
        NoRoomError: the shared memory is full.
    """
    header = bucket.header()
    size = len(header) + bucket.size
    with path.open("w+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)  # allocate now: a page that is missing later would raise SIGBUS
        except OSError as error:
            raise NoRoomError(
                f"{path.parent.parent} has no space for a bucket of {_show_gib(size)}: {error.strerror}"
            ) from None
        file.write(header)
        file.flush()
        return mmap.mmap(file.fileno(), size), len(header)


def _remove_if_left(path: Path) -> None:
    try:
        lock = os.open(path / _LOCK, os.O_RDWR)
    except OSError:  # folder of another user
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:  # its process is alive
        pass
    finally:
        os.close(lock)


def _show_gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


ASK_SECONDS = 150.0
"""Maximum wait for the trainer's response, which arrives when all engines have sent a request and the checksums are computed."""


class RefusedError(Exception):
    """Error if the trainer cannot send the version, or sends tensors of another model. The engine is unchanged.

    Args:
        message: cause.
        gone: whether the trainer does not have this version (any more); another version may be available.
    """

    def __init__(self, message: str, *, gone: bool = False) -> None:
        super().__init__(message)
        self.gone = gone


class Groups(Protocol):
    """Groups of a session that an engine has joined."""

    session: str

    def abort(self) -> None:
        """Leave the groups."""
        ...


class Fetch(Protocol):
    """One transfer."""

    def run(self) -> tuple[Path, Groups | None]:
        """Receive the version in the caller's thread; returns the folder, and the groups if they can be used again."""
        ...

    def abort(self) -> None:
        """Abort the transfer."""
        ...


MakeFetch = Callable[[str, str, TransferOffer, Groups | None, Staging], Fetch]
"""Factory of a transfer from: engine name, trainer host, offer, joined groups, staging."""


class Receiver:
    """Receiver of versions from one trainer at a time.

    A version is complete in shared memory and compared with the trainer's checksums before the engine is changed. A failure before that
    point leaves the engine with its served version.

    Args:
        api_key: API key of the run.
        expected: tensors of the served model, or None if unknown.
        make_fetch: factory of transfers: `incoming.Fetching`, which needs torch.
        staging: target of the versions. Default: the machine's shared memory.
        keeps: whether a version stays in shared memory as the base for later differences.
    """

    def __init__(
        self,
        *,
        api_key: str,
        expected: Shapes | None,
        make_fetch: MakeFetch,
        staging: Staging | None = None,
        keeps: bool = False,
    ) -> None:
        self._keeps = keeps
        self._expected, self._make_fetch, self._staging = expected, make_fetch, staging or Staging()
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._name = secrets.token_hex(8)
        self._incoming: Groups | None = None
        self._alone = False

    async def fetch(self, trainer_url: str, version: int) -> Path:
        """Receive a version from the trainer's memory and return its folder, which stays until `drop` or the next call.

        Raises:
            RefusedError: the version is not available or incomplete; the engine is unchanged.
        """
        incoming = self._incoming
        request = TransferRequest(
            version=version,
            engine=self._name,
            session=None if incoming is None else incoming.session,
            alone=self._alone,
            base=None if self._staging.whole is None else self._staging.whole.checksum,
        )
        offer = await self._request_offer(trainer_url, request)
        self._alone, self._incoming = True, None  # until the transfer succeeds
        problem = problem_of_tensors(offer.tensors, self._expected)
        if problem is not None:
            if incoming is not None:
                incoming.abort()
            raise RefusedError(problem)
        host = urlsplit(trainer_url).hostname or ""
        # The transfer blocks, so it runs in a thread. A cancelled or failed transfer leaves the groups, and the next request joins again.
        work = self._make_fetch(self._name, host, offer, incoming, self._staging)
        try:
            folder, self._incoming = await asyncio.to_thread(work.run)
        except asyncio.CancelledError:
            work.abort()
            raise
        except Exception as error:
            work.abort()
            raise RefusedError(
                f"the transfer of version {version} from the trainer at {trainer_url} failed: {error}"
            ) from None
        self._alone = False
        return folder

    def free_version(self) -> None:
        """Free the memory of a loaded version, unless it is kept as the base for the next one."""
        if not self._keeps:
            self._staging.drop_all()

    def close(self) -> None:
        """Leave the groups and delete the shared memory."""
        if self._incoming is not None:
            self._incoming.abort()
        self._staging.close()

    async def _request_offer(self, trainer_url: str, request: TransferRequest) -> TransferOffer:
        limit = aiohttp.ClientTimeout(total=ASK_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers, timeout=limit) as http,
                http.post(
                    trainer_url.rstrip("/") + TRANSFERS, json=request.model_dump(mode="json", exclude_none=True)
                ) as answer,
            ):
                text = await answer.text()
                if answer.status != 200:
                    raise RefusedError(
                        f"the trainer at {trainer_url} returned {answer.status}: {text[:300]}",
                        gone=answer.status == HTTPStatus.NOT_FOUND,
                    )
                return TransferOffer.model_validate_json(text)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RefusedError(f"the trainer at {trainer_url} does not respond: {error or 'timeout'}") from None
        except ValidationError:
            raise RefusedError(f"{trainer_url} is not the address of a trainer") from None
