"""Check of a run's models for trainability, as far as this machine has information: a folder, the hub's cache, or the name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from rlrun.api.resource import RLRunSpec
from rlrun.config.loading.yaml_text import Key
from rlrun.config.models.model import ModelConfig
from rlrun.config.models.roles import TRAINING_TASKS
from rlrun.config.trainable import quantization_note, refusal_by_name
from rlrun.fit.sources import cached_folder
from rlrun.hub.trainable import read_refusal

TRAINER: Key = ("trainer",)
"""Key of the whole trainer block. If it is left out, nothing is trained."""


def trained_models(spec: RLRunSpec, left_out: Collection[Key] = ()) -> Mapping[Key, ModelConfig]:
    """Return the models that the trainer loads, by field: the policy, and the reference if it is another model."""
    if spec.task not in TRAINING_TASKS or TRAINER in left_out:
        return {}
    models: dict[Key, ModelConfig] = {("model", "name" if spec.model.path is None else "path"): spec.model}
    reference = spec.algorithm.reference
    if reference is not None and (resolved := reference.resolved(spec.model)) != spec.model:
        models["algorithm", "reference", "model"] = resolved
    return models


def untrainable_models(spec: RLRunSpec) -> list[tuple[Key, str]]:
    """Return the models of a run that cannot be trained, by field, each with reason and fix."""
    found = [(key, why_untrainable(model)) for key, model in trained_models(spec).items()]
    return [(key, why) for key, why in found if why is not None]


def why_untrainable(model: ModelConfig) -> str | None:
    """Return why a model cannot be trained, with a fix, or None if this machine has no reason against it."""
    if model.path is not None:
        return read_refusal(Path(model.path), model.path)
    if model.name is None:
        return None
    folder = cached_folder(model.name)
    return refusal_by_name(model.name) if folder is None else read_refusal(folder, model.name)


def quantization_notes(models: Mapping[Key, ModelConfig]) -> Iterator[tuple[Key, str]]:
    """Yield notes about repositories whose names indicate quantized weights."""
    for key, model in models.items():
        if (
            model.name is not None
            and cached_folder(model.name) is None
            and (note := quantization_note(model.name)) is not None
        ):
            yield key, note
