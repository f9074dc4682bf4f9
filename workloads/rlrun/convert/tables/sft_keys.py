"""Keys of supervised fine-tuning in AReaL and verl.

AReaL's table has the keys of the training engine without sampling. verl's table covers two programs, `sft_trainer` and the earlier
`fsdp_sft_trainer`, which have different defaults.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rlrun.convert.tables import areal_keys
from rlrun.convert.tables.row import Row, dropped_row, joined_row, read_rows, refused_row, value_row
from rlrun.convert.tables.verl_keys import OPTIMIZERS, SCHEDULES

AREAL_SFT_ALIASES: Mapping[str, str] = {**areal_keys.ALIASES, "model.": "actor."}
"""Renamed keys: until release 0.5 the block of the training engine was called `model`."""
AREAL_SFT_DEFAULTS: Mapping[str, object] = {
    **{
        key: default
        for key, default in areal_keys.DEFAULTS.items()
        if key.startswith(("actor.optimizer.", "actor.gradient"))
    },
    "actor.lora_rank": 32,
    "cluster.n_gpus_per_node": 8,
    "cluster.n_nodes": 1,
    "seed": 1,
    "total_train_epochs": 1,
    "train_dataset.batch_size": 1,
}
_DATA: tuple[Row, ...] = (
    joined_row("train_dataset.path", "data.sources"),
    joined_row("train_dataset.batch_size", "data.batchSize"),
    joined_row("train_dataset.max_length", "seqLen", "no limit"),
    joined_row("train_dataset.shuffle", "data.shuffle", "each epoch has a new order"),
    dropped_row("train_dataset.type", "task: SFT", fine=("sft",)),
    joined_row("train_dataset.split", "data.sources", "the split train"),
    joined_row("valid_dataset.path", "data.validation", "no held-out loss"),
    joined_row("valid_dataset.split", "data.validation", "the split test"),
    joined_row("evaluator.freq_steps", "data.validation", "held-out loss every 50 steps, if configured"),
    joined_row("evaluator.freq_epochs", "data.validation", "held-out loss every 50 steps, if configured"),
    joined_row("total_train_epochs", "data.epochs, maxSteps"),
    joined_row("cluster.n_nodes", "trainer.replicas", "the allocation overrides it"),
)
_NOT_HERE = (
    *(
        "rollout",
        "gconfig",
        "eval_gconfig",
        "critic",
        "ref",
        "teacher",
        "max_",
        "n_trajs",
        "async_training",
        "dynamic_bs",
    ),
    *("actor.ppo", "actor.eps", "actor.c_clip", "actor.behav", "actor.use_decoupled", "actor.recompute", "actor.prox"),
    *("actor.importance", "actor.use_sapo", "actor.sapo", "actor.m2", "actor.self_dist", "actor.reward", "actor.adv"),
    *("actor.overlong", "actor.mask_no", "actor.dynamic", "actor.discount", "actor.gae", "actor.kl", "actor.rejection"),
    *("actor.weight_update_mode", "batch_size"),
)
_OWN = {mine.key for mine in _DATA}

AREAL_SFT_ROWS: tuple[Row, ...] = (
    *_DATA,
    dropped_row("actor.weight_update_mode", "a supervised run has no engines"),
    *(row for row in areal_keys.ROWS if not row.key.startswith(_NOT_HERE) and row.key not in _OWN),
)


VERL_SFT_ALIASES: Mapping[str, str] = {
    "model.partial_pretrain": "model.path",
    "data.multiturn.messages_key": "data.messages_key",
    "data.multiturn.tools_key": "data.tools_key",
    "engine.ulysses_sequence_parallel_size": "ulysses_sequence_parallel_size",
    "optim.lr_warmup_steps_ratio": "optim.warmup_steps_ratio",
    "optim.lr_scheduler": "optim.lr_scheduler_type",
    "optim.warmup_style": "optim.lr_scheduler_type",
    "optim.lr_min": "optim.min_lr",
    "model.lora.rank": "model.lora_rank",
    "model.lora.alpha": "model.lora_alpha",
    "model.lora.target_modules": "model.target_modules",
    "model.lora.exclude_modules": "model.exclude_modules",
}
"""Renamed keys of other releases."""

VERL_SFT_DEFAULTS: Mapping[str, object] = {
    "data.train_batch_size": 256,
    "data.max_length": 1024,
    "data.messages_key": "messages",
    "optim.weight_decay": 0.01,
    "optim.lr": 1e-3,
    "optim.betas": [0.9, 0.999],
    "optim.clip_grad": 1.0,
    "optim.eps": 1e-8,
    "optim.lr_scheduler_type": "constant",
    "trainer.total_epochs": 4,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 1,
}
"""Defaults of `sft_trainer` (sft_trainer_engine.yaml) from which fields are derived even if the key is not set."""
FSDP_DEFAULTS: Mapping[str, object] = {
    **VERL_SFT_DEFAULTS,
    "data.prompt_key": "question",
    "data.response_key": "answer",
    "optim.lr": 1e-5,
    "optim.betas": [0.9, 0.95],
    "optim.lr_scheduler_type": "cosine",
    "optim.warmup_steps_ratio": 0.1,
    "trainer.n_gpus_per_node": 8,
}
"""Defaults of the earlier `fsdp_sft_trainer` (sft_trainer.yaml) that differ."""
_FSDP_PROGRAM = "verl.trainer.fsdp_sft_trainer"
_FSDP_KEYS = (
    *(
        "model.partial_pretrain",
        "model.fsdp_config",
        "data.multiturn",
        "data.prompt_dict_keys",
        "data.response_dict_keys",
    ),
    *("optim.lr_scheduler", "optim.warmup_steps_ratio", "ulysses_sequence_parallel_size"),
)
"""Keys that only the earlier trainer has."""


def defaults_of(keys: Collection[str], program: str) -> Mapping[str, object]:
    """Return the defaults for a command or its keys.

    Args:
        keys: keys of the settings.
        program: module that the command starts, or an empty text if unknown.
    """
    is_earlier = program == _FSDP_PROGRAM or (
        not program and any(key == own or key.startswith(f"{own}.") for key in keys for own in _FSDP_KEYS)
    )
    return FSDP_DEFAULTS if is_earlier else VERL_SFT_DEFAULTS


_TRACKER = "no tracker; metrics are in metrics.jsonl of the run's folder"

VERL_SFT_ROWS: tuple[Row, ...] = (
    dropped_row("*_target_", "a class of verl, not a setting"),
    joined_row("data.train_files", "data.sources"),
    joined_row("data.val_files", "data.validation", "no held-out loss"),
    joined_row("data.train_batch_size", "data.batchSize"),
    joined_row("data.max_length", "seqLen"),
    joined_row("data.messages_key", "data.messagesField", "rows have prompt and completion"),
    joined_row("data.prompt_key", "data.promptField", "rows are chats"),
    joined_row("data.response_key", "data.completionField", "rows are chats"),
    joined_row("data.*_dict_keys", "data.promptField", "columns inside a column are not read"),
    *(
        dropped_row(f"data.{name}_key", f"no {name} of a row is read", fine=(None,))
        for name in ("image", "video", "audio")
    ),
    value_row("data.tools_key", "data.toolsField", "column of the tools"),
    value_row("data.truncation", "data.tooLong", values={"error": "Fail", "left": "Truncate", "right": "Truncate"}),
    joined_row("data.micro_batch_size_per_gpu", "trainer.microBatchTokens", "micro-batches are packed by tokens"),
    joined_row("data.max_token_len_per_gpu", "trainer.microBatchTokens", "micro-batches hold one row"),
    dropped_row("data.micro_batch_size", "micro-batches are packed by tokens"),
    refused_row("data.custom_cls.path", "a Python class of verl; write the rows as chats (docs/sft.md)"),
    dropped_row("data.apply_chat_template_kwargs*", "the chat template has no arguments here", fine=({},)),
    joined_row("model.path", "model.name or model.path"),
    value_row("model.trust_remote_code", "model.trustRemoteCode", convert="flag"),
    value_row("model.enable_gradient_checkpointing", "trainer.activationCheckpointing", convert="checkpointing"),
    joined_row("model.lora_rank", "trainer.lora.rank", "no LoRA"),
    joined_row("model.lora_alpha", "trainer.lora.alpha", "no LoRA"),
    joined_row("model.target_modules", "trainer.lora.targets", "no LoRA, or all linear layers"),
    value_row("optim.lr", "trainer.optimizer.lr", "peak learning rate", convert="number"),
    value_row("optim.weight_decay", "trainer.optimizer.weightDecay", convert="number"),
    joined_row("optim.betas", "trainer.optimizer.beta1, trainer.optimizer.beta2"),
    value_row("optim.clip_grad", "trainer.optimizer.maxGradNorm", convert="number"),
    joined_row("optim.warmup_steps_ratio", "trainer.scheduler.warmupSteps", "no warm-up"),
    joined_row("optim.lr_warmup_steps", "trainer.scheduler.warmupSteps", "warmup_steps_ratio decides"),
    value_row("optim.eps", "trainer.optimizer.eps", convert="number"),
    joined_row("optim.muon_momentum", "trainer.optimizer.momentum", "only with the optimizer muon"),
    value_row("optim.name", "trainer.optimizer.name", values=OPTIMIZERS),
    value_row("optim.optimizer", "trainer.optimizer.name", values=OPTIMIZERS),
    value_row("optim.lr_decay_style", "trainer.scheduler.name", values=SCHEDULES),
    value_row("optim.min_lr_ratio", "trainer.scheduler.minLrRatio", convert="number"),
    joined_row("optim.min_lr", "trainer.scheduler.minLrRatio", "0, the default"),
    value_row(
        "optim.lr_scheduler_type",
        "trainer.scheduler.name",
        values=SCHEDULES,
    ),
    joined_row("ulysses_sequence_parallel_size", "trainer.parallelism.cp", "one rank per row"),
    dropped_row("use_remove_padding", "rows are always packed without padding"),
    dropped_row("engine", "FSDP2 trains, with tensor, context, expert and pipeline parallelism"),
    joined_row("trainer.total_epochs", "data.epochs, maxSteps"),
    joined_row("trainer.total_training_steps", "maxSteps", "total_epochs decides"),
    joined_row("trainer.nnodes", "trainer.replicas"),
    joined_row("trainer.n_gpus_per_node", "trainer.gpusPerReplica"),
    joined_row("--nproc_per_node", "trainer.gpusPerReplica", "trainer.n_gpus_per_node overrides it"),
    joined_row("--nnodes", "trainer.replicas", "trainer.nnodes overrides it"),
    value_row("trainer.seed", "seed", convert="whole"),
    value_row("trainer.save_freq", "checkpoint.interval", convert="positive"),
    value_row("trainer.max_ckpt_to_keep", "checkpoint.keepLast", convert="positive"),
    joined_row("trainer.test_freq", "data.validation", "a held-out loss every 50 steps, where there is one"),
    joined_row("trainer.experiment_name", "metadata.name"),
    joined_row("trainer.project_name", "tracking", _TRACKER),
    joined_row("trainer.logger", "tracking", _TRACKER),
    dropped_row("defaults*", "Hydra's list of files; verl's defaults are assumed"),
    dropped_row("--*", "an option of torchrun or Hydra"),
    *read_rows("verl_sft_keys.txt"),
)

INDIFFERENT = ("engine.", "profiler", "checkpoint.", "hydra.", "-")
"""Prefixes of keys that cannot change the training result, even if the key is unknown."""
