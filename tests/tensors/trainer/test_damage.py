"""Damaged files of a real checkpoint: the previous checkpoint is used and the reason is logged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from rlrun.config.models.checkpoint import CheckpointConfig, ResumeConfig
from rlrun.config.models.learning import OptimizerConfig
from rlrun.orchestrator.checkpoint import Snapshot, write_snapshot
from rlrun.orchestrator.journal.ledger import Ledger
from rlrun.protocol.files.attempts import first_attempt, write_attempt
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.volume_faults import Volume
from rlrun.trainer.checkpoints.async_saver import Saver
from rlrun.trainer.checkpoints.completion import Completer
from rlrun.trainer.checkpoints.dcp import POLICY, Part, Progress
from rlrun.trainer.checkpoints.resume import choose_base
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.modeling.shard import shard_model
from rlrun.trainer.ranks.group import Group

FILES = ("trainer/__0_0.distcp", "trainer/.metadata", "orchestrator/state.json", "manifest.json")
DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-7]),
    "emptied": lambda file: file.write_bytes(b""),
    "flipped": lambda file: file.write_bytes(flipped(file.read_bytes())),
    "missing": lambda file: file.unlink(),
}


def flipped(content: bytes) -> bytes:
    """Flip one bit in the middle; it changes a digit, so text stays well formed."""
    digits = [index for index, byte in enumerate(content) if byte in b"0123456789"] or [len(content) // 2]
    at = digits[len(digits) // 2]
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, solo: Group) -> Path:
    """Write a run folder with complete checkpoints of steps 2 and 4."""
    from transformers import LlamaConfig, LlamaForCausalLM

    paths = RunPaths(tmp_path_factory.mktemp("whole"))
    attempt = first_attempt(world_size=1, config_hash="h")
    write_attempt(paths, attempt)
    shape = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=1))
    shard_model(model, solo)
    saver = Saver({POLICY: Part(model, make_optimizer(model, OptimizerConfig(), solo.device))}, solo, background=True)
    completer = Completer(
        paths,
        attempt,
        CheckpointConfig(),
        with_orchestrator=True,
        on_complete=lambda step, path: None,
        volume=Volume(paths.root),
    )
    for step in (2, 4):
        saver.save(Progress(step), paths.checkpoint(step, 1))
        saver.wait()
        written = saver.take_finished()
        assert written is not None
        write_snapshot(paths.checkpoint(step, 1), Snapshot(step, Ledger().state()))
        completer.saved(step, written.path, written.files)
        completer.agreed(step)
    assert completer.close(30)
    assert completer.failure is None
    return paths.root


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_damaged_checkpoint_falls_back_to_the_previous_one(tmp_path: Path, whole: Path, name: str, damage: str) -> None:
    shutil.copytree(whole, tmp_path / "run")
    paths = RunPaths(tmp_path / "run")
    log: list[str] = []

    def chosen() -> int:
        base = choose_base(paths, ResumeConfig(), with_orchestrator=True, log=log.append)
        assert base is not None
        return base.checkpoint.step

    assert chosen() == 4
    assert not log
    DAMAGES[damage](paths.checkpoint(4, 1) / name)
    assert chosen() == 2
    if (name, damage) == ("manifest.json", "missing"):  # the checkpoint was never completed, which is not logged
        return
    [line] = log
    assert line.startswith("cannot resume from step 4: ")
    assert Path(name).name in line
    reason = {"truncated": "bytes instead of", "emptied": "0 bytes instead", "flipped": "differs from the manifest"}
    wanted = "is missing" if damage == "missing" else "is damaged" if name == "manifest.json" else reason[damage]
    assert wanted in line


def test_run_without_usable_checkpoint_starts_from_model(tmp_path: Path, whole: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    paths = RunPaths(tmp_path / "run")
    for step in (2, 4):
        (paths.checkpoint(step, 1) / FILES[0]).unlink()
    log: list[str] = []
    assert choose_base(paths, ResumeConfig(), with_orchestrator=True, log=log.append) is None
    assert [line[:28] for line in log] == ["cannot resume from step 4: s", "cannot resume from step 2: s"]
