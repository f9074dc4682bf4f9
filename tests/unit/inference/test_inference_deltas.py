"""Versions rebuilt from differences on the volume: bit-equal, or refused without a change of the engine."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlrun.inference.weights import receive as staging_module
from rlrun.inference.weights.delta_folders import Rebuilder, StoredTensors
from rlrun.inference.weights.preflight import INDEX, FolderError
from rlrun.inference.weights.receive import NoRoomError, RefusedError, Staging
from rlrun.protocol.files.paths import COMPLETE, RunPaths
from rlrun.protocol.messages.buckets import MANIFEST, DeltaFiles, TensorInfo, plan_buckets, root_file, version_checksum
from rlrun.protocol.messages.packed_columns import Bytes, encode_difference

NAMES = ("a", "b", "c", "d")
TENSORS = [TensorInfo(name=name, dtype="bfloat16", shape=[500]) for name in NAMES]
BUCKETS = plan_buckets(TENSORS, bucket_bytes=1000, roots=2)
SHAPES = dict.fromkeys(NAMES, (500,))


def bodies(seed: int) -> list[Bytes]:
    return [np.random.default_rng([seed, bucket.index]).integers(0, 256, bucket.size, np.uint8) for bucket in BUCKETS]


def stepped(before: list[Bytes], seed: int) -> list[Bytes]:
    """Return the next version: the first bucket is unchanged, the second one is new, and a few elements of the others differ."""
    after, rng = [body.copy() for body in before], np.random.default_rng(seed)
    after[1] = rng.integers(0, 256, len(after[1]), np.uint8)
    for body in after[2:]:
        body[rng.integers(0, len(body), 5)] ^= 1
    return after


class Trainer:
    """Writer of versions like the trainer of an attempt, with the same bytes of differences but without torch and ranks."""

    def __init__(self, root: Path, attempt: int = 1) -> None:
        self.paths, self.attempt = RunPaths(root), attempt
        self.last: tuple[int, list[Bytes], bool, bool] | None = None

    def whole(self, step: int, now: list[Bytes]) -> Path:
        """Write a model folder in two files that are not buckets."""
        path = self.paths.version(step, self.attempt)
        path.mkdir(parents=True)
        for number, members in enumerate((BUCKETS[::2], BUCKETS[1::2])):
            table, content = {}, b""
            for bucket in members:
                end = len(content) + bucket.size
                table[bucket.slots[0].tensor.name] = {
                    "dtype": "BF16",
                    "shape": [500],
                    "data_offsets": [len(content), end],
                }
                content += now[bucket.index].tobytes()
            head = json.dumps({"__metadata__": {"format": "pt"}} | table).encode()
            (path / f"{number}.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + content)
        (path / COMPLETE).touch()
        return path

    def publish(self, step: int, now: list[Bytes], *, whole: bool = False) -> Path:
        """Return the folder that engines receive."""
        written, last = whole or self.last is None, self.last
        path = self.whole(step, now) if written else None
        self.last = step, now, written, last is not None
        if last is None:
            assert path is not None
            return path
        before, old, before_whole, before_delta = last
        travels = [encode_difference(a, b, most=len(b) // 2) for a, b in zip(old, now, strict=True)]
        sent = [b if one is None else one for one, b in zip(travels, now, strict=True)]
        delta = self.paths.delta(step, self.attempt)
        delta.mkdir()
        for root in (0, 1):
            mine = [sent[bucket.index].tobytes() for bucket in BUCKETS if bucket.root == root]
            (delta / root_file(root)).write_bytes(b"".join(mine))
        about = DeltaFiles(
            version=step,
            tensors=TENSORS,
            bucket_bytes=1000,
            roots=2,
            checksums=[zlib.crc32(body) for body in now],
            sizes=[len(one) for one in sent],
            base=version_checksum(zlib.crc32(body) for body in old),
            before=self.paths.delta(before, self.attempt).name if before_delta else None,
            whole_base=self.paths.version(before, self.attempt).name if before_whole else None,
            whole=None if path is None else path.name,
        )
        (delta / MANIFEST).write_text(about.model_dump_json())
        (delta / COMPLETE).touch()
        return delta


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "run")


MakeEngine = Callable[[], Rebuilder]


@pytest.fixture
def make_engine(tmp_path: Path) -> MakeEngine:
    memory = tmp_path / "memory"
    memory.mkdir()
    return lambda: Rebuilder(expected=SHAPES, staging=Staging(memory))


def holds(engine: Rebuilder, published: Path, wanted: list[Bytes]) -> bool:
    """Return whether the folder that vLLM loads equals the version bit for bit and is in memory only once."""
    folder = engine.make(published)
    assert list(engine._staging._process_folder().glob("v*")) == [folder]
    assert sorted(json.loads((folder / INDEX).read_text())["weight_map"]) == list(NAMES)
    stored, found = StoredTensors(folder), []
    for bucket in BUCKETS:
        found.append(np.zeros(bucket.size, np.uint8))
        stored.fill(bucket, found[-1])
    return all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_safetensors_file_with_damaged_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(FolderError, match=r"model\.safetensors is not a complete safetensors file"):
        StoredTensors(tmp_path)


def run_of(trainer: Trainer, steps: int, whole: frozenset[int] = frozenset()) -> tuple[list[list[Bytes]], list[Path]]:
    versions = [bodies(0)]
    for step in range(1, steps):
        versions.append(stepped(versions[-1], step))
    return versions, [trainer.publish(step, now, whole=step in whole) for step, now in enumerate(versions)]


def test_each_version_is_rebuilt_from_its_predecessor(trainer: Trainer, make_engine: MakeEngine) -> None:
    versions, folders = run_of(trainer, 5, frozenset({3}))
    engine = make_engine()
    for step in (1, 2, 3, 4):
        assert holds(engine, folders[step], versions[step])
        if step == 1:  # from here on, only the differences are needed
            for path in trainer.paths.versions_on_disk():
                (path.path / COMPLETE).unlink()
    assert engine.make(folders[4]) == engine.make(folders[4]), "it is there"


def test_skipping_and_late_engines_rebuild_equal_versions(trainer: Trainer, make_engine: MakeEngine) -> None:
    versions, folders = run_of(trainer, 7, frozenset({4}))
    skips = make_engine()
    assert holds(skips, folders[1], versions[1])
    assert holds(skips, folders[3], versions[3]), "two versions at once"
    assert holds(skips, folders[6], versions[6]), "over a whole one"
    for step in range(1, 7):
        assert holds(make_engine(), folders[step], versions[step])


def test_replaced_version_is_not_used_as_base(trainer: Trainer, make_engine: MakeEngine) -> None:
    versions, folders = run_of(trainer, 3)
    engine = make_engine()
    assert holds(engine, folders[2], versions[2])
    # The run falls back to step 1, and trains step 2 again to other bits.
    again = Trainer(trainer.paths.root, attempt=2)
    again.publish(1, versions[1])
    other = stepped(versions[1], 77)
    following = stepped(other, 78)
    again.publish(2, other)
    assert holds(engine, again.publish(3, following), following)


def test_damaged_base_in_memory_is_read_again(trainer: Trainer, make_engine: MakeEngine) -> None:
    versions, folders = run_of(trainer, 3)
    engine = make_engine()
    folder = engine.make(folders[1])
    for path in folder.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    assert holds(engine, folders[2], versions[2])


@pytest.mark.parametrize("damage", ["bytes", "short", "manifest", "no file"])
def test_damaged_difference_is_refused_without_leftovers(
    damage: str, trainer: Trainer, make_engine: MakeEngine
) -> None:
    versions, folders = run_of(trainer, 4, frozenset({3}))
    engine = make_engine()
    assert holds(engine, folders[1], versions[1])
    file = folders[2] / (MANIFEST if damage == "manifest" else root_file(0))
    content = file.read_bytes()
    if damage == "no file":
        file.unlink()
    else:
        file.write_bytes(content[:-1] if damage != "bytes" else content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RefusedError, match=f"the version in {folders[2]} cannot be built"):
        engine.make(folders[2])
    assert list(engine._staging._process_folder().glob("v*")) == []
    assert holds(engine, folders[3], versions[3]), "the next whole one is on the volume"


def test_missing_base_version_is_refused_as_gone(trainer: Trainer, make_engine: MakeEngine) -> None:
    _, folders = run_of(trainer, 3)
    (folders[0] / COMPLETE).unlink()
    with pytest.raises(RefusedError, match="its whole base no longer exists") as caught:
        make_engine().make(folders[2])
    assert caught.value.gone


def test_full_memory_is_refused_with_the_fix(
    trainer: Trainer, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions, folders = run_of(trainer, 3)
    engine = make_engine()
    assert holds(engine, folders[1], versions[1])

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(staging_module.os, "posix_fallocate", full)
        with pytest.raises(RefusedError, match="No space left on device"):
            engine.make(folders[2])
    assert holds(engine, folders[2], versions[2])
    assert issubclass(NoRoomError, Exception)


def test_another_models_difference_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    _, folders = run_of(trainer, 2)
    with pytest.raises(RefusedError, match="the trainer sends d, which the served model does not have"):
        Rebuilder(expected=dict.fromkeys("abc", (500,)), staging=Staging(tmp_path)).make(folders[1])


def test_mapped_old_version_stays_unchanged(trainer: Trainer, make_engine: MakeEngine) -> None:
    versions, folders = run_of(trainer, 3)
    engine = make_engine()
    stored = StoredTensors(engine.make(folders[1]))
    engine.make(folders[2])
    for bucket in BUCKETS:
        body = np.zeros(bucket.size, np.uint8)
        stored.fill(bucket, body)
        assert np.array_equal(body, versions[1][bucket.index])
