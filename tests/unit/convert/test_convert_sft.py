"""Supervised runs of verl and AReaL become `task: SFT`."""

from __future__ import annotations

from typing import Any

from rlrun.api.manifest import parse_manifest
from rlrun.convert.compose.shared import Context
from rlrun.convert.convert import Converted, convert, read_settings
from rlrun.convert.readers.setting import Setting

VERL = """
torchrun --standalone --nproc_per_node=4 --nnodes=1 -m verl.trainer.fsdp_sft_trainer \\
    data.train_files=/data/chats.parquet data.val_files=/data/held.parquet data.train_batch_size=32 data.max_length=2048 \\
    data.prompt_key=question data.response_key=answer data.truncation=right data.micro_batch_size_per_gpu=4 \\
    model.partial_pretrain=Qwen/Qwen3-0.6B model.lora_rank=16 optim.lr=1e-4 optim.lr_scheduler=cosine optim.warmup_steps_ratio=0.1 \\
    trainer.total_epochs=3 trainer.test_freq=25 ulysses_sequence_parallel_size=2 $@
"""


def areal(**changes: Any) -> Converted:
    keys: dict[str, Any] = {
        "train_dataset.type": "sft",
        "train_dataset.path": "openai/gsm8k",
        "train_dataset.batch_size": 128,
        "model.path": "Qwen/Qwen3-1.7B",
        "total_train_epochs": 2,
    }
    return convert([Setting(k, v, "t") for k, v in (keys | changes).items()], Context("run", 1280), ["t"])


def test_verl() -> None:
    found = convert(read_settings(VERL, "run.sh", {}), Context("run", 320), ["run.sh"])
    spec = parse_manifest(found.text, "run")[0].spec
    assert found.missing == []
    assert spec.data is not None
    assert spec.data.validation is not None
    assert (spec.task, spec.max_steps, spec.data.epochs, spec.data.batch_size) == ("SFT", 30, 3, 32)
    assert (spec.data.prompt_field, spec.data.completion_field, spec.data.too_long) == (
        "question",
        "answer",
        "Truncate",
    )
    assert (spec.data.validation.path, spec.data.validation.interval) == ("/data/held.parquet", 25)
    assert (spec.trainer.gpus_per_replica, spec.trainer.parallelism.cp, spec.trainer.micro_batch_tokens) == (4, 2, 8192)
    assert (spec.trainer.scheduler.name, spec.trainer.scheduler.warmup_steps) == ("cosine", 3)
    assert spec.trainer.lora is not None


def test_gpus_that_are_an_argument_of_the_script_are_missing() -> None:
    script = VERL.replace("--nproc_per_node=4", "--nproc_per_node=$GPUS")
    found = convert(read_settings(script, "run.sh", {}), Context("run", 320), ["run.sh"])
    assert any("add trainer.n_gpus_per_node=N" in line for line in found.missing)


def test_areal() -> None:
    spec = parse_manifest(areal(**{"allocation_mode": "fsdp:d4t2", "cluster.n_gpus_per_node": 8}).text, "t")[0].spec
    assert spec.data is not None
    assert (spec.task, spec.max_steps, spec.data.prompt_field) == ("SFT", 20, "question")
    assert (spec.trainer.gpus_per_replica, spec.trainer.parallelism.tp) == (8, 2)
    assert any("rows are chats" in notice for notice in areal(**{"train_dataset.path": "org/chats"}).notices)


def test_a_wrong_allocation_is_refused_and_an_unknown_key_told() -> None:
    found = areal(**{"allocation_mode": "fsdp:q9", "model.optimiser.lr": 1, "nonsense": 2})
    assert [fate.setting.key for fate in found.refused] == ["allocation_mode"]
    assert any("did you mean model.optimizer.lr?" in notice for notice in found.notices)
    assert {fate.setting.key for fate in found.fates if fate.kind == "unknown"} == {"nonsense"}
