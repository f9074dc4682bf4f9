"""The groups in which an engine's server receives versions from the trainer's roots. Imports torch; see `receive` for the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from loguru import logger

from rlrun.inference.weights.rebuild import DamagedError, compare_checksum, replace_bucket
from rlrun.inference.weights.receive import Groups
from rlrun.inference.weights.staging import Staging, file_name, make_file
from rlrun.protocol.messages.buckets import Bucket, version_checksum
from rlrun.protocol.messages.transfer import Joining, TransferOffer, group_name
from rlrun.transport import links

_CHECKSUM_THREADS = 4
_WAITING = 8
"""Most buckets of a root that have come as differences and are not applied yet."""


class Incoming:
    """The groups of one session; used by one thread at a time, but for `abort`.

    Args:
        engine: name of this engine among the members.
        host: of the trainer.
        offer: that says how to join.
        joining: of the offer.
    """

    def __init__(self, engine: str, host: str, offer: TransferOffer, joining: Joining) -> None:
        self.session, self._roots = offer.session, offer.roots
        self._stopped = threading.Event()
        self._links: dict[int, links.Link] = {}
        rank = 1 + joining.members.index(engine)
        device = torch.device("cuda", 0) if joining.backend == "nccl" else torch.device("cpu")

        store = links.connect_store(host, joining.store_port)
        try:
            for root in range(
                self._roots
            ):  # in the same order on all engines, so that none waits for another's next group
                self._links[root] = links.join(
                    joining.backend,
                    store,
                    group_name(offer.session, root),
                    rank=rank,
                    world_size=joining.world_size,
                    device=device,
                )
        except BaseException:
            self.abort()
            raise
        logger.info(
            f"this engine and {len(joining.members) - 1} others receive weights from {self._roots} ranks of {host} over {joining.backend}"
        )

    def receive(self, offer: TransferOffer, folder: Path, base: Path | None = None) -> None:
        """Receive all buckets into their files and compare them with the trainer's checksums.

        Args:
            offer: of this session.
            folder: in shared memory, of `Staging.open` or `Staging.follow`.
            base: of `Staging.follow`, where differences come.

        Raises:
            DamagedError: a bucket is another one than the trainer has.
            RuntimeError: a group broke, or `abort` was called.
            NoRoomError: the memory is used up.
        """
        buckets = offer.buckets()
        if len(offer.checksums) != len(buckets):
            raise DamagedError(f"the trainer has checksums of {len(offer.checksums)} buckets, and sends {len(buckets)}")
        with ThreadPoolExecutor(_CHECKSUM_THREADS) as checks:

            def take(root: int) -> None:
                pending: list[Future[None]] = []
                for bucket in (one for one in buckets if one.root == root):
                    if self._stopped.is_set():
                        raise RuntimeError("the transfer was given up")
                    check = self._take(offer, bucket, folder / file_name(bucket, len(buckets)), base)
                    if check is not None:
                        pending.append(checks.submit(check))
                    if base is not None and len(pending) > _WAITING:
                        pending[-_WAITING - 1].result()
                for one in pending:
                    one.result()

            self._each_root(take)

    def _take(self, offer: TransferOffer, bucket: Bucket, target: Path, base: Path | None) -> Callable[[], None] | None:
        """Receive what is sent of one bucket; returns what is left to do without the group."""
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
        """Tell the roots that all is received; returns whether the groups can be used again."""
        try:
            self._each_root(lambda root: self._links[root].meet())
        except RuntimeError:  # another engine failed: what came is whole
            return False
        return True

    def abort(self) -> None:
        """Leave the groups, now or when their next bucket has come."""
        self._stopped.set()
        for link in list(self._links.values()):
            link.close()

    def _each_root(self, act: Callable[[int], None]) -> None:
        """Do the same for all roots at once. When one fails the groups are left, and the first error is raised when all have ended."""
        failures: list[Exception] = []

        def guarded(root: int) -> None:
            try:
                act(root)
            except Exception as error:  # whatever it is, the others would wait
                failures.append(error)
                self.abort()

        with ThreadPoolExecutor(self._roots, thread_name_prefix="receive") as pool:
            list(pool.map(guarded, range(self._roots)))
        if failures:
            raise failures[0]


class Fetching:
    """One transfer, in a thread of its own.

    Args:
        engine: this engine's name.
        host: of the trainer.
        offer: what comes.
        incoming: the groups that the engine is in.
        staging: where it is put together.
    """

    def __init__(self, engine: str, host: str, offer: TransferOffer, incoming: Groups | None, staging: Staging) -> None:
        self._engine, self._host, self._offer, self._staging = engine, host, offer, staging
        self._incoming = incoming if isinstance(incoming, Incoming) else None

    def run(self) -> tuple[Path, Incoming | None]:
        """The folder, and the groups where they can be used again."""
        offer = self._offer
        try:
            base, folder = self._folders()
            if offer.joining is not None:
                self.abort()
                self._incoming = Incoming(self._engine, self._host, offer, offer.joining)
            if self._incoming is None or self._incoming.session != offer.session:
                raise RuntimeError("the trainer takes this engine for one of another session")
            self._incoming.receive(offer, folder, base)
            self._staging.settle(folder, version_checksum(offer.checksums))
            logger.info(f"version {offer.version} has come: {offer.about()}")
        except BaseException:
            self._staging.drop_all()
            raise
        return folder, self._incoming if self._incoming.meet() else None

    def _folders(self) -> tuple[Path | None, Path]:
        """Folder of the version that differences come from, and of the one that comes."""
        offer, buckets = self._offer, self._offer.buckets()
        if offer.difference is None:
            return None, self._staging.open(offer.version, buckets)
        whole = self._staging.whole
        if whole is None or whole.checksum != offer.difference.base or len(offer.difference.sizes) != len(buckets):
            raise RuntimeError("the trainer sends differences from a version that this engine does not have")
        return self._staging.follow(offer.version, buckets)

    def abort(self) -> None:
        """Leave the groups."""
        if self._incoming is not None:
            self._incoming.abort()
