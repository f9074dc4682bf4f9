"""Report on a run's models and memory: trainability of the models, and the needs of each role compared with its GPUs.

Trainability is checked as far as this machine has information: a folder, the hub's cache, or the name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic.alias_generators import to_camel

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.config.families import quantization_note, refusal_by_name
from rlrun.config.loading.yaml_text import Key
from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.roles import TRAINING_TASKS
from rlrun.fit.architecture import Architecture
from rlrun.fit.engine_memory import engine_needs
from rlrun.fit.layout import layout_problems
from rlrun.fit.memory_parts import GIB, Needs, show_gib
from rlrun.fit.model_sources import cached_folder
from rlrun.fit.trainer_memory import trainer_needs
from rlrun.hub.refused_models import untrainable_reason

TRAINER: Key = ("trainer",)
"""Key of the whole trainer block. If it is left out, nothing is trained."""


def trained_models(spec: RLRunSpec, left_out: Collection[Key] = ()) -> Mapping[Key, ModelConfig]:
    """Return the models that the trainer loads, by field: the policy, and the reference if it is another model."""
    if spec.task not in TRAINING_TASKS or TRAINER in left_out:
        return {}
    models: dict[Key, ModelConfig] = {("model", "name" if spec.model.path is None else "path"): spec.model}
    reference = spec.algorithm.reference
    if reference is not None and (resolved := reference.resolve_model(spec.model)) != spec.model:
        models["algorithm", "reference", "model"] = resolved
    return models


def untrainable_models(spec: RLRunSpec) -> list[tuple[Key, str]]:
    """Return the models of a run that cannot be trained, by field, each with reason and fix."""
    found = [(key, why_untrainable(model)) for key, model in trained_models(spec).items()]
    return [(key, why) for key, why in found if why is not None]


def why_untrainable(model: ModelConfig) -> str | None:
    """Return why a model cannot be trained, with a fix, or None if this machine has no reason against it."""
    own_class = model.class_ is not None
    if model.path is not None:
        return untrainable_reason(Path(model.path), model.path, own_class=own_class)
    if model.name is None:
        return None
    folder = cached_folder(model.name)
    return (
        refusal_by_name(model.name) if folder is None else untrainable_reason(folder, model.name, own_class=own_class)
    )


def quantization_notes(models: Mapping[Key, ModelConfig]) -> Iterator[tuple[Key, str]]:
    """Yield notes about repositories whose names indicate quantized weights."""
    for key, model in models.items():
        if (
            model.name is not None
            and cached_folder(model.name) is None
            and (note := quantization_note(model.name)) is not None
        ):
            yield key, note


@dataclass(frozen=True)
class Surroundings:
    """Facts in addition to a specification."""

    model: Architecture
    """Shape of the policy."""
    reference: Architecture | None = None
    """Shape of a frozen model in the trainer."""
    memory: Mapping[str, int] | None = None
    """Bytes of a GPU, by role."""
    product: str | None = None
    """Product name of the trainer's GPUs, if it is known."""
    engine_product: str | None = None
    """Product name of the engines' GPUs, if it is known."""


@dataclass(frozen=True)
class Change:
    """Changed fields with which a role fits."""

    fields: Mapping[str, object]
    """Values by the fields' paths in the manifest."""
    role: str
    total: float
    """Bytes of the role with the change."""
    limit: float
    gpus: int
    """Number of GPUs of the role with the change."""

    def __str__(self) -> str:
        what = ", ".join(f"{path}: {yaml_value(value)}" for path, value in self.fields.items())
        return f"{what} ({show_gib(self.total)} of {show_gib(self.limit)}, {self.gpus} GPU{'s' * (self.gpus != 1)})"


def yaml_value(value: object) -> str:
    """Return a value in the notation of a manifest."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {yaml_value(inner)}" for name, inner in value.items()) + "}"
    return str(value).replace("'", '"') if isinstance(value, list) else str(value)


def gpu_products(spec: RLRunSpec) -> dict[str, str | None]:
    """Return the requested GPU product of each role that has its own GPUs."""
    placement, own = spec.placement, spec.trainer.shared_with is None
    found = {}
    if own and spec.task in TRAINING_TASKS and spec.trainer.gpus_per_replica:
        found["trainer"] = placement.trainer.gpu_product or placement.gpu_product
    if own and spec.task != "SFT" and spec.inference.gpus_per_replica:
        found["inference"] = placement.inference.gpu_product or placement.gpu_product
    return found


def needs_of(spec: RLRunSpec, around: Surroundings) -> list[Needs]:
    """Return the needs of each role with GPUs.

    Args:
        spec: specification of the run.
        around: models and GPUs.
    """
    config = resolve_spec(spec, name="fit", uid="fit", output_dir="/fit")
    memory = around.memory or {}
    found = []
    trainer, engine = config.trainer, config.inference
    own = trainer.task in TRAINING_TASKS and trainer.shared_with is None
    if own and trainer.gpus_per_replica:
        found.append(
            trainer_needs(
                trainer,
                around.model,
                around.reference,
                memory=memory["trainer"],
                colocated=spec.placement.colocate,
                product=around.product,
            )
        )
    if engine is not None and engine.gpus_per_replica:
        found.append(engine_needs(engine, around.model, memory=memory["inference"], product=around.engine_product))
    return found


@dataclass(frozen=True)
class Refusal:
    """Field that does not fit the models. The run would fail at its start, with any amount of memory."""

    field: str
    """Path in the manifest."""
    message: str
    """Value and fix."""


def refusals_of(spec: RLRunSpec, around: Surroundings) -> list[Refusal]:
    """Return all fields of a run that do not fit its models or GPUs."""
    layout = layout_problems(spec, around.model, around.reference, product=around.product)
    found = [*untrainable_models(spec), *layout]
    return [Refusal(".".join(["spec", *(to_camel(str(part)) for part in key)]), message) for key, message in found]


def report_lines(
    name: str, needs: Sequence[Needs], advice: Sequence[Change], model: Architecture, refusals: Sequence[Refusal] = ()
) -> list[str]:
    """Return the report as lines of text."""
    count = f"{model.parameters / 1e9:.2f} billion parameters{'' if model.is_exact else ' (about)'}"
    shown = [f"{name}: {count}"]
    shown += [f"  REFUSED: {refusal.field}: {refusal.message}" for refusal in refusals]
    for role_needs in needs:
        verdict = "fits" if role_needs.fits else "DOES NOT FIT"
        count = f"{role_needs.gpus} GPU{'s' * (role_needs.gpus != 1)}"
        size = f"{show_gib(role_needs.total)} of {show_gib(role_needs.limit)} ({role_needs.limit_is})"
        shown += ["", f"{role_needs.role}, {count}: {verdict}, each needs {size}"]
        shown += [
            f"  {part.name:<26}{show_gib(part.bytes):>11}  {part.why}".rstrip()
            for part in role_needs.parts
            if part.bytes >= 1
        ]
        shown += [f"  note: {remark}" for remark in role_needs.remarks]
        shown += _advice_lines(role_needs, advice)
    return shown


def _advice_lines(needs: Needs, advice: Sequence[Change]) -> list[str]:
    if needs.fits:
        return []
    own = [change for change in advice if change.role == needs.role]
    if not own:
        return ["  no tested change makes it fit; use a smaller model, adapters (trainer.lora), or larger GPUs"]
    return ["  fits with one of:", *(f"    - {change}" for change in own)]


def report_document(
    name: str, needs: Sequence[Needs], advice: Sequence[Change], model: Architecture, refusals: Sequence[Refusal] = ()
) -> dict[str, object]:
    """Return the report as JSON data, with sizes in GiB."""
    return {
        "run": name,
        "parameters": model.parameters,
        "exact": model.is_exact,
        "fits": not refusals and all(role_needs.fits for role_needs in needs),
        "refused": [{"field": refusal.field, "message": refusal.message} for refusal in refusals],
        "roles": [
            {
                "role": role_needs.role,
                "gpus": role_needs.gpus,
                "fits": role_needs.fits,
                "needed_gib": _round_gib(role_needs.total),
                "limit_gib": _round_gib(role_needs.limit),
                "parts_gib": {part.name: _round_gib(part.bytes) for part in role_needs.parts},
                "notes": list(role_needs.remarks),
                "advice": [
                    {"fields": dict(change.fields), "needed_gib": _round_gib(change.total), "gpus": change.gpus}
                    for change in advice
                    if change.role == role_needs.role
                ],
            }
            for role_needs in needs
        ],
    }


def _round_gib(size: float) -> float:
    return round(size / GIB, 3)
