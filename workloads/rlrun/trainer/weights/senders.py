"""A root's side of weight transfers: the choice of receivers, and one sending thread per session.

The choice is pure; the caller passes the time. A round sends one version to the engines that request it while the round is open. It closes
when all expected engines have joined, or after the window; later engines get their own rounds. An engine whose transfer failed gets its
own rounds until a transfer succeeds, so that it cannot break the transfer of others again.

A root has the buckets of the newest versions in host memory. Training continues during a transfer. Every root has its own process group
with the engines of a session, and does not wait for other roots.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor

from rlrun.protocol.messages.trainer_channel import Backend, group_name
from rlrun.trainer.weights.delta_writer import About, Part, compare_buckets
from rlrun.transport import links

WINDOW_SECONDS = 1.0
"""Longest wait of a round for engines that received the previous version; later engines get the version in a separate round."""


@dataclass(eq=False)
class Round:
    """Transfer of one version to several engines."""

    version: int
    opened: float
    members: dict[str, str | None] = field(default_factory=dict)
    """Engines, each with its current session."""
    bases: dict[str, int | None] = field(default_factory=dict)
    """Checksum of the version in each engine's shared memory."""
    closed: bool = False


class Rounds:
    """Open rounds, and state of the engines.

    Args:
        window: longest time that a round is open, in seconds.
    """

    def __init__(self, window: float = WINDOW_SECONDS) -> None:
        self._window = window
        self._latest: dict[str, int] = {}
        """Version of each engine's last round."""
        self._alone: set[str] = set()
        self._open: dict[int, Round] = {}

    def enter(
        self, version: int, engine: str, session: str | None, *, alone: bool, now: float, base: int | None = None
    ) -> Round:
        """Add an engine to the round of a version. An engine that must be alone gets a new closed round."""
        if alone:
            self._alone.add(engine)
        # A transfer to this engine has failed. Alone it cannot make the other engines of a round
        # fail again; a success ends that.
        if engine in self._alone:
            return Round(version, now, {engine: session}, {engine: base}, closed=True)
        found = self._open.setdefault(version, Round(version, now))
        found.members[engine], found.bases[engine] = session, base
        # All engines that are known to be behind have asked, so the window need not end.
        if not self._missing_engines(found):
            self._close_round(found)
        return found

    def remaining_seconds(self, one: Round, now: float) -> float:
        """Return the seconds until the round closes; close it at 0."""
        remaining = one.opened + self._window - now
        if not one.closed and remaining <= 0:
            self._close_round(one)
        return 0.0 if one.closed else remaining

    def report_success(self, version: int, engines: Iterable[str]) -> None:
        """Report that the engines have received a version; they may share rounds again."""
        self._alone -= set(engines)
        self._latest |= dict.fromkeys(engines, version)

    def report_failure(self, engines: Iterable[str]) -> None:
        """Report a failed transfer to the engines; each gets separate rounds."""
        self._alone |= set(engines)

    def _missing_engines(self, one: Round) -> set[str]:
        """Return the engines that the round waits for, because their last version is older."""
        behind = {engine for engine, version in self._latest.items() if version < one.version}
        return behind - self._alone - one.members.keys()

    def _close_round(self, one: Round) -> None:
        one.closed = True
        del self._open[one.version]
        # Forgotten, so that the next rounds do not wait for it.
        for engine in self._missing_engines(
            one
        ):  # the engine has ended or is late; it is added again at its next request
            del self._latest[engine]
        self._latest |= dict.fromkeys(one.members, one.version)


KEPT_VERSIONS = 2
"""Number of versions in memory: the newest, and the previous one, which an engine may still request."""


@dataclass(frozen=True)
class Order:
    """Order to send one version to the engines of a session. The fields are JSON keys of the orders in the store."""

    session: str
    members: list[str]
    """Names of the engines, in the order of their ranks."""
    version: int
    last: bool = False
    """End the session; the order has no version."""
    differs: bool = False
    """Send the difference from the previous version, which all engines of the session have."""


def checksum_key(version: int, root: int) -> str:
    """Return the store's key of the checksums of a root's buckets (JSON, by index)."""
    return f"transfer/checksums/{version}/{root}"


class RootSender:
    """Sender of one root. Its methods are thread-safe.

    Args:
        root: number of the root.
        device: device of this rank.
        store: connection to the store for calls that do not wait.
        connect: function that opens another connection.
        report: callback after each transfer with session, version and success.
        differs: compare each version with the previous one.
        backend: backend of the process groups. Default: NCCL on a GPU, gloo on a CPU.
    """

    def __init__(
        self,
        root: int,
        device: torch.device,
        store: dist.Store,
        connect: Callable[[], dist.Store],
        report: Callable[[str, int, bool], None] = lambda session, version, sent: None,
        *,
        differs: bool = False,
        backend: Backend | None = None,
    ) -> None:
        self._root, self._device, self._report = root, device, report
        self.backend: Backend = backend or ("nccl" if device.type == "cuda" else "gloo")
        """Backend of the process groups."""
        self._store, self._connect = store, connect
        self._lock = threading.Lock()
        self._held: dict[int, Mapping[int, Tensor]] = {}
        self._differs = differs
        self._parts: dict[int, Part] = {}
        """Checksums and differences of the compared versions in memory."""
        self._comparing: threading.Thread | None = None
        self._sessions: dict[str, queue.Queue[Order]] = {}

    def hold(self, version: int, buckets: Mapping[int, Tensor]) -> None:
        """Keep this root's buckets of a version; a thread computes and reports their checksums and differences.

        Args:
            version: policy version.
            buckets: buckets by index, uint8 in host memory.
        """
        with self._lock:
            # Read before the new version is added: the difference refers to the newest version that
            # engines can have.
            before = max(self._held, default=version) if self._differs else version
            base = self._held[before] if before < version else None
            self._held[version] = buckets
            self._parts.pop(version, None)
            for old in sorted(self._held)[:-KEPT_VERSIONS]:
                del self._held[old]
                self._parts.pop(old, None)
            arguments = (version, before, buckets, base, self._comparing)
            self._comparing = threading.Thread(
                target=self._compare_version, args=arguments, name=f"checksums-{version}", daemon=True
            )
            self._comparing.start()

    def carry_out(self, order: Order) -> None:
        """Start to send in a session, after joining it if it is new."""
        with self._lock:
            orders = self._sessions.get(order.session)
            if orders is None:
                if order.last:
                    return
                orders = self._sessions[order.session] = queue.Queue()
                # A thread per session: joining the groups and sending block until every engine
                # takes part, and a hanging engine must not delay the other sessions.
                threading.Thread(
                    target=self._run_session, args=(order, orders), name=f"transfer-{order.session}", daemon=True
                ).start()
            orders.put(order)

    def close(self) -> None:
        """Stop sending, without waiting for running transfers."""
        with self._lock:
            self._held.clear()
            self._parts.clear()
            for name, orders in self._sessions.items():
                orders.put(Order(name, [], 0, last=True))

    def _compare_version(
        self,
        version: int,
        before: int,
        buckets: Mapping[int, Tensor],
        base: Mapping[int, Tensor] | None,
        earlier: threading.Thread | None,
    ) -> None:
        if earlier is not None:
            earlier.join()  # the earlier thread computes the checksums of the previous version
        with self._lock:
            old = self._parts.get(before) if base is not None else None
        part = compare_buckets(buckets, base if old is not None else None)
        with self._lock:
            if version in self._held:
                self._parts[version] = part
        try:
            self._store.set(checksum_key(version, self._root), About.from_part(part, old).dump())
        except RuntimeError as error:  # rank 0 has ended, and with it the attempt
            logger.warning(f"root {self._root}: cannot report the checksums of version {version}: {error}")

    def _run_session(self, first: Order, orders: queue.Queue[Order]) -> None:
        """Send the versions of one session until it ends."""
        link: links.Link | None = None
        version = first.version
        try:
            link = links.join_group(
                self.backend,
                self._connect(),
                group_name(first.session, self._root),
                rank=0,
                members=first.members,
                device=self._device,
                turns=1 + self._root,  # the engines join the groups of all roots one after the other
            )
            while not (order := orders.get()).last:
                version = order.version
                self._send_version(link, order)
                self._report(first.session, version, True)
        except Exception as error:  # the engines fail as well and request new groups
            logger.warning(f"the transfer of version {version} to {len(first.members)} engines failed: {error}")
            self._report(first.session, version, False)
        finally:
            if link is not None:
                link.close()
            with self._lock:
                self._sessions.pop(first.session, None)

    def _send_version(self, link: links.Link, order: Order) -> None:
        with self._lock:
            buckets, part = self._held.get(order.version), self._parts.get(order.version)
        if buckets is None or (order.differs and part is None):
            raise RuntimeError(f"version {order.version} is no longer in the memory of root {self._root}")
        # In the order of indices, in which the engines expect the buckets of each root.
        for index in sorted(buckets):
            sent = buckets[index]
            if order.differs and part is not None and len(part.travels[index]) != sent.numel():
                sent = torch.from_numpy(part.travels[index])
            if sent.numel():
                link.broadcast(sent)
        link.meet()
