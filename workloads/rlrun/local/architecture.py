"""The trainer's proof that it can train a model's architecture, made before anything starts where the model is a folder here.

The proof needs torch, which a command line does not import: it runs in a process of its own, beside those that load a run's environments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from rlrun.api.resource import RLRunSpec
from rlrun.config.loading.yaml_text import Key
from rlrun.config.models.model import ModelConfig
from rlrun.config.models.roles import TRAINING_TASKS
from rlrun.environments.process.life import Command, Limits
from rlrun.local.user_code import Finding, Piece

CHECK = "rlrun.trainer.modeling.load_weights:check_folder"
LIMITS = Limits(start_seconds=180.0, memory_bytes=16 * 1024**3)
"""Limits of a proof: most of its time is the import of torch and transformers; a model's own code may do anything."""
TRAINER: Key = ("trainer",)
"""Left out as a whole, nothing is trained."""


def trained_models(spec: RLRunSpec, left_out: Collection[Key]) -> Mapping[Key, ModelConfig]:
    """The models that the trainer loads, by field: the policy, and a reference that is another one."""
    if spec.task not in TRAINING_TASKS or TRAINER in left_out:
        return {}
    models: dict[Key, ModelConfig] = {("model", "name" if spec.model.path is None else "path"): spec.model}
    reference = spec.algorithm.reference
    if reference is not None and (resolved := reference.resolved(spec.model)) != spec.model:
        models["algorithm", "reference", "model"] = resolved
    return models


def proofs(models: Mapping[Key, ModelConfig], wrong: Collection[Key], *, seq_len: int) -> Iterator[Piece]:
    """Proofs to run: for the models that are folders here and have no other problem."""
    for key, model in models.items():
        if model.path is not None and key not in wrong and Path(model.path).is_dir():
            args = {"path": str(Path(model.path).absolute()), "trust_remote_code": model.trust_remote_code}
            yield Piece(key, Command(CHECK, args | {"seq_len": seq_len}, kind="check"), LIMITS)


def unproved(models: Mapping[Key, ModelConfig]) -> Iterator[Finding]:
    """Notices of models that are not at hand."""
    for key, model in models.items():
        if model.name is not None:
            yield Finding(
                key,
                f"{model.name} is not on this machine: the trainer checks at its start, before it reads weights, whether it can "
                "train this architecture",
                notice=True,
            )
