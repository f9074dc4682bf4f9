"""Conversion of supervised runs of verl and AReaL to `task: SFT`."""

from __future__ import annotations

from typing import Any

from rlrun.api.run_manifest import parse_manifest
from rlrun.convert.compose.shared_parts import Context
from rlrun.convert.conversion import Converted, convert_settings, read_settings
from rlrun.convert.readers.hydra import Setting

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
    return convert_settings([Setting(k, v, "t") for k, v in (keys | changes).items()], Context("run", 1280), ["t"])


def test_verl() -> None:
    found = convert_settings(read_settings(VERL, "run.sh", {}), Context("run", 320), ["run.sh"])
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


def test_gpu_count_from_script_argument_is_reported_missing() -> None:
    script = VERL.replace("--nproc_per_node=4", "--nproc_per_node=$GPUS")
    found = convert_settings(read_settings(script, "run.sh", {}), Context("run", 320), ["run.sh"])
    assert any("add trainer.n_gpus_per_node=N" in line for line in found.missing)


def test_areal() -> None:
    spec = parse_manifest(areal(**{"allocation_mode": "fsdp:d4t2", "cluster.n_gpus_per_node": 8}).text, "t")[0].spec
    assert spec.data is not None
    assert (spec.task, spec.max_steps, spec.data.prompt_field) == ("SFT", 20, "question")
    assert (spec.trainer.gpus_per_replica, spec.trainer.parallelism.tp) == (8, 2)
    assert any("rows must be chats" in notice for notice in areal(**{"train_dataset.path": "org/chats"}).notices)


def test_wrong_allocation_and_unknown_key_are_refused() -> None:
    found = areal(**{"allocation_mode": "fsdp:q9", "model.optimiser.lr": 1, "nonsense": 2})
    refused = {fate.setting.key: fate.note for fate in found.refused}
    assert set(refused) == {"allocation_mode", "model.optimiser.lr", "nonsense"}
    assert "did you mean actor.optimizer.lr?" in refused["model.optimiser.lr"]
    assert "~nonsense" in refused["nonsense"]


def test_areals_block_of_the_engine_is_called_actor() -> None:
    keys = {
        "train_dataset.type": "sft",
        "train_dataset.path": "openai/gsm8k",
        "train_dataset.batch_size": 128,
        "train_dataset.max_length": 3072,
        "actor.path": "Qwen/Qwen3-1.7B",
        "actor.backend": "fsdp:d8",
        "actor.gradient_checkpointing": True,
        "actor.mb_spec.max_tokens_per_mb": 4096,
        "actor.optimizer.lr": 2e-5,
        "actor.optimizer.weight_decay": 0.05,
        "actor.optimizer.beta2": 0.95,
        "actor.optimizer.lr_scheduler_type": "cosine",
        "actor.optimizer.warmup_steps_proportion": 0.1,
    }
    found = convert_settings([Setting(k, v, "t") for k, v in keys.items()], Context("run", 1280), ["t"])
    spec = parse_manifest(found.text, "t")[0].spec
    trainer = spec.trainer
    assert found.refused == []
    assert (spec.task, spec.seq_len, spec.max_steps) == ("SFT", 3072, 10)
    assert (trainer.optimizer.lr, trainer.optimizer.weight_decay, trainer.optimizer.beta2) == (2e-5, 0.05, 0.95)
    assert (trainer.scheduler.name, trainer.scheduler.warmup_steps) == ("cosine", 1)
    assert (trainer.gpus_per_replica, trainer.micro_batch_tokens) == (8, 4096)
    assert trainer.activation_checkpointing == "full"


def sft(command: str) -> Any:
    text = f"{command} data.train_files=/d/x.parquet model.path=Qwen/Qwen3-0.6B\n"
    found = convert_settings(read_settings(text, "run.sh", {}), Context("run", 2560), ["run.sh"])
    return parse_manifest(found.text, "run")[0].spec, found.notices


def test_sft_defaults_follow_the_program() -> None:
    now, notices = sft("torchrun -m verl.trainer.sft_trainer")
    optimizer, scheduler = now.trainer.optimizer, now.trainer.scheduler
    assert (optimizer.lr, optimizer.beta2, scheduler.name, scheduler.warmup_steps) == (1e-3, 0.999, "constant", 0)
    assert (now.trainer.gpus_per_replica, now.data.messages_field) == (1, "messages")
    assert any("optim.lr is not set: 0.001" in notice for notice in notices)
    before, notices = sft("torchrun -m verl.trainer.fsdp_sft_trainer")
    optimizer, scheduler = before.trainer.optimizer, before.trainer.scheduler
    assert (optimizer.lr, optimizer.beta2, scheduler.name, scheduler.warmup_steps) == (1e-5, 0.95, "cosine", 4)
    assert (before.trainer.gpus_per_replica, before.data.prompt_field, before.data.completion_field) == (
        8,
        "question",
        "answer",
    )
    assert any("the default of verl's fsdp_sft_trainer" in notice for notice in notices)


def test_keys_of_old_sft_trainer_select_its_defaults() -> None:
    keys = {"data.train_files": "/d/x.parquet", "model.partial_pretrain": "Qwen/Qwen3-0.6B"}
    for more, rate in (({}, 1e-5), ({"optim.lr": 3e-6}, 3e-6)):
        found = convert_settings(
            [Setting(*item, "f.yaml") for item in (keys | more).items()], Context("run", 2560), ["f.yaml"]
        )
        assert parse_manifest(found.text, "f")[0].spec.trainer.optimizer.lr == rate
        assert any("optim.lr is not set" in notice for notice in found.notices) == (not more)
