"""Table of AReaL's keys of supervised fine-tuning: the training engine without sampling."""

from __future__ import annotations

from collections.abc import Mapping

from rlrun.convert.tables import areal
from rlrun.convert.tables.row import Row, dropped_row, joined_row

AREAL_SFT_ALIASES: Mapping[str, str] = {**areal.ALIASES, "model.": "actor."}
"""Renamed keys: until release 0.5 the block of the training engine was called `model`."""
AREAL_SFT_DEFAULTS: Mapping[str, object] = {
    **{
        key: default
        for key, default in areal.DEFAULTS.items()
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
    *(row for row in areal.ROWS if not row.key.startswith(_NOT_HERE) and row.key not in _OWN),
)
