"""Process groups: groups on the loopback interface of one machine, and broadcasts of host memory from a root to engines.

torch's store listens on every address of the machine, whatever address it is given, and has no authentication: any client can read and
write the values that the ranks exchange. Groups of one machine are therefore restricted to loopback.

A broadcast has a group of one root (a process of the trainer) and the engines: gloo between CPUs, NCCL between GPUs. The trainer's roots
and the engines' servers use the same code. The NCCL link needs a GPU, so the tests of a CPU machine do not cover it; it broadcasts the
same buffers in the same order as the gloo link.
"""

from __future__ import annotations

import datetime
import ipaddress
import queue
import socket
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from typing import Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rlrun.protocol.messages.trainer_channel import SECONDS, Backend

ADDRESS, INTERFACE = "127.0.0.1", "lo"
ResultT = TypeVar("ResultT")


def is_loopback(host: str) -> bool:
    """Return whether an address, or `localhost`, can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def loopback_store(
    host_name: str, port: int, world_size: int | None = None, is_master: bool = False, *args: object, **options: object
) -> dist.TCPStore:
    """Return a `torch.distributed.TCPStore` whose server listens on loopback only.

    Args:
        host_name, port, world_size, is_master, args, options: arguments of `TCPStore`. Port 0 selects a free port.

    Raises:
        OSError: the port is taken.
    """
    if is_master:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((ADDRESS, port))
            listener.listen(socket.SOMAXCONN)
            port = listener.getsockname()[1]
        except OSError:
            listener.close()
            raise
        options["master_listen_fd"] = listener.detach()  # the store closes it
    return dist.TCPStore(ADDRESS, port, world_size, is_master, *args, **options)


def stay_on_loopback(env: MutableMapping[str, str]) -> None:
    """Restrict torchrun's static rendezvous of this process, and the ranks' connections to it, to loopback. torchrun has no option for it.

    Args:
        env: environment variables that the ranks inherit; existing interface names are kept.
    """
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        env.setdefault(name, INTERFACE)
    static_tcp_rendezvous.TCPStore = loopback_store


_POLL_SECONDS = 0.0005
"""Time between two queries of a CUDA event."""
_LOOK_SECONDS = 0.02
"""Time between two checks of a store's key."""


class Link(Protocol):
    """Connection of one member to its group; rank 0 is the root."""

    def broadcast(self, buffer: Tensor) -> None:
        """Copy the buffer of rank 0 into the buffers of all other members.

        Args:
            buffer: host memory, `[n]` uint8 with n > 0.

        Raises:
            RuntimeError: the group is broken.
        """
        ...

    def meet(self) -> None:
        """Wait for all members.

        Raises:
            RuntimeError: the group is broken.
        """
        ...

    def close(self) -> None:
        """Leave the group. Members that send to this member or wait for it get an error and leave as well."""
        ...


def serve_store(host: str) -> dist.TCPStore:
    """Start the store through which members find each other, on a free port.

    Args:
        host: address on which the trainer serves; for a loopback address the store listens on loopback only.
    """
    store = loopback_store if is_loopback(host) else dist.TCPStore
    return store(host, 0, None, True, timeout=datetime.timedelta(seconds=SECONDS), wait_for_workers=False)


def connect_store(host: str, port: int) -> dist.TCPStore:
    """Open a separate connection to a store; a shared connection is blocked while another thread waits on it."""
    address = ADDRESS if is_loopback(host) else host
    return dist.TCPStore(address, port, None, False, timeout=datetime.timedelta(seconds=SECONDS))


def read_key(
    store: dist.Store, key: str, *, seconds: float, given_up: Callable[[], bool] = lambda: False
) -> bytes | None:
    """Wait for a key and return its value, or None after `seconds` or if `given_up` returns true.

    The function polls, because a wait inside the store cannot be interrupted and does not notice a closed connection.
    """
    deadline = time.monotonic() + seconds
    while not store.check([key]):
        if given_up() or time.monotonic() > deadline:
            return None
        time.sleep(_LOOK_SECONDS)
    value: bytes = store.get(key)
    return value


def join_group(
    backend: Backend,
    store: dist.Store,
    name: str,
    *,
    rank: int,
    members: Sequence[str],
    device: torch.device,
    turns: int = 1,
) -> Link:
    """Join a group and wait for all of its members.

    The members meet in the store before they connect to each other: NCCL waits without a limit for an absent member.

    Args:
        backend: transport between the members.
        store: store through which members find each other.
        name: unique name of the group.
        rank: number of this member; 0 is the root.
        members: names of the other members, the engines of rank 1 and following.
        device: the GPU that NCCL uses.
        turns: number of groups that the other members join one after the other, up to this one; the time limit is per group.

    Raises:
        RuntimeError: a member did not join in time; the message names it.
    """
    own, names = dist.PrefixStore(name, store), ["the trainer", *(f"engine {member}" for member in members)]
    _meet_members(own, rank, names, SECONDS * turns)
    if backend == "gloo":
        return _GlooLink(own, rank, len(names))
    return _NcclLink(own, rank, names, device)


def _meet_members(store: dist.Store, rank: int, names: Sequence[str], seconds: float) -> None:
    """Announce this member, and wait until all others are announced."""
    store.set(f"member/{rank}", "1")
    absent, deadline = set(range(len(names))), time.monotonic() + seconds
    while absent := {other for other in absent if not store.check([f"member/{other}"])}:
        if time.monotonic() > deadline:
            raise RuntimeError(_describe_absence([names[other] for other in sorted(absent)], "join", seconds))
        time.sleep(_LOOK_SECONDS)


def _describe_absence(names: Sequence[str], action: str, seconds: float) -> str:
    log = "its log" if len(names) == 1 else "their logs"
    return (
        f"{', '.join(names)} did not {action} the weight transfer group within {seconds:g} s; look at {log}, and at network policies "
        "between trainer and engines"
    )


class _GlooLink:
    """Link over gloo, which sends host memory directly."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        limit = datetime.timedelta(seconds=SECONDS)
        self._group: dist.ProcessGroupGloo | None = dist.ProcessGroupGloo(store, rank, world_size, limit)

    def broadcast(self, buffer: Tensor) -> None:
        self._open_group().broadcast(buffer, 0).wait()

    def meet(self) -> None:
        self._open_group().allreduce(torch.zeros(1, dtype=torch.int32)).wait()

    def close(self) -> None:
        self._group = None  # its connections close when no thread of this process waits in it

    def _open_group(self) -> dist.ProcessGroupGloo:
        group = self._group
        if group is None:
            raise RuntimeError("the group was left")
        return group


class _NcclLink:
    """Link over NCCL, which sends only GPU memory: each buffer is copied through a buffer on the GPU (`_staged`)."""

    def __init__(self, store: dist.Store, rank: int, names: Sequence[str], device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._others = [name for other, name in enumerate(names) if other != rank]
        torch.cuda.set_device(device)
        if rank == 0:
            store.set("id", torch.cuda.nccl.unique_id())
        identity = store.get("id")  # waits for at most the store's time limit
        self._communicator: object = self._within_limit(
            "connect to", lambda: torch.cuda.nccl.init_rank(len(names), identity, rank)
        )
        self._stream = torch.cuda.Stream(device)
        self._staged = torch.empty(0, dtype=torch.uint8, device=device)

    def broadcast(self, buffer: Tensor) -> None:
        self._within_limit("receive a buffer of", lambda: self._broadcast_staged(buffer))

    def meet(self) -> None:
        self._within_limit("confirm a version of", self._sum_ones)

    def close(self) -> None:
        self._communicator = None

    def _within_limit(self, action: str, act: Callable[[], ResultT]) -> ResultT:
        """Call a function of NCCL in a thread, because it may wait in the driver or for a member that has ended, without a limit.

        After the time limit the thread is left behind: NCCL cannot abort it. It ends with the process.
        """
        done: queue.Queue[tuple[ResultT | None, BaseException | None]] = queue.Queue(1)

        def run() -> None:
            try:
                torch.cuda.set_device(self._device)  # of this thread
                done.put((act(), None))
            except BaseException as error:
                done.put((None, error))

        threading.Thread(target=run, name="nccl-link", daemon=True).start()
        try:
            result, error = done.get(timeout=SECONDS)
        except queue.Empty:
            raise RuntimeError(_describe_absence(self._others, action, SECONDS)) from None
        if error is not None:
            raise error
        return cast(ResultT, result)

    def _broadcast_staged(self, buffer: Tensor) -> None:
        if self._staged.numel() < buffer.numel():
            self._staged = torch.empty(buffer.numel(), dtype=torch.uint8, device=self._device)
        staged = self._staged[: buffer.numel()]
        with torch.cuda.stream(self._stream):
            if self._rank == 0:
                staged.copy_(buffer, non_blocking=True)
            torch.cuda.nccl.broadcast([staged], streams=[self._stream], comms=[self._communicator])
            if self._rank != 0:
                buffer.copy_(staged, non_blocking=True)
        self._wait_for_stream()

    def _sum_ones(self) -> None:
        with torch.cuda.stream(self._stream):
            one = torch.zeros(1, device=self._device)
            torch.cuda.nccl.all_reduce([one], streams=[self._stream], comms=[self._communicator])
        self._wait_for_stream()

    def _wait_for_stream(self) -> None:
        """Wait for the stream with a time limit, because a collective with a dead member never ends."""
        done = torch.cuda.Event()
        done.record(self._stream)
        deadline = time.monotonic() + SECONDS
        while not done.query():
            if time.monotonic() > deadline:
                raise RuntimeError(_describe_absence(self._others, "respond in", SECONDS))
            time.sleep(_POLL_SECONDS)
