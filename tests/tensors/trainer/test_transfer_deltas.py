"""Weight differences sent over gloo from two roots: bitwise equal, or sent as a whole version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlrun.inference.weights.incoming import DamagedError
from tests.tensors.trainer.test_transfer import Engine, Trainer

ELEMENTS = 4000
FULL = 6 * 2 * ELEMENTS + 16


def weights(seed: int) -> dict[str, Tensor]:
    """Return a base version: six bfloat16 buckets and one of integers."""
    random = torch.Generator().manual_seed(seed)
    found = {f"layer.{index}": torch.randn(ELEMENTS, generator=random).bfloat16() for index in range(6)}
    return found | {"steps": torch.tensor([seed, seed + 1])}


def change_weights(before: Mapping[str, Tensor], seed: int, share: float = 0.01) -> dict[str, Tensor]:
    """Return a version with a share of changed elements; the first layer is unchanged, the second changes completely."""
    random = torch.Generator().manual_seed(seed)
    after = {name: tensor.clone() for name, tensor in before.items()}
    for name in list(after)[2:6]:
        after[name][torch.rand(ELEMENTS, generator=random) < share] *= -1.01
    after["layer.1"] = after["layer.1"] * 1.5 + 1
    return after


@pytest.fixture
def trainers() -> Iterator[list[Trainer]]:
    """Trainers of an attempt and of the next one."""
    opened = [Trainer(differs=True) for _ in range(2)]
    yield opened
    for one in opened:
        one.close()


@pytest.fixture
def trainer(trainers: list[Trainer]) -> Trainer:
    return trainers[0]


MakeEngine = Callable[[str], Engine]


@pytest.fixture
def make_engine(trainer: Trainer, tmp_path: Path) -> Iterator[MakeEngine]:
    made: list[Engine] = []
    with ThreadPoolExecutor(8) as pool:

        def make(name: str) -> Engine:
            made.append(Engine(trainer, pool, tmp_path, name, keeps=True))
            return made[-1]

        yield make
        for engine in made:
            if engine.incoming is not None:
                engine.incoming.abort()
            engine.staging.close()
    assert list(tmp_path.iterdir()) == [], "shared memory is given back"


def same(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return got.keys() == wanted.keys() and all(
        got[n].dtype == wanted[n].dtype and torch.equal(got[n].view(torch.uint8), wanted[n].view(torch.uint8))
        for n in wanted
    )


def sent(engine: Engine) -> int:
    """Return the number of bytes of the last transfer."""
    return engine.offers[-1].sent


def test_engines_with_previous_version_receive_differences(trainer: Trainer, make_engine: MakeEngine) -> None:
    engines = [make_engine(name) for name in "ab"]
    now, sizes = weights(0), []
    for version in range(4):
        now = change_weights(now, version) if version else now
        trainer.hold_tensors(version, now)
        for future in [engine.begin(version) for engine in engines]:
            assert same(future.result(60), now)
        sizes.append({sent(engine) for engine in engines})
        assert trainer.outbox.handed == (sent(engines[0]), FULL)
    assert sizes[0] == {FULL}
    for size in sizes[1:]:
        assert 2 * ELEMENTS < min(size) == max(size) < 2 * ELEMENTS + 0.05 * FULL, "one bucket is whole, one nothing"
    assert engines[0].offers[-1].difference is not None
    assert sorted(engines[0].offers[-1].difference.sizes)[:2] == [0, 0], "one layer, and the integers"
    folder = engines[0].staging.whole
    assert folder is not None
    assert [path.name for path in engines[0].staging._process_folder().glob("v*")] == [folder.folder.name], (
        "one version lies there"
    )


def test_engine_without_base_makes_its_round_whole(trainer: Trainer, make_engine: MakeEngine) -> None:
    steady, skips = make_engine("steady"), make_engine("skips")
    versions = [weights(0)]
    versions += [change_weights(versions[0], 1)]
    versions += [change_weights(versions[1], 2)]
    versions += [change_weights(versions[2], 3)]
    trainer.hold_tensors(0, versions[0])
    for future in [engine.begin(0) for engine in (steady, skips)]:
        assert same(future.result(60), versions[0])
    trainer.hold_tensors(1, versions[1])
    steady.alone = True  # this engine waits for no other
    assert same(steady.fetch(1), versions[1])
    assert sent(steady) < FULL
    trainer.hold_tensors(2, versions[2])
    for future in [engine.begin(2) for engine in (steady, skips)]:
        assert same(future.result(60), versions[2])
    assert sent(steady) == sent(skips) == FULL
    late = make_engine("late")
    late.alone = True
    trainer.hold_tensors(3, versions[3])
    assert same(late.fetch(3), versions[3])
    assert sent(late) == FULL


def test_version_of_another_attempt_is_not_a_base(trainers: list[Trainer], make_engine: MakeEngine) -> None:
    before, again = trainers
    engine = make_engine("a")
    versions = [weights(0), change_weights(weights(0), 1)]
    for version, tensors in enumerate(versions):
        before.hold_tensors(version, tensors)
        assert same(engine.fetch(version), tensors)
    # The next attempt trains version 1 again with other values, and then version 2.
    other = change_weights(versions[0], 7)
    following = change_weights(other, 8)
    engine.trainer, engine.incoming = again, None
    again.hold_tensors(1, other)
    again.hold_tensors(2, following)
    assert same(engine.fetch(2), following)
    assert sent(engine) == FULL, "its version 1 is not this trainer's"
    third = change_weights(following, 9)
    again.hold_tensors(3, third)
    assert same(engine.fetch(3), third)
    assert sent(engine) < FULL


@pytest.mark.parametrize("damage", ["base", "difference"])
def test_damaged_difference_is_refused_and_sent_whole_later(
    damage: str, trainer: Trainer, make_engine: MakeEngine
) -> None:
    engine, old = make_engine("a"), weights(0)
    new = change_weights(old, 1)
    trainer.hold_tensors(0, old)
    assert same(engine.fetch(0), old)
    whole = engine.staging.whole
    assert whole is not None
    if damage == "base":
        path = sorted(whole.folder.glob("*.safetensors"))[0]  # the next version does not change this bucket
        path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    trainer.hold_tensors(1, new)
    if damage == "difference":
        part = trainer.outbox._sender._parts[1]
        for content in part.travels.values():
            content[-1:] ^= 1
    with pytest.raises(DamagedError, match="has checksum"):
        engine.fetch(1)
    assert engine.staging.whole is None
    assert not list(engine.staging._process_folder().glob("v*")), "nothing of it is left to be loaded"
    engine.incoming = None
    assert same(engine.fetch(1), new)
    assert sent(engine) == FULL


def test_fully_changed_version_is_sent_whole(trainer: Trainer, make_engine: MakeEngine) -> None:
    engine = make_engine("a")
    for version in range(2):
        trainer.hold_tensors(version, weights(version))
        assert same(engine.fetch(version), weights(version))
        assert sent(engine) == FULL
