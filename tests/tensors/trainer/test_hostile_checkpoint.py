"""Malicious checkpoints: refused by name without executing any content."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.learning import OptimizerConfig
from rlrun.protocol.files.checkpoint_manifest import TRAINER_PART
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.checkpoints import dcp
from rlrun.trainer.checkpoints.async_saver import Saver
from rlrun.trainer.checkpoints.dcp import POLICY, Part, Progress
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.modeling.shard import shard_model
from rlrun.trainer.ranks.group import Group
from rlrun.trainer.weights import export
from tests.support.sets import few_in_gate

LEARNING_RATE = "policy.optimizer.param_groups.0.lr"
WEIGHT = "policy.model.model.embed_tokens.weight"


class Bomb:
    """Object whose unpickling creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.marker),))


@dataclass
class Folder:
    """Complete checkpoint with the operations of a reader."""

    path: Path
    source: Path
    marker: Path
    part: Part

    @property
    def table(self) -> Path:
        return self.path / TRAINER_PART / ".metadata"

    def metadata(self) -> Metadata:
        found: Metadata = pickle.loads(self.table.read_bytes())
        return found

    def change(self, table: object) -> None:
        self.table.write_bytes(pickle.dumps(table))

    def place(self, name: str, **changes: Any) -> None:
        """Change the location of a tensor's or value's bytes."""
        table = self.metadata()
        for index, place in table.storage_data.items():
            if index.fqn == name:
                table.storage_data[index] = replace(place, **changes)
        self.change(table)

    def value(self, name: str, value: object, *, padding: int = 0) -> None:
        """Write another pickle in place of a value."""
        written = io.BytesIO()
        written.write(pickle.dumps(value) + b"\0" * padding) if padding else torch.save(value, written)
        file = next((self.path / TRAINER_PART).glob("*.distcp"))
        begin = file.stat().st_size
        with file.open("ab") as stream:
            stream.write(written.getvalue())
        self.place(name, relative_path=file.name, offset=begin, length=len(written.getvalue()))

    def load(self) -> Progress:
        return dcp.load_parts({POLICY: self.part}, self.path)

    def export(self) -> None:
        config = ModelConfig(path=str(self.source), dtype="float32")
        export.export_checkpoint(self.path, self.path.with_name("out"), config, str(self.source), step=3)


@pytest.fixture(params=["adamw", "muon", "sgd"])
def optimizer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def saved() -> dict[str, Path]:
    """Folders with a model and its checkpoint, by optimizer; tests change copies of them."""
    return {}


@pytest.fixture
def make(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    solo: Group,
    make_model: Callable[..., nn.Module],
    saved: dict[str, Path],
) -> Callable[..., Folder]:
    def make(optimizer: str = "adamw") -> Folder:
        model = make_model()
        whole = saved.get(optimizer) or tmp_path_factory.mktemp(optimizer)
        if optimizer not in saved:
            model.save_pretrained(whole / "source")  # type: ignore[operator]
        shard_model(model, solo)
        part = Part(model, make_optimizer(model, OptimizerConfig(name=optimizer), solo.device))  # type: ignore[arg-type]
        if optimizer not in saved:
            Saver({POLICY: part}, solo, background=False).save(Progress(3), whole / "checkpoint")
            saved[optimizer] = whole
        shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
        return Folder(tmp_path / "checkpoint", tmp_path / "source", tmp_path / "executed", part)

    return make


@pytest.fixture
def folder(make: Callable[..., Folder]) -> Folder:
    return make()


class _Pickler(pickle.Pickler):
    """Pickler that writes enumeration members like Python 3.11.0 to 3.11.3 (Debian 12 has 3.11.2), and paths like
    3.13.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


def test_checkpoint_of_other_python_versions_is_read(folder: Folder) -> None:
    written = io.BytesIO()
    _Pickler(written, protocol=4).dump(folder.metadata())
    assert b"getattr" in written.getvalue()
    folder.table.write_bytes(written.getvalue())
    assert folder.load() == Progress(3)
    path = folder.metadata().storage_meta.checkpoint_id
    assert isinstance(path, Path)
    table = pickle.dumps(folder.metadata(), protocol=2).replace(
        b"cpathlib\nPosixPath\n", b"cpathlib._local\nPosixPath\n"
    )
    assert b"pathlib._local" in table
    folder.table.write_bytes(table)
    assert folder.load() == Progress(3)


def test_checkpoint_of_every_optimizer_is_read(make: Callable[..., Folder], optimizer: str) -> None:
    assert make(optimizer).load() == Progress(3)


def _table(found: Folder, marker: Path) -> None:
    found.change(Bomb(marker))


def _planner_data(found: Folder, marker: Path) -> None:
    table = found.metadata()
    table.planner_data = {"x": [Bomb(marker)]}
    found.change(table)


def _state_of_an_allowed_class(found: Folder, marker: Path) -> None:
    table = found.metadata()
    table.storage_meta.modules = [Bomb(marker)]
    found.change(table)


def _name_of_a_tensor(found: Folder, marker: Path) -> None:
    table = found.metadata()
    table.state_dict_metadata[Bomb(marker)] = None
    found.change(table)


def _function_of_an_allowed_module(found: Folder, marker: Path) -> None:
    found.table.write_bytes(b"ctorch.serialization\nload\n(S'x'\ntR.")


def _dotted_name(found: Folder, marker: Path) -> None:
    names = b"torch.distributed.checkpoint.metadata", b"os.mkdir"
    texts = b"".join(b"\x8c" + bytes([len(name)]) + name for name in (*names,))
    found.table.write_bytes(
        b"\x80\x04" + texts + b"\x93(\x8c" + bytes([len(str(marker))]) + str(marker).encode() + b"tR."
    )


def _attribute_of_a_class(found: Folder, marker: Path) -> None:
    kind = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    found.table.write_bytes(b"cbuiltins\ngetattr\n(" + kind + b"S'__init__'\ntR.")


def _attribute_of_the_enumeration(found: Folder, marker: Path) -> None:
    kind = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    found.table.write_bytes(b"cbuiltins\ngetattr\n(" + kind + b"S'__class__'\ntR.")


def _attributes_of_builtins(found: Folder, marker: Path) -> None:
    found.table.write_bytes(b"cbuiltins\nexec\n(S'import os; os.mkdir(%r)'\ntR." % str(marker).encode())


IN_THE_TABLE = [_table, _planner_data, _state_of_an_allowed_class, _name_of_a_tensor]
IN_THE_TABLE += [_function_of_an_allowed_module, _dotted_name, _attributes_of_builtins]
IN_THE_TABLE += [_attribute_of_a_class, _attribute_of_the_enumeration]


@pytest.mark.parametrize(
    ("reader", "attack"),
    few_in_gate(
        product(("load", "export"), IN_THE_TABLE), [*product(["load"], IN_THE_TABLE), ("export", IN_THE_TABLE[0])]
    ),
)
def test_checkpoint_table_executes_nothing(folder: Folder, attack: Callable[[Folder, Path], None], reader: str) -> None:
    attack(folder, folder.marker)
    with pytest.raises(
        RoleError, match=r"\.metadata is damaged, or was not written by RLRun: it references "
    ) as caught:
        getattr(folder, reader)()
    assert caught.value.code == exit_codes.DATA
    assert not folder.marker.exists()
    assert not folder.path.with_name("out").exists()


@pytest.mark.parametrize("shape", ["plain", "in a list", "in a tensor's class"])
def test_checkpoint_value_executes_nothing(folder: Folder, shape: str) -> None:
    bomb: Any = Bomb(folder.marker)
    folder.value(
        LEARNING_RATE,
        {"plain": bomb, "in a list": [0.1, bomb], "in a tensor's class": {"x": (torch.ones(2), bomb)}}[shape],
    )
    with pytest.raises(
        RoleError, match=rf"the checkpoint's {LEARNING_RATE} is damaged, .*: it references posix\.mkdir, which"
    ) as caught:
        folder.load()
    assert caught.value.code == exit_codes.DATA
    assert not folder.marker.exists()


def test_tensor_bytes_execute_nothing(folder: Folder) -> None:
    folder.value(WEIGHT, Bomb(folder.marker), padding=50 * 32 * 4)
    for read in (folder.load, folder.export):
        with pytest.raises(RoleError, match=r"a tensor of .* is damaged, or was not written by RLRun"):
            read()
    assert not folder.marker.exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"relative_path": "../../secret"}, "'../../secret', which is not a file of the checkpoint"),
        ({"relative_path": "/etc/passwd"}, "'/etc/passwd', which is not a file of the checkpoint"),
        ({"relative_path": "__9_9.distcp"}, "not a file of the checkpoint"),
        ({"relative_path": "__7_0.distcp"}, "not a file of the checkpoint"),
        ({"relative_path": None}, "not a file of the checkpoint"),
        ({"offset": -1}, "bytes, of __0_0.distcp, which has"),
        ({"length": 1 << 60}, "bytes, of __0_0.distcp, which has"),
        ({"length": -5}, "bytes, of __0_0.distcp, which has"),
        ({"offset": 0.5}, "bytes, of __0_0.distcp, which has"),
        ({"transform_descriptors": ["zstd"]}, "is transformed"),
        ({"length": 10}, "bytes, but 10 are stored"),
    ],
)
def test_files_outside_the_checkpoint_are_not_read(folder: Folder, changes: dict[str, Any], says: str) -> None:
    (folder.path / TRAINER_PART / "__7_0.distcp").symlink_to("/etc/passwd")
    folder.place(WEIGHT, **changes)
    for read in (folder.load, folder.export):
        with pytest.raises(RoleError, match=r"was not written by RLRun") as caught:
            read()
        assert says in str(caught.value)
        assert WEIGHT in str(caught.value)


@pytest.mark.parametrize("size", [(1 << 50, 32), (-1, 5), (1 << 31, 1 << 31, 1 << 31)])
def test_false_tensor_shape_allocates_no_memory(folder: Folder, size: tuple[int, ...]) -> None:
    table = folder.metadata()
    table.state_dict_metadata[WEIGHT].size = torch.Size(size)
    folder.change(table)
    with pytest.raises(RoleError, match=r"bytes, but .* are stored"):
        folder.export()


@pytest.mark.parametrize("content", [b"", b"\x80\x04N.", b"\x80\x04}.", b"not a pickle"])
def test_invalid_checkpoint_table_is_refused(folder: Folder, content: bytes) -> None:
    folder.table.write_bytes(content)
    with pytest.raises(RoleError, match="is damaged, or was not written by RLRun"):
        folder.load()
    folder.table.unlink()
    with pytest.raises(RoleError, match="No such file"):
        folder.load()


def test_missing_checkpoint_part_is_named(folder: Folder) -> None:
    table = folder.metadata()
    table.storage_data = {index: place for index, place in table.storage_data.items() if index.fqn != WEIGHT}
    folder.change(table)
    with pytest.raises(RoleError, match=f"{WEIGHT} lacks a part"):
        folder.load()
    table.storage_data[MetadataIndex("nothing", torch.Size([0]))] = next(iter(table.storage_data.values()))
    folder.change(table)
    with pytest.raises(RoleError, match="a location for an unknown entry"):
        folder.load()


def test_random_damage_is_refused_or_harmless(folder: Folder) -> None:
    """Random byte changes: the table is read unchanged or refused, no other error occurs and no file appears."""
    whole, rng = folder.table.read_bytes(), random.Random(7)
    beside = sorted(folder.path.parent.rglob("*"))
    reader = dcp.CheckpointReader(folder.path / TRAINER_PART)
    refused = 0
    for _ in range(int(os.environ.get("RLRUN_FUZZ", "2000"))):
        changed = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 8])):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        folder.table.write_bytes(bytes(changed[: rng.randrange(len(changed))] if rng.random() < 0.1 else changed))
        try:
            reader.read_metadata()
        except RoleError:
            refused += 1
    assert refused > 500
    assert sorted(folder.path.parent.rglob("*")) == beside
