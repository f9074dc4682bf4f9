"""Transfer of versions to engines without the volume: roots keep parts of the newest versions in host memory and send them on request.

The ranks gather a version bucket by bucket at its publication. Sending uses only threads of the roots during the next step. Rank 0
answers the engines, selects engines that receive a version together (`senders`), and sends orders to the other roots over a store.
`rlrun.protocol.messages.trainer_channel` defines the messages.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from weakref import WeakKeyDictionary

import torch
from loguru import logger
from torch import Tensor

from rlrun.protocol.messages.buckets import BUCKET_BYTES, TensorInfo
from rlrun.protocol.messages.trainer_channel import (
    Backend,
    Difference,
    Joining,
    NotHeldError,
    TransferOffer,
    TransferRequest,
)
from rlrun.trainer.weights.delta_writer import About, in_order, version_difference
from rlrun.trainer.weights.senders import KEPT_VERSIONS, WINDOW_SECONDS, Order, RootSender, Round, Rounds, checksum_key
from rlrun.transport import links
from rlrun.transport.links import ADDRESS

IDLE_VERSIONS = 4
"""Versions without a transfer after which a session is closed: its engines have ended, and its process groups use GPU memory."""
CHECKSUM_SECONDS = 120.0
"""Time limit for the roots' checksums of a version."""


def order_key(number: int) -> str:
    """Return the store's key of an order of rank 0 to the other roots, counted from 1; an empty order is the last."""
    return f"transfer/orders/{number}"


class _Session:
    """Process groups of all roots with the same engines; an engine has the same rank in all of them."""

    def __init__(self, members: Sequence[str]) -> None:
        self.name, self.members = secrets.token_hex(8), list(members)
        self.alive, self.latest = True, 0


@dataclass(frozen=True)
class _Begun:
    """Running transfer of a closed round."""

    session: _Session
    fresh: bool
    """Whether the session's process groups are new."""
    differs: bool
    """Whether the difference is sent."""


class Outbox:
    """Transfers of rank 0, which is the first root and coordinates the others. Its methods are thread-safe.

    Args:
        device: device of rank 0.
        host: address on which the trainer serves.
        roots: number of roots; the others are `Follower`s.
        bucket_bytes: bucket size of the layout.
        window: see `senders.Rounds`.
        differs: send the difference to engines with the previous version if it is smaller.
        backend: see `senders.RootSender`. Only for one root: the others select it by their device.
    """

    def __init__(
        self,
        device: torch.device,
        host: str,
        *,
        roots: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
        window: float = WINDOW_SECONDS,
        differs: bool = False,
        backend: Backend | None = None,
    ) -> None:
        self._roots, self._bucket_bytes = roots, bucket_bytes
        self._store = links.serve_store(host)
        self._sender = RootSender(
            0,
            device,
            self._store,
            lambda: links.connect_store(ADDRESS, self.port),
            self._report_transfer,
            differs=differs,
            backend=backend,
        )
        self._changed = threading.Condition()
        self._rounds = Rounds(window)
        self._layouts: dict[int, Sequence[TensorInfo]] = {}
        self._known: dict[int, tuple[list[int], Difference | None]] = {}
        """Checksums and differences of requested versions."""
        self.handed: tuple[int, int] | None = None
        """Bytes sent to each engine in the latest round, and bytes of its complete version."""
        self._sessions: dict[str, _Session] = {}
        self._of_round: WeakKeyDictionary[Round, _Begun] = WeakKeyDictionary()
        self._orders = 0
        self._closed = False

    @property
    def port(self) -> int:
        """Port of the store, for the other roots."""
        return int(self._store.port)

    def hold(self, version: int, tensors: Sequence[TensorInfo], buckets: Mapping[int, Tensor]) -> None:
        """Offer a version; every other root keeps its part at the same time.

        Args:
            version: policy version.
            tensors: layout of the version.
            buckets: buckets of the first root.
        """
        self._sender.hold(version, buckets)
        with self._changed:
            self._layouts[version] = tensors
            for old in sorted(self._layouts)[:-KEPT_VERSIONS]:
                del self._layouts[old]
                self._known.pop(old, None)
                for root in range(self._roots):
                    self._store.delete_key(checksum_key(old, root))
            for session in list(self._sessions.values()):
                if not session.alive or session.latest < version - IDLE_VERSIONS:
                    self._end_session(session)

    def offer(self, request: TransferRequest) -> TransferOffer:
        """Wait until the round of the request closes, start the transfer and describe it.

        Raises:
            NotHeldError: the version is not in memory.
        """
        # Join the round of the version and wait until it closes. The version may be dropped from memory meanwhile.
        with self._changed:
            self._insist_on(request.version)
            one = self._rounds.enter(
                request.version,
                request.engine,
                request.session,
                alone=request.alone,
                now=time.monotonic(),
                base=request.base,
            )
            self._changed.notify_all()
            while (left := self._rounds.remaining_seconds(one, time.monotonic())) > 0:
                self._changed.wait(left)
            tensors = self._insist_on(request.version)
        # Outside of the lock, because the roots' checksums may take long. The first engine of the round starts the transfer for all.
        checksums, found = self._facts_of(request.version)
        with self._changed:
            first = one not in self._of_round
            begun = self._start_transfer(one, found)
        session = begun.session
        joining = Joining(backend=self._sender.backend, store_port=self.port, members=session.members)
        offer = TransferOffer(
            version=request.version,
            session=session.name,
            joining=joining if begun.fresh else None,
            tensors=list(tensors),
            bucket_bytes=self._bucket_bytes,
            roots=self._roots,
            checksums=checksums,
            difference=found if begun.differs else None,
        )
        self.handed = offer.sent, offer.size
        if first and (begun.fresh or begun.differs):
            groups = " in new groups" if begun.fresh else ""
            logger.info(f"version {request.version} goes to {len(session.members)} engines{groups}: {offer.about()}")
        return offer

    def close(self) -> None:
        """Stop sending, without waiting for running transfers."""
        with self._changed:
            self._closed = True
            self._layouts.clear()
            self._orders += 1
            # The empty order ends the followers, which otherwise wait for the next one.
            self._store.set(order_key(self._orders), "")
        self._sender.close()

    def _insist_on(self, version: int) -> Sequence[TensorInfo]:
        tensors = self._layouts.get(version)
        if tensors is None:
            newest = max(self._layouts, default=None)
            raise NotHeldError(f"version {version} is not in the trainer's memory; the newest is {newest}")
        return tensors

    def _facts_of(self, version: int) -> tuple[list[int], Difference | None]:
        """Wait for the roots' checksums; return the CRC-32 of all buckets and the difference from the previous version."""
        known = self._known.get(version)
        if known is None:
            parts: list[About] = []
            for root in range(self._roots):
                content = links.read_key(self._store, checksum_key(version, root), seconds=CHECKSUM_SECONDS)
                if content is None:
                    raise NotHeldError(
                        f"version {version} is incomplete in the trainer's memory, because root {root} lacks its part"
                    )
                parts.append(About.parse(content))
            whole = sum(tensor.size for tensor in self._insist_on(version))
            known = self._known[version] = (
                in_order([part.checksums for part in parts]),
                version_difference(parts, whole),
            )
        return known

    def _start_transfer(self, one: Round, found: Difference | None) -> _Begun:
        """Return the transfer of a closed round; the first call for a round starts it."""
        if one in self._of_round:
            return self._of_round[one]
        # The groups of a session are reused only if every engine of the round names it: a restarted
        # engine has lost its side of the groups, and a broadcast without it would hang.
        known = self._sessions.get(next(iter(one.members.values())) or "")
        same = known is not None and known.alive and set(one.members) == set(known.members)
        if known is None or not same or set(one.members.values()) != {known.name}:
            for old in list(self._sessions.values()):
                if one.members.keys() & set(old.members):  # its engines join the new session
                    self._end_session(old)
            known, same = _Session(sorted(one.members)), False
            self._sessions[known.name] = known
        # A broadcast sends the same bytes to all engines, so one engine with another base gets all
        # of them the complete version.
        differs = found is not None and set(one.bases.values()) == {found.base}
        begun = self._of_round[one] = _Begun(known, not same, differs)
        known.latest = one.version
        self._send_order(Order(known.name, known.members, one.version, differs=differs))
        return begun

    def _end_session(self, session: _Session) -> None:
        session.alive = False
        self._sessions.pop(session.name, None)
        self._send_order(Order(session.name, [], 0, last=True))

    def _send_order(self, order: Order) -> None:
        if self._closed:
            return
        # Orders are numbered keys: a root that is late reads all of them in order. All roots must
        # send the same versions in the same order, because an engine receives from every root.
        self._sender.carry_out(order)
        self._orders += 1
        self._store.set(order_key(self._orders), json.dumps(asdict(order)))

    def _report_transfer(self, name: str, version: int, sent: bool) -> None:
        with self._changed:
            session = self._sessions.get(name)
            if session is None:
                return
            if sent:
                self._rounds.report_success(version, session.members)
            else:
                # A group with a failed member cannot be used again. The engines ask again and get a
                # new session.
                session.alive = False
                self._rounds.report_failure(session.members)
            self._changed.notify_all()


class Follower:
    """Root other than rank 0, which carries out orders of rank 0.

    Args:
        root: number of the root.
        device: device of this rank.
        port: port of rank 0's store.
        host: address of rank 0. Default: torchrun's master address.
        differs: see `Outbox`.
    """

    def __init__(
        self, root: int, device: torch.device, port: int, host: str | None = None, *, differs: bool = False
    ) -> None:
        address = host or os.environ.get("MASTER_ADDR", ADDRESS)
        self._store = links.connect_store(address, port)
        self._sender = RootSender(
            root, device, self._store, lambda: links.connect_store(address, port), differs=differs
        )
        self._closed = False
        threading.Thread(target=self._follow_orders, name="transfer-orders", daemon=True).start()

    def hold(self, version: int, buckets: Mapping[int, Tensor]) -> None:
        """Keep this root's buckets of a version; see `RootSender.hold`."""
        self._sender.hold(version, buckets)

    def close(self) -> None:
        """Stop sending."""
        self._closed = True
        self._sender.close()

    def _follow_orders(self) -> None:
        number = 0
        try:
            while not self._closed:
                content = links.read_key(
                    self._store, order_key(number + 1), seconds=math.inf, given_up=lambda: self._closed
                )
                if not content:
                    return
                number += 1
                self._sender.carry_out(Order(**json.loads(content)))
        except RuntimeError as error:
            if not self._closed:
                logger.warning(f"lost the connection to rank 0's orders for transfers to engines: {error}")
