"""AReaL's keys of supervised fine-tuning: those of `actor` are `model`'s, and nothing is sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlrun.convert.tables import areal
from rlrun.convert.tables.row import Row, drop, joined

ALIASES: Mapping[str, str] = {}
DEFAULTS: Mapping[str, object] = {
    "model.optimizer.weight_decay": 0.01,
    "model.optimizer.warmup_steps_proportion": 0.001,
    "cluster.n_gpus_per_node": 8,
    "cluster.n_nodes": 1,
    "total_train_epochs": 1,
    "train_dataset.batch_size": 1,
}
_DATA: tuple[Row, ...] = (
    joined("train_dataset.path", "data.sources"),
    joined("train_dataset.batch_size", "data.batchSize"),
    joined("train_dataset.max_length", "seqLen", "no bound"),
    joined("train_dataset.shuffle", "data.shuffle", "each epoch has a new order"),
    drop("train_dataset.type", "task: SFT", fine=("sft",)),
    joined("valid_dataset.path", "data.validation", "no held-out loss"),
    drop("valid_dataset.*", "held-out rows are read as the others"),
    joined("evaluator.freq_*", "data.validation", "a held-out loss every 50 steps, where there is one"),
    joined("total_train_epochs", "data.epochs, maxSteps"),
    joined("cluster.n_nodes", "trainer.replicas", "the allocation goes before"),
)
_NOT_HERE = ("rollout.", "gconfig.", "critic.", "ref", "teacher.", "vllm.", "sglang.", "model.", "max_", "n_trajs")

_PARTS = ("rollout.", "gconfig.", "actor.", "critic.", "ref.", "teacher.", "vllm.", "sglang.")

ROWS: tuple[Row, ...] = (
    *_DATA,
    *(
        replace(row, key=row.key.replace("actor.", "model.", 1))
        for row in areal.ROWS
        if not row.key.startswith(_NOT_HERE) and row.key not in {mine.key for mine in _DATA} | {"batch_size"}
    ),
    *(drop(f"{name}*", "of parts that a supervised run has not") for name in _PARTS),
)
