"""Power cuts during versions, adapters, exports and checkpoints: an artifact marked as complete is complete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from rlrun.config.models.checkpoint import CheckpointConfig
from rlrun.config.models.language_models import LoRAConfig, ModelConfig
from rlrun.config.models.learning import OptimizerConfig
from rlrun.orchestrator.checkpoint import Snapshot, write_snapshot
from rlrun.orchestrator.journal.ledger import Ledger
from rlrun.protocol.files.attempts import first_attempt
from rlrun.protocol.files.checkpoint_manifest import MANIFEST
from rlrun.protocol.files.paths import COMPLETE, RunPaths
from rlrun.protocol.files.volume_faults import Volume
from rlrun.trainer.checkpoints.async_saver import Saver
from rlrun.trainer.checkpoints.completion import Completer
from rlrun.trainer.checkpoints.dcp import POLICY, Part, Progress, Together
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.modeling import lora
from rlrun.trainer.modeling.model_files import model_files
from rlrun.trainer.modeling.shard import load_model, shard_model
from rlrun.trainer.ranks.group import Group
from rlrun.trainer.weights import hf_writer
from rlrun.trainer.weights.export import export_version
from tests.power_cut import Disk

MakeModel = Callable[..., nn.Module]


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    root = tmp_path / "run"
    root.mkdir()
    return RunPaths(root)


@pytest.fixture
def disk(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(run.root, monkeypatch)


def test_version_is_durable_before_it_is_complete(
    run: RunPaths, disk: Disk, solo: Group, source: Path, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model().save_pretrained(source)
    config = ModelConfig(path=str(source))
    model = load_model(config, str(source))
    files = model_files(model, config, str(source))
    shard_model(model, solo)
    agree, shards = Together.compare_results, []

    def agreed(together: Together) -> None:
        # Each rank flushes its own files on its machine, because the flush of another machine does not cover them.
        written = list(run.weights.glob("*/*.safetensors"))
        shards.extend(written)
        assert not [path.name for path in written if disk._lost(path)]
        agree(together)

    monkeypatch.setattr(Together, "compare_results", agreed)
    path = run.version(3, 1)
    hf_writer.publish_version(model, path, files=files, dtype="float32", group=solo, shard_bytes=20_000)
    assert not disk.broken
    assert disk.promised == [COMPLETE, path.name]
    assert shards
    assert disk.keeps(path)
    assert {"config.json", "model.safetensors.index.json", COMPLETE} <= {file.name for file in path.iterdir()}
    export_version(path, run.export(3, 1))
    assert not disk.broken
    assert disk.promised[2:] == [run.export(3, 1).name]
    assert disk.keeps(run.export(3, 1))


def test_adapter_is_durable_before_it_is_complete(
    run: RunPaths, disk: Disk, solo: Group, make_model: MakeModel
) -> None:
    config, model = LoRAConfig(rank=2), make_model()
    lora.inject_adapters(model, config)
    shard_model(model, solo)
    lora.initialize_adapters(model, 0)
    path = run.version(1, 1)
    about = lora.adapter_config(model, config, "base")
    hf_writer.publish_adapter(model, path, config=about, dtype="float32", group=solo)
    assert not disk.broken
    assert disk.promised == [COMPLETE, path.name]
    assert disk.keeps(path)


@pytest.mark.parametrize("background", [True, False])
def test_checkpoint_is_durable_before_its_manifest(
    run: RunPaths, disk: Disk, solo: Group, make_model: MakeModel, background: bool
) -> None:
    model = shard_model(make_model(), solo)
    saver = Saver(
        {POLICY: Part(model, make_optimizer(model, OptimizerConfig(), solo.device))}, solo, background=background
    )
    completer = Completer(
        run,
        first_attempt(world_size=1, config_hash="h"),
        CheckpointConfig(),
        with_orchestrator=True,
        on_complete=lambda step, path: None,
        volume=Volume(run.root),
    )
    path = run.checkpoint(2, 1)
    saver.save(Progress(2), path)
    saver.wait()
    written = saver.take_finished()
    assert written is not None
    shard_file = path / "trainer" / "__0_0.distcp"
    assert not disk._lost(shard_file), "flushed by the rank that wrote it"
    write_snapshot(path, Snapshot(2, Ledger().state()))
    completer.saved(2, path, written.files)
    completer.agreed(2)
    assert completer.close(30)
    assert completer.failure is None
    assert not disk.broken
    assert disk.promised[-1] == MANIFEST
    assert disk.keeps(path)
