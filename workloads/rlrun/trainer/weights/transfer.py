"""Versions for the engines without the volume: rank 0 keeps the newest ones in host memory and sends them on request.

The ranks gather a version once, when it is published; sending needs rank 0 alone, in a thread for each engine, while the next step is
trained. So an engine that comes late, or a second time, costs the trainer nothing. See `rlrun.protocol.messages.transfer` for its messages.
"""

from __future__ import annotations

import base64
import datetime
import queue
import secrets
import threading
from collections.abc import Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor

from rlrun.protocol.messages.transfer import SECONDS, Joining, NotHeldError, TensorInfo, TransferOffer, TransferRequest
from rlrun.trainer.ranks.loopback import is_loopback, loopback_store

KEPT_VERSIONS = 2
"""Number of versions in memory: the newest, and the one before, which an engine may be about to ask for."""
IDLE_VERSIONS = 4
"""A session that has sent nothing for so many versions is closed: its engine is gone, and a group costs memory of the GPU."""


class Link(Protocol):
    """Rank 0's end of a group with one engine."""

    def joining(self) -> Joining:
        """Parameters for the others to join; before `join`."""
        ...

    def join(self) -> None:
        """Wait for the others."""
        ...

    def send(self, tensor: Tensor) -> None:
        """Broadcast a tensor of host memory."""
        ...


class GlooLink:
    """Link between CPUs."""

    def __init__(self, workers: int, host: str) -> None:
        """Args: workers: of the engine. host: on which the trainer serves; on loopback so does the group's store."""
        self._world = workers + 1
        self._limit = datetime.timedelta(seconds=SECONDS)
        store = loopback_store if is_loopback(host) else dist.TCPStore
        self._store = store(host, 0, self._world, is_master=True, timeout=self._limit, wait_for_workers=False)
        self._group: dist.ProcessGroupGloo | None = None

    def joining(self) -> Joining:
        """See `Link`."""
        return Joining(backend="gloo", world_size=self._world, store_port=self._store.port)

    def join(self) -> None:
        """See `Link`."""
        self._group = dist.ProcessGroupGloo(self._store, 0, self._world, self._limit)

    def send(self, tensor: Tensor) -> None:
        """See `Link`."""
        assert self._group is not None
        self._group.broadcast(tensor, 0).wait()


class NcclLink:
    """Link between GPUs, with torch's own NCCL: the trainer's image has no vLLM."""

    def __init__(self, workers: int, device: torch.device) -> None:
        """Args: workers: of the engine. device: of rank 0."""
        self._world, self._device = workers + 1, device
        self._id: bytes = torch.cuda.nccl.unique_id()
        self._stream = torch.cuda.Stream(device)

    def joining(self) -> Joining:
        """See `Link`."""
        return Joining(backend="nccl", world_size=self._world, unique_id=base64.b64encode(self._id).decode())

    def join(self) -> None:
        """See `Link`. vLLM's workers sum one element as soon as they are in, and wait for all others to do so."""
        torch.cuda.set_device(self._device)
        self._communicator = torch.cuda.nccl.init_rank(self._world, self._id, 0)
        with torch.cuda.stream(self._stream):
            torch.cuda.nccl.all_reduce(
                [torch.zeros(1, device=self._device)], streams=[self._stream], comms=[self._communicator]
            )
        self._stream.synchronize()

    def send(self, tensor: Tensor) -> None:
        """See `Link`."""
        with torch.cuda.stream(self._stream):
            staged = tensor.to(self._device, non_blocking=True)
            torch.cuda.nccl.broadcast([staged], streams=[self._stream], comms=[self._communicator])
        self._stream.synchronize()  # the copy on the GPU lives until it is sent


class _Session:
    """A group with one engine, and the thread that sends in it."""

    def __init__(self, link: Link) -> None:
        self.name = secrets.token_hex(8)
        self.joining = link.joining()
        self.alive, self.latest = True, 0
        self._link = link
        self._orders: queue.Queue[tuple[int, Mapping[str, Tensor]] | None] = queue.Queue()
        threading.Thread(target=self._run, name=f"transfer-{self.name}", daemon=True).start()

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self.latest = version
        self._orders.put((version, tensors))

    def close(self) -> None:
        self.alive = False
        self._orders.put(None)

    def _run(self) -> None:
        try:
            self._link.join()
            while (order := self._orders.get()) is not None:
                for tensor in order[1].values():
                    self._link.send(tensor)
        except Exception as error:  # the engine's side fails as well, and asks for another group
            logger.warning(f"the transfer of version {self.latest} to an engine failed: {error}")
        self.alive = False


class Outbox:
    """Versions that rank 0 has to send. Methods may be called from any thread.

    Args:
        device: of rank 0.
        host: address on which the trainer serves.
    """

    def __init__(self, device: torch.device, host: str) -> None:
        self._device, self._host = device, host
        self._lock = threading.Lock()
        self._held: dict[int, Mapping[str, Tensor]] = {}
        self._sessions: dict[str, _Session] = {}

    def hold(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Offer a version from now on.

        Args:
            version: the policy version.
            tensors: whole ones in host memory, in the published format and under the names of files.
        """
        with self._lock:
            self._held[version] = tensors
            for old in sorted(self._held)[:-KEPT_VERSIONS]:
                del self._held[old]
            for session in list(self._sessions.values()):
                if not session.alive or session.latest < version - IDLE_VERSIONS:
                    session.close()
                    del self._sessions[session.name]

    def offer(self, request: TransferRequest) -> TransferOffer:
        """Say what comes, and begin to send it as soon as the engine's workers are there.

        Raises:
            NotHeldError: the version is not in memory.
        """
        with self._lock:
            tensors = self._held.get(request.version)
            if tensors is None:
                newest = max(self._held, default=None)
                raise NotHeldError(f"version {request.version} is not in the trainer's memory; the newest is {newest}")
            session = self._sessions.get(request.session or "")
            known = session is not None and session.alive and session.joining.world_size == request.workers + 1
            if session is None or not known:
                session = _Session(self._link(request.workers))
                self._sessions[session.name] = session
            session.send(request.version, tensors)
        return TransferOffer(
            version=request.version,
            session=session.name,
            joining=None if known else session.joining,
            tensors=[
                TensorInfo(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape))
                for name, tensor in tensors.items()
            ],
        )

    def close(self) -> None:
        """Send nothing more; a transfer that has begun is not waited for."""
        with self._lock:
            for session in self._sessions.values():
                session.close()
            self._sessions.clear()
            self._held.clear()

    def _link(self, workers: int) -> Link:
        return NcclLink(workers, self._device) if self._device.type == "cuda" else GlooLink(workers, self._host)
