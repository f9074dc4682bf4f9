"""Versions sent from the trainer's memory, over gloo, to workers that are threads here."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlrun.protocol.messages.transfer import Joining, NotHeldError, TransferOffer, TransferRequest
from rlrun.trainer.weights.transfer import IDLE_VERSIONS, Outbox

LIMIT = datetime.timedelta(seconds=60)


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    box = Outbox(torch.device("cpu"), "127.0.0.1")
    yield box
    box.close()


def tensors(version: int) -> dict[str, Tensor]:
    return {
        "a.weight": torch.full((3, 2), float(version), dtype=torch.bfloat16),
        "b.count": torch.tensor([version, version + 1]),
    }


class Engine:
    """The workers of one engine."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
        self.groups: list[dist.ProcessGroupGloo] = []
        self.session: str | None = None

    def request(self, version: int) -> TransferRequest:
        return TransferRequest(version=version, workers=self.workers, session=self.session)

    def receive(self, offer: TransferOffer) -> list[dict[str, Tensor]]:
        """What each worker gets."""
        got: list[dict[str, Tensor]] = [{} for _ in range(self.workers)]
        if offer.joining is not None:
            self.groups = [None] * self.workers  # type: ignore[list-item]

        def work(index: int) -> None:
            if offer.joining is not None:
                self.groups[index] = join(offer.joining, index + 1)
            for info in offer.tensors:
                tensor = torch.empty(info.shape, dtype=getattr(torch, info.dtype))
                self.groups[index].broadcast(tensor, 0).wait()
                got[index][info.name] = tensor

        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        self.session = offer.session
        return got


def join(joining: Joining, rank: int) -> dist.ProcessGroupGloo:
    assert joining.store_port is not None
    store = dist.TCPStore("127.0.0.1", joining.store_port, joining.world_size, timeout=LIMIT)
    return dist.ProcessGroupGloo(store, rank, joining.world_size, LIMIT)


def same(got: dict[str, Tensor], version: int) -> bool:
    wanted = tensors(version)
    return got.keys() == wanted.keys() and all(
        got[n].dtype == wanted[n].dtype and torch.equal(got[n], wanted[n]) for n in wanted
    )


def test_every_worker_of_every_engine_gets_what_it_asks_for(outbox: Outbox) -> None:
    first, second = Engine(workers=2), Engine()
    outbox.hold(0, tensors(0))
    offer = outbox.offer(first.request(0))
    assert offer.joining is not None
    assert offer.joining.world_size == 3
    assert all(same(got, 0) for got in first.receive(offer))

    outbox.hold(1, tensors(1))
    again = outbox.offer(first.request(1))
    assert (again.session, again.joining) == (offer.session, None), "the group is kept"
    assert all(same(got, 1) for got in first.receive(again))
    late = outbox.offer(second.request(0))
    assert late.session != offer.session
    assert same(second.receive(late)[0], 0), "the version before is still there"


def test_a_version_that_is_not_in_memory_is_refused_by_name(outbox: Outbox) -> None:
    with pytest.raises(NotHeldError, match="version 3 is not in the trainer's memory; the newest is None"):
        outbox.offer(Engine().request(3))
    for version in range(4):
        outbox.hold(version, tensors(version))
    with pytest.raises(NotHeldError, match=r"version 1 .* newest is 3"):
        outbox.offer(Engine().request(1))


def test_an_engine_that_hangs_holds_up_no_other_and_finds_its_way_back(outbox: Outbox) -> None:
    hanging, healthy = Engine(), Engine()
    outbox.hold(1, tensors(1))
    stuck = outbox.offer(hanging.request(1))  # and never joins
    assert same(healthy.receive(outbox.offer(healthy.request(1)))[0], 1)
    hanging.session = "of a trainer before"
    fresh = outbox.offer(hanging.request(1))
    assert fresh.session != stuck.session
    assert same(hanging.receive(fresh)[0], 1)


def test_the_group_of_an_engine_that_is_gone_is_given_up(outbox: Outbox) -> None:
    gone, stays = Engine(), Engine()
    outbox.hold(0, tensors(0))
    gone.receive(outbox.offer(gone.request(0)))
    stays.receive(outbox.offer(stays.request(0)))
    for version in range(1, IDLE_VERSIONS + 2):
        outbox.hold(version, tensors(version))
        stays.receive(outbox.offer(stays.request(version)))
    assert outbox.offer(stays.request(version)).joining is None
    assert outbox.offer(gone.request(version)).joining is not None
