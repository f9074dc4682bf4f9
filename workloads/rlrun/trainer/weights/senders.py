"""A root's side of hand-overs: the newest versions' buckets in host memory, and a thread for each session that sends them.

Training goes on meanwhile. Every root has its own group with a session's engines, and waits for no other root.
"""

from __future__ import annotations

import json
import queue
import threading
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor

from rlrun.protocol.messages.transfer import Backend, group_name
from rlrun.transport import links

KEPT_VERSIONS = 2
"""Number of versions in memory: the newest, and the one before, which an engine may be about to ask for."""
_CHECKSUM_THREADS = 4


@dataclass(frozen=True)
class Order:
    """One version for the engines of a session."""

    session: str
    world_size: int
    version: int
    last: bool = False
    """The session ends instead; there is no version."""


def checksum_key(version: int, root: int) -> str:
    """Key in the store of the checksums of a root's buckets: JSON, by index."""
    return f"transfer/checksums/{version}/{root}"


class RootSender:
    """One root. Methods may be called from any thread.

    Args:
        root: its number.
        device: of this rank.
        store: a connection to the store for what does not wait.
        connect: makes another one.
        report: called with session, version and whether it was sent, each time.
    """

    def __init__(
        self,
        root: int,
        device: torch.device,
        store: dist.Store,
        connect: Callable[[], dist.Store],
        report: Callable[[str, int, bool], None] = lambda session, version, sent: None,
    ) -> None:
        self._root, self._device, self._report = root, device, report
        self._store, self._connect = store, connect
        self._lock = threading.Lock()
        self._held: dict[int, Mapping[int, Tensor]] = {}
        self._sessions: dict[str, queue.Queue[Order]] = {}

    @property
    def backend(self) -> Backend:
        """Backend of the groups."""
        return "nccl" if self._device.type == "cuda" else "gloo"

    def hold(self, version: int, buckets: Mapping[int, Tensor]) -> None:
        """Keep this root's buckets of a version, and make their checksums known beside the caller.

        Args:
            version: the policy version.
            buckets: uint8 in host memory, by index.
        """
        with self._lock:
            self._held[version] = buckets
            for old in sorted(self._held)[:-KEPT_VERSIONS]:
                del self._held[old]
        threading.Thread(
            target=self._make_checksums, args=(version, buckets), name=f"checksums-{version}", daemon=True
        ).start()

    def carry_out(self, order: Order) -> None:
        """Begin to send in a session, which is joined first where it is new."""
        with self._lock:
            orders = self._sessions.get(order.session)
            if orders is None:
                if order.last:
                    return
                orders = self._sessions[order.session] = queue.Queue()
                threading.Thread(
                    target=self._run, args=(order, orders), name=f"transfer-{order.session}", daemon=True
                ).start()
            orders.put(order)

    def close(self) -> None:
        """Send nothing more; a bucket that is being sent is not waited for."""
        with self._lock:
            self._held.clear()
            for name, orders in self._sessions.items():
                orders.put(Order(name, 0, 0, last=True))

    def _make_checksums(self, version: int, buckets: Mapping[int, Tensor]) -> None:
        with ThreadPoolExecutor(_CHECKSUM_THREADS) as pool:
            found = dict(
                zip(buckets, pool.map(lambda bucket: zlib.crc32(bucket.numpy()), buckets.values()), strict=True)
            )
        try:
            self._store.set(checksum_key(version, self._root), json.dumps(found))
        except RuntimeError as error:  # rank 0 is gone, and with it the run's attempt
            logger.warning(f"root {self._root}: the checksums of version {version} cannot be told: {error}")

    def _run(self, first: Order, orders: queue.Queue[Order]) -> None:
        """One session, to its end."""
        link: links.Link | None = None
        version = first.version
        try:
            link = links.join(
                self.backend,
                self._connect(),
                group_name(first.session, self._root),
                rank=0,
                world_size=first.world_size,
                device=self._device,
            )
            while not (order := orders.get()).last:
                version = order.version
                self._send(link, version)
                self._report(first.session, version, True)
        except Exception as error:  # the engines' side fails as well, and asks for other groups
            logger.warning(f"the transfer of version {version} to {first.world_size - 1} engines failed: {error}")
            self._report(first.session, version, False)
        finally:
            if link is not None:
                link.close()
            with self._lock:
                self._sessions.pop(first.session, None)

    def _send(self, link: links.Link, version: int) -> None:
        with self._lock:
            buckets = self._held.get(version)
        if buckets is None:
            raise RuntimeError(f"version {version} is no longer in the memory of root {self._root}")
        for index in sorted(buckets):
            if buckets[index].numel():
                link.broadcast(buckets[index])
        link.meet()
