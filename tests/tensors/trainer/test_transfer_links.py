"""Deadlines of weight transfer groups: a partner that never comes, or hangs, ends in an error that names it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from rlrun.protocol.messages.trainer_channel import Backend
from rlrun.trainer.weights.senders import Order, RootSender
from rlrun.transport import links

CPU = torch.device("cpu")
SECONDS = 0.3
LATEST = 20.0
"""Limit of a test for a wait of `SECONDS` on a busy machine, in seconds."""


@pytest.fixture
def forever() -> Iterator[threading.Event]:
    """Return an event that nothing sets before the end of the test."""
    event = threading.Event()
    yield event
    event.set()


class Stream:
    """Stand-in for `torch.cuda.Stream`."""

    def __init__(self, *_: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class NcclStandIn:
    """Functions of `torch.cuda.nccl`; `hang` names the one that never returns."""

    def __init__(self, hang: str, forever: threading.Event) -> None:
        self._hang, self._forever = hang, forever

    def unique_id(self) -> bytes:
        return b"id"

    def init_rank(self, *_: object) -> object:
        return self._call("init_rank")

    def broadcast(self, *_: object, **__: object) -> object:
        return self._call("broadcast")

    def all_reduce(self, *_: object, **__: object) -> object:
        return self._call("all_reduce")

    def _call(self, name: str) -> object:
        if self._hang == name:
            self._forever.wait()
        return name


class Event:
    """Stand-in for `torch.cuda.Event`, which is never done if `done` is false."""

    done = True

    def record(self, *_: object) -> None: ...

    def query(self) -> bool:
        return self.done


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, forever: threading.Event) -> Callable[[str], None]:
    """Return a function that replaces CUDA; the function of NCCL with the given name hangs."""

    def replace(hang: str) -> None:
        monkeypatch.setattr(torch.cuda, "nccl", NcclStandIn(hang, forever))
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(Event, "done", hang != "stream")

    return replace


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SECONDS", SECONDS)


def join(backend: Backend, rank: int, store: dist.Store) -> links.Link:
    return links.join_group(backend, store, "group", rank=rank, members=["e-0", "e-1"], device=CPU)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(
    ("rank", "absent"),
    [(0, "engine e-0, engine e-1 did not join"), (1, "the trainer, engine e-1 did not")],
)
def test_absent_member_is_named_after_the_deadline(
    backend: Backend, rank: int, absent: str, stand_in: Callable[[str], None]
) -> None:
    stand_in("init_rank")
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"^{absent}.* within 0.3 s; look at"):
        join(backend, rank, dist.HashStore())
    assert SECONDS <= time.monotonic() - started < LATEST


def test_only_the_absent_member_is_named() -> None:
    store = dist.HashStore()
    dist.PrefixStore("group", store).set("member/1", "1")
    with pytest.raises(RuntimeError, match=r"^engine e-1 did not join .* look at its log, and at network policies"):
        join("gloo", 0, store)


def use_link(store: dist.Store, *, meets_only: bool) -> None:
    link = join("nccl", 0, store)
    if not meets_only:
        link.broadcast(torch.zeros(4, dtype=torch.uint8))
    link.meet()


@pytest.mark.parametrize(
    ("hang", "action"),
    [
        ("init_rank", "connect to"),
        ("broadcast", "receive a buffer of"),
        ("all_reduce", "confirm a version of"),
        ("stream", ""),
    ],
)
def test_nccl_that_hangs_ends_after_the_deadline(hang: str, action: str, stand_in: Callable[[str], None]) -> None:
    stand_in(hang)
    store = dist.HashStore()
    for rank in (1, 2):
        dist.PrefixStore("group", store).set(f"member/{rank}", "1")
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"engine e-0, engine e-1 did not {action}.* within 0.3 s; .* their logs"):
        use_link(store, meets_only=hang == "all_reduce")
    assert time.monotonic() - started < LATEST


def test_error_of_nccl_is_not_hidden(stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in("nothing")
    store = dist.HashStore()
    for rank in (1, 2):
        dist.PrefixStore("group", store).set(f"member/{rank}", "1")
    link = join("nccl", 0, store)
    link.broadcast(torch.zeros(4, dtype=torch.uint8))
    link.meet()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("NCCL error 5")

    monkeypatch.setattr(torch.cuda.nccl, "all_reduce", fail)
    with pytest.raises(RuntimeError, match="NCCL error 5"):
        link.meet()


def test_root_reports_engines_that_never_join() -> None:
    reported: list[tuple[str, int, bool]] = []
    done = threading.Event()

    def report(session: str, version: int, sent: bool) -> None:
        reported.append((session, version, sent))
        done.set()

    store = dist.HashStore()
    sender = RootSender(1, CPU, store, lambda: store, report)
    sender.hold(3, {0: torch.zeros(4, dtype=torch.uint8)})
    started = time.monotonic()
    sender.carry_out(Order("s", ["e-0"], 3))
    assert done.wait(LATEST)
    assert time.monotonic() - started >= 2 * SECONDS, "the second root waits twice as long"
    assert reported == [("s", 3, False)]
    sender.close()
