"""Transfers of versions from two roots over gloo, to engines in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlrun.inference.weights.incoming import DamagedError, Fetching, Incoming
from rlrun.inference.weights.receive import Groups, Staging
from rlrun.protocol.messages.buckets import Bucket, TensorInfo, plan_buckets
from rlrun.protocol.messages.trainer_channel import NotHeldError, TransferOffer, TransferRequest
from rlrun.trainer.weights.senders import Order
from rlrun.trainer.weights.weight_transfer import IDLE_VERSIONS, Follower, Outbox
from rlrun.transport import links

BUCKET_BYTES = 40
CPU = torch.device("cpu")


def tensors(version: int) -> dict[str, Tensor]:
    """Return tensors for seven buckets: six of one number format and one of another."""
    weights = {f"layer.{index}": torch.full((3, 5), version + index / 8, dtype=torch.bfloat16) for index in range(6)}
    return weights | {"steps": torch.tensor([version, version + 1])}


def layout(held: Mapping[str, Tensor]) -> list[TensorInfo]:
    return [
        TensorInfo(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape))
        for name, tensor in held.items()
    ]


def filled(buckets: Sequence[Bucket], held: Mapping[str, Tensor]) -> dict[int, Tensor]:
    return {
        bucket.index: torch.cat([held[slot.tensor.name].reshape(-1).view(torch.uint8) for slot in bucket.slots])
        for bucket in buckets
    }


class Trainer:
    """Two roots in one process."""

    def __init__(self, *, differs: bool = False) -> None:
        self.outbox = Outbox(CPU, "127.0.0.1", roots=2, bucket_bytes=BUCKET_BYTES, window=60.0, differs=differs)
        self.other = Follower(1, CPU, self.outbox.port, "127.0.0.1", differs=differs)

    def hold(self, version: int, change: Callable[[dict[int, Tensor]], None] = lambda buckets: None) -> None:
        """Hold a version; `change` modifies the sent buckets after their checksums are computed."""
        self.hold_tensors(version, tensors(version), change)

    def hold_tensors(
        self,
        version: int,
        held: Mapping[str, Tensor],
        change: Callable[[dict[int, Tensor]], None] = lambda buckets: None,
    ) -> None:
        """Hold any tensors as a version."""
        buckets = plan_buckets(layout(held), bucket_bytes=BUCKET_BYTES, roots=2)
        parts = [filled([one for one in buckets if one.root == root], held) for root in (0, 1)]
        self.other.hold(version, parts[1])
        self.outbox.hold(version, layout(held), parts[0])
        self.outbox._facts_of(version)
        for part in parts:
            change(part)

    def close(self) -> None:
        self.outbox.close()
        self.other.close()


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    opened = Trainer()
    yield opened
    opened.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as opened:
        yield opened


class Engine:
    """Server of an engine without HTTP to the trainer."""

    def __init__(
        self, trainer: Trainer, pool: ThreadPoolExecutor, memory: Path, name: str, *, keeps: bool = False
    ) -> None:
        self.keeps = keeps
        self.name, self.trainer, self.pool = name, trainer, pool
        self.staging = Staging(memory)
        self.incoming: Groups | None = None
        self.alone = False
        self.joined = 0
        self.offers: list[TransferOffer] = []

    def ask(self, version: int) -> TransferOffer:
        session = None if self.incoming is None else self.incoming.session
        whole = self.staging.whole
        offer = self.trainer.outbox.offer(
            TransferRequest(
                version=version,
                engine=self.name,
                session=session,
                alone=self.alone,
                base=None if whole is None else whole.checksum,
            )
        )
        self.offers.append(offer)
        self.joined += offer.joining is not None
        return offer

    def fetch(self, version: int) -> dict[str, Tensor]:
        """Return the version as a loader of files reads it."""
        offer, self.alone = self.ask(version), True
        work = Fetching(self.name, "127.0.0.1", offer, self.incoming, self.staging)
        self.incoming = None
        folder, self.incoming = work.run()
        self.alone = False
        found: dict[str, Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            found |= {name: tensor.clone() for name, tensor in load_file(path).items()}
        if not self.keeps:
            self.staging.drop_all()
        return found

    def begin(self, version: int) -> Future[dict[str, Tensor]]:
        return self.pool.submit(self.fetch, version)


@pytest.fixture
def make_engine(trainer: Trainer, pool: ThreadPoolExecutor, tmp_path: Path) -> Iterator[Callable[[str], Engine]]:
    made: list[Engine] = []

    def make(name: str) -> Engine:
        made.append(Engine(trainer, pool, tmp_path, name))
        return made[-1]

    yield make
    for engine in made:
        if engine.incoming is not None:
            engine.incoming.abort()
        engine.staging.close()
    assert list(tmp_path.iterdir()) == [], "shared memory is given back"


MakeEngine = Callable[[str], Engine]


def same(got: Mapping[str, Tensor], version: int) -> bool:
    wanted = tensors(version)
    return got.keys() == wanted.keys() and all(
        got[n].dtype == wanted[n].dtype and torch.equal(got[n], wanted[n]) for n in wanted
    )


def all_get(engines: Sequence[Engine], version: int) -> bool:
    return all(same(future.result(60), version) for future in [engine.begin(version) for engine in engines])


def test_one_set_of_groups_serves_all_engines(trainer: Trainer, make_engine: MakeEngine) -> None:
    engines = [make_engine(name) for name in "abc"]
    trainer.hold(0)
    assert all_get(engines, 0)
    trainer.hold(1)
    assert all_get(engines, 1)
    assert len({engine.incoming.session for engine in engines if engine.incoming}) == 1
    joined = [engine.joined for engine in engines]
    trainer.hold(2)
    assert all_get(engines, 2)
    assert [engine.joined for engine in engines] == joined, "the groups are kept"
    assert same(make_engine("late").fetch(1), 1), "the version before is still there, and nobody is waited for"


def test_version_outside_memory_is_refused_by_name(trainer: Trainer, make_engine: MakeEngine) -> None:
    with pytest.raises(NotHeldError, match="version 3 is not in the trainer's memory; the newest is None"):
        make_engine("a").ask(3)
    for version in range(4):
        trainer.hold(version)
    with pytest.raises(NotHeldError, match=r"version 1 .* newest is 3"):
        make_engine("b").ask(1)


def test_hanging_engine_delays_the_others_once(
    trainer: Trainer, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, healthy = make_engine("hanging"), make_engine("healthy")
    trainer.hold(0)
    assert all_get([hanging, healthy], 0)
    trainer.hold(1)
    monkeypatch.setattr(links, "SECONDS", 1.0)
    stuck = healthy.begin(1)
    hanging.ask(1)  # the engine requests the version but never joins
    with pytest.raises(RuntimeError):
        stuck.result(60)
    monkeypatch.undo()
    assert same(healthy.fetch(1), 1), "by itself: the window is a minute"
    hanging.incoming = None
    hanging.alone = True
    assert same(hanging.fetch(1), 1)
    trainer.hold(2)
    assert all_get([hanging, healthy], 2)
    assert hanging.incoming is not None
    assert healthy.incoming is not None
    assert hanging.incoming.session == healthy.incoming.session, "both share groups again"


def join_engines(trainer: Trainer, engines: Sequence[Engine]) -> None:
    """Join the engines in common groups with version 0, then hold 1."""
    trainer.hold(0)
    assert all_get(engines, 0)
    trainer.hold(1)
    assert all_get(engines, 1)


def test_dying_engine_does_not_interrupt_the_others(
    trainer: Trainer, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying, healthy = make_engine("dying"), make_engine("healthy")
    join_engines(trainer, [dying, healthy])
    trainer.hold(2)
    received: list[int] = []
    incoming = dying.incoming
    assert isinstance(incoming, Incoming)
    whole = incoming._links[0].broadcast

    def once(buffer: Tensor) -> None:
        if received:
            raise RuntimeError("killed")
        received.append(buffer.numel())
        whole(buffer)

    monkeypatch.setattr(incoming._links[0], "broadcast", once)
    refused, killed = healthy.begin(2), dying.begin(2)
    for future in (refused, killed):
        with pytest.raises(RuntimeError):
            future.result(60)
    assert received, "on the way"
    assert same(healthy.fetch(2), 2), "without the other"


@pytest.mark.parametrize("damage", ["bit", "order"])
def test_damaged_transfer_is_refused_completely(damage: str, trainer: Trainer, make_engine: MakeEngine) -> None:
    def change(buckets: dict[int, Tensor]) -> None:
        if 1 not in buckets:
            return
        if damage == "bit":
            buckets[3][7] ^= 1
        else:
            buckets[1], buckets[3] = buckets[3], buckets[1]

    engine = make_engine("a")
    trainer.hold(0)
    assert same(engine.fetch(0), 0)
    trainer.hold(1, change)
    with pytest.raises(DamagedError, match=r"bucket [13] \(layer\.[13] and following tensors\) has checksum"):
        engine.fetch(1)
    assert not list(engine.staging._process_folder().glob("v*")), "nothing of it is left to be loaded"
    trainer.hold(2)
    assert same(engine.fetch(2), 2)


def test_dying_root_leaves_no_partial_version(
    trainer: Trainer, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [make_engine(name) for name in "ab"]
    join_engines(trainer, engines)

    def dead(link: links.Link, order: Order) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(trainer.other._sender, "_send_version", dead)
    trainer.hold(2)
    for future in [engine.begin(2) for engine in engines]:
        with pytest.raises(RuntimeError):
            future.result(60)
    assert not any(list(engine.staging._process_folder().glob("v*")) for engine in engines)


def test_groups_of_departed_engine_are_destroyed(trainer: Trainer, make_engine: MakeEngine) -> None:
    gone, stays = make_engine("gone"), make_engine("stays")
    trainer.hold(0)
    assert same(gone.fetch(0), 0)
    assert gone.incoming is not None
    assert trainer.outbox._sessions.keys() == {gone.incoming.session}
    stays.alone = True  # this engine waits for no other
    for version in range(1, IDLE_VERSIONS + 2):
        trainer.hold(version)
        assert same(stays.fetch(version), version)
        stays.alone = True
    assert stays.incoming is not None
    assert trainer.outbox._sessions.keys() == {stays.incoming.session}


def test_transfer_threads_end_with_the_trainer(trainer: Trainer, make_engine: MakeEngine) -> None:
    trainer.hold(0)
    assert same(make_engine("a").fetch(0), 0)
    trainer.close()
    for thread in threading.enumerate():
        if thread.name.startswith("transfer-"):
            thread.join(120)
            assert not thread.is_alive()
