"""Background saves: files contain the state at the call, one save at a time, and reported failures."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from rlrun.config.models.checkpoint import CheckpointConfig
from rlrun.config.models.learning import OptimizerConfig
from rlrun.protocol.files import checkpoint_manifest
from rlrun.protocol.files.attempts import first_attempt
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.volume_faults import Volume
from rlrun.trainer.checkpoints import dcp as checkpoint
from rlrun.trainer.checkpoints.async_saver import Saver, Written
from rlrun.trainer.checkpoints.completion import Completer
from rlrun.trainer.checkpoints.dcp import POLICY, Part, Progress
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.learning.train_step import parameter_checksum
from rlrun.trainer.modeling.shard import shard_model
from rlrun.trainer.ranks.group import Group
from tests.support.process_groups import count_groups

MakePart = Callable[[], Part]


@pytest.fixture
def make_part(solo: Group, make_model: Callable[..., nn.Module]) -> MakePart:
    """Return a function that builds a model after one step, so that the optimizer has state."""

    def make() -> Part:
        model = shard_model(make_model(), solo)
        optimizer = make_optimizer(model, OptimizerConfig(), solo.device)
        change(Part(model, optimizer))
        return Part(model, optimizer)

    return make


def change(part: Part) -> None:
    for parameter in part.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    part.optimizer.step()


def moments(part: Part) -> float:
    return sum(float(entry["exp_avg"].to_local().double().sum()) for entry in part.optimizer.state.values())


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Event that writers wait for."""
    opened = threading.Event()
    write_data = dcp.FileSystemWriter.write_data

    def waiting(self: dcp.FileSystemWriter, *arguments: object) -> object:
        assert opened.wait(120)
        return write_data(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", waiting)
    yield opened
    opened.set()


def test_saved_files_contain_state_at_the_call(
    tmp_path: Path, solo: Group, make_part: MakePart, gate: threading.Event
) -> None:
    part = make_part()
    saver = Saver({POLICY: part}, solo, background=True)
    before = parameter_checksum(part.module), moments(part)
    told: list[Written] = []
    saver.save(Progress(3), tmp_path / "three")
    saver.call_when_durable(told.append)
    change(part)
    assert (parameter_checksum(part.module), moments(part)) != before
    assert saver.take_finished() is None
    gate.set()
    saver.wait()
    assert [written.step for written in told] == [3]
    written = saver.take_finished()
    assert written is not None
    assert written.path == tmp_path / "three"
    assert saver.take_finished() is None, "told twice"
    again = make_part()
    assert checkpoint.load_parts({POLICY: again}, tmp_path / "three") == Progress(3)
    assert (parameter_checksum(again.module), moments(again)) == before


def test_save_buffers_are_reused_by_one_save_at_once(
    tmp_path: Path, solo: Group, make_part: MakePart, gate: threading.Event
) -> None:
    part = make_part()
    saver = Saver({POLICY: part}, solo, background=True)
    saver.save(Progress(1), tmp_path / "1")
    second = threading.Thread(target=saver.save, args=(Progress(2), tmp_path / "2"))
    change(part)
    after = parameter_checksum(part.module)
    second.start()
    second.join(0.3)
    assert second.is_alive(), "the second save did not wait for the first"
    assert not (tmp_path / "2").exists()
    gate.set()
    second.join(120)
    saver.wait()
    stager = saver._stager._state_dict_stager
    buffers = {storage.data_ptr() for storage in stager._cached_storage_mapping.values()}
    saver.save(Progress(3), tmp_path / "3")
    assert {storage.data_ptr() for storage in stager._cached_storage_mapping.values()} >= buffers
    saver.wait()
    again = make_part()
    checkpoint.load_parts({POLICY: again}, tmp_path / "2")
    assert parameter_checksum(again.module) == after


@pytest.mark.parametrize("background", [True, False])
def test_refused_save_leaves_no_files_and_next_succeeds(
    tmp_path: Path, solo: Group, make_part: MakePart, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    saver = Saver({POLICY: make_part()}, solo, background=background)
    told: list[int] = []

    def save(step: int) -> None:
        saver.save(Progress(step), tmp_path / "checkpoints" / str(step))
        saver.call_when_durable(lambda written: told.append(written.step))
        saver.wait()
        saver.raise_save_error()

    with monkeypatch.context() as patch:
        patch.setattr(dcp.FileSystemWriter, "write_data", full)
        save(1)
    refused = saver.refused
    assert refused is not None
    assert (refused.step, refused.trouble.reason) == (1, "StorageFull")
    assert "the volume is full" in refused.trouble.text
    assert not told
    assert saver.take_finished() is None
    assert list((tmp_path / "checkpoints").iterdir()) == []
    save(2)
    assert saver.refused is None
    assert told == [2]


def test_other_save_failure_ends_the_run(
    tmp_path: Path, solo: Group, make_part: MakePart, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", broken)
    saver = Saver({POLICY: make_part()}, solo, background=True)
    saver.save(Progress(1), tmp_path / "checkpoints" / "step")
    saver.wait()
    assert saver.refused is None
    with pytest.raises(RoleError, match="a bug"):
        saver.save(Progress(2), tmp_path / "checkpoints" / "next")


def test_saved_parts_are_restored_separately(tmp_path: Path, solo: Group, make_part: MakePart) -> None:
    parts = {POLICY: make_part(), "critic": make_part()}
    change(parts["critic"])
    sums = {name: (parameter_checksum(part.module), moments(part)) for name, part in parts.items()}
    assert sums[POLICY] != sums["critic"]
    saver = Saver(parts, solo, background=True)
    began = time.perf_counter()
    saver.save(Progress(1, 7), tmp_path / "one")
    saver.wait()
    written = saver.take_finished()
    assert written is not None
    assert 0 < written.seconds < time.perf_counter() - began
    again = {POLICY: make_part(), "critic": make_part()}
    assert checkpoint.load_parts(again, tmp_path / "one") == Progress(1, 7)
    assert {name: (parameter_checksum(part.module), moments(part)) for name, part in again.items()} == sums


@pytest.mark.parametrize("background", [True, False])
def test_manifest_entries_are_computed_without_reading_files(
    tmp_path: Path, solo: Group, make_part: MakePart, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    paths, read = RunPaths(tmp_path), []
    path = paths.checkpoint(2, 1)
    saver = Saver({POLICY: make_part()}, solo, background=background)
    saver.save(Progress(2), path)
    saver.wait()
    written = saver.take_finished()
    assert written is not None
    checksum = checkpoint_manifest.file_checksum
    with monkeypatch.context() as watched:
        watched.setattr(checkpoint_manifest, "file_checksum", lambda file: read.append(file) or checksum(file))
        completer = Completer(
            paths,
            first_attempt(world_size=1, config_hash="h"),
            CheckpointConfig(),
            with_orchestrator=False,
            on_complete=lambda step, path: None,
            volume=Volume(tmp_path),
        )
        completer.saved(2, path, written.files)
        assert completer.close(30)
    assert completer.failure is None
    assert not read
    assert set(written.files) == set(checkpoint_manifest.describe_part(path, path / checkpoint_manifest.TRAINER_PART))
    assert {file.path for file in written.files} == {"trainer/.metadata", "trainer/__0_0.distcp"}
    checkpoint_manifest.verify_files(path, checkpoint_manifest.read_manifest(path))


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_closed_saver_leaves_no_process_group(
    tmp_path: Path, solo: Group, make_part: MakePart, background: bool, waits: bool
) -> None:
    groups = count_groups()
    saver = Saver({POLICY: make_part()}, solo, background=background)
    saver.save(Progress(1), tmp_path / "1")
    saver.wait()
    assert count_groups() == groups + 1
    saver.close(wait=waits)
    wait_until(lambda: count_groups() == groups)


def test_closed_saver_destroys_process_group_after_write(
    tmp_path: Path, solo: Group, make_part: MakePart, gate: threading.Event
) -> None:
    groups = count_groups()
    saver, told = Saver({POLICY: make_part()}, solo, background=True), list[Written]()
    saver.save(Progress(1), tmp_path / "1")
    saver.call_when_durable(told.append)
    assert saver._last is not None
    wait_until(saver._last.running)
    saver.close(wait=False)
    assert count_groups() == groups + 1, "the write still needs it"
    gate.set()
    wait_until(lambda: count_groups() == groups)
    assert saver.take_finished() is not None
    assert not told


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline, f"{count_groups()} process groups, threads {threading.enumerate()}"
        time.sleep(0.01)
