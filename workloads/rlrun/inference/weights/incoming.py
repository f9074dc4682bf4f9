"""Communication groups in which an engine's server receives versions from the trainer's root ranks. Imports torch; see `receive`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from loguru import logger

from rlrun.inference.weights.delta_folders import DamagedError, compare_checksum, replace_bucket
from rlrun.inference.weights.receive import Groups, Staging, file_name, make_file
from rlrun.protocol.messages.buckets import Bucket, version_checksum
from rlrun.protocol.messages.trainer_channel import Joining, TransferOffer, group_name
from rlrun.transport import links

_CHECKSUM_THREADS = 4
_WAITING = 8
"""Maximum received differences per root that are not applied yet."""


class Incoming:
    """Groups of one session. Only `abort` may be called from another thread.

    Args:
        engine: name of this engine among the members.
        host: host of the trainer.
        offer: offer with the session and the number of roots.
        joining: members, backend and store port from the offer.
    """

    def __init__(self, engine: str, host: str, offer: TransferOffer, joining: Joining) -> None:
        self.session, self._roots = offer.session, offer.roots
        self._stopped = threading.Event()
        self._links: dict[int, links.Link] = {}
        rank = 1 + joining.members.index(engine)
        device = torch.device("cuda", 0) if joining.backend == "nccl" else torch.device("cpu")

        store = links.connect_store(host, joining.store_port)
        try:
            for root in range(self._roots):  # same order on all engines: a different order would deadlock
                self._links[root] = links.join_group(
                    joining.backend,
                    store,
                    group_name(offer.session, root),
                    rank=rank,
                    members=joining.members,
                    device=device,
                )
        except BaseException:
            self.abort()
            raise
        logger.info(
            f"this engine and {len(joining.members) - 1} others receive weights from {self._roots} ranks of {host} over {joining.backend}"
        )

    def receive_buckets(self, offer: TransferOffer, folder: Path, base: Path | None = None) -> None:
        """Receive all buckets into files and compare them with the trainer's checksums.

        Args:
            offer: offer of this session.
            folder: target folder in shared memory, from `Staging.open` or `Staging.open_next_version`.
            base: folder of the base version from `Staging.open_next_version`, if the trainer sends differences.

        Raises:
            DamagedError: a bucket differs from the trainer's.
            RuntimeError: a group broke, or `abort` was called.
            NoRoomError: the shared memory is full.
        """
        buckets = offer.buckets()
        if len(offer.checksums) != len(buckets):
            raise DamagedError(f"the trainer sends {len(buckets)} buckets, but checksums for {len(offer.checksums)}")
        with ThreadPoolExecutor(_CHECKSUM_THREADS) as checks:

            def take(root: int) -> None:
                pending: list[Future[None]] = []
                for bucket in (one for one in buckets if one.root == root):
                    if self._stopped.is_set():
                        raise RuntimeError("the transfer was aborted")
                    check = self._receive_bucket(offer, bucket, folder / file_name(bucket, len(buckets)), base)
                    if check is not None:
                        pending.append(checks.submit(check))
                    # Differences live outside of the mapped files, so the number of unapplied ones is limited.
                    if base is not None and len(pending) > _WAITING:
                        pending[-_WAITING - 1].result()
                for one in pending:
                    one.result()

            self._each_root(take)

    def _receive_bucket(
        self, offer: TransferOffer, bucket: Bucket, target: Path, base: Path | None
    ) -> Callable[[], None] | None:
        """Receive one bucket; returns the remaining work (checksum, difference), which does not need the group."""
        link, expected = self._links[bucket.root], offer.checksums[bucket.index]
        size = bucket.size if offer.difference is None else offer.difference.sizes[bucket.index]
        source = None if base is None else base / target.name
        if source is None or size == bucket.size:
            if source is not None:
                source.unlink()
            memory, start = make_file(target, bucket)
            if not bucket.size:
                return None
            body = torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=bucket.size)
            link.broadcast(body)
            return partial(compare_checksum, bucket, body.numpy(), expected)
        delta = torch.empty(size, dtype=torch.uint8)
        if size:
            link.broadcast(delta)
        return partial(replace_bucket, source, target, bucket, [delta.numpy()], expected)

    def meet(self) -> bool:
        """Confirm to the roots that everything was received; returns whether the groups can be used again."""
        try:
            self._each_root(lambda root: self._links[root].meet())
        except RuntimeError:  # another engine failed; this version is complete
            return False
        return True

    def abort(self) -> None:
        """Leave the groups, at the latest after the current bucket."""
        self._stopped.set()
        for link in list(self._links.values()):
            link.close()

    def _each_root(self, act: Callable[[int], None]) -> None:
        """Run `act` for all roots in parallel. After a failure the groups are left, and the first error is raised when all have ended."""
        failures: list[Exception] = []

        def guarded(root: int) -> None:
            try:
                act(root)
            except Exception as error:  # after any error the other roots would wait forever
                failures.append(error)
                self.abort()

        with ThreadPoolExecutor(self._roots, thread_name_prefix="receive") as pool:
            list(pool.map(guarded, range(self._roots)))
        if failures:
            raise failures[0]


class Fetching:
    """One transfer, which runs in its own thread.

    Args:
        engine: name of this engine.
        host: host of the trainer.
        offer: the trainer's offer.
        incoming: groups of the previous transfer, if they can be used again.
        staging: shared memory for the version.
    """

    def __init__(self, engine: str, host: str, offer: TransferOffer, incoming: Groups | None, staging: Staging) -> None:
        self._engine, self._host, self._offer, self._staging = engine, host, offer, staging
        self._incoming = incoming if isinstance(incoming, Incoming) else None

    def run(self) -> tuple[Path, Incoming | None]:
        """Return the folder of the version, and the groups if they can be used again."""
        offer = self._offer
        try:
            base, folder = self._version_folders()
            if offer.joining is not None:
                self.abort()
                self._incoming = Incoming(self._engine, self._host, offer, offer.joining)
            if self._incoming is None or self._incoming.session != offer.session:
                raise RuntimeError("the trainer's session is not the session of this engine")
            self._incoming.receive_buckets(offer, folder, base)
            self._staging.record_complete(folder, version_checksum(offer.checksums))
            logger.info(f"received version {offer.version}: {offer.about()}")
        except BaseException:
            self._staging.drop_all()
            raise
        return folder, self._incoming if self._incoming.meet() else None

    def _version_folders(self) -> tuple[Path | None, Path]:
        """Return the folder of the base version for differences (or None), and the folder of the new version."""
        offer, buckets = self._offer, self._offer.buckets()
        if offer.difference is None:
            return None, self._staging.open(offer.version, buckets)
        whole = self._staging.whole
        if whole is None or whole.checksum != offer.difference.base or len(offer.difference.sizes) != len(buckets):
            raise RuntimeError("the trainer sends differences to a version that this engine does not have")
        return self._staging.open_next_version(offer.version, buckets)

    def abort(self) -> None:
        """Leave the groups."""
        if self._incoming is not None:
            self._incoming.abort()
