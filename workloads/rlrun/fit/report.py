"""The memory of a whole run against its GPUs, and how it is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic.alias_generators import to_camel

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.config.models.roles import TRAINING_TASKS
from rlrun.fit.architecture import Architecture
from rlrun.fit.engine import engine_needs
from rlrun.fit.gpu_products import GIB, show_gib
from rlrun.fit.layout import layout_problems
from rlrun.fit.parts import Needs
from rlrun.fit.trainable import untrainable_models
from rlrun.fit.trainer import trainer_needs


@dataclass(frozen=True)
class Surroundings:
    """Facts that a specification alone does not give."""

    model: Architecture
    """The policy's shape."""
    reference: Architecture | None = None
    """Shape of a frozen model beside it."""
    memory: Mapping[str, int] | None = None
    """Bytes of a GPU, by role."""
    product: str | None = None
    """The trainer's GPUs, if they are known by name."""


@dataclass(frozen=True)
class Change:
    """Changed fields with which a role fits."""

    fields: Mapping[str, object]
    """Value by the field's path in the manifest."""
    role: str
    total: float
    """Bytes of the role with the change."""
    limit: float
    gpus: int
    """GPUs of the role with the change."""

    def __str__(self) -> str:
        what = ", ".join(f"{path}: {yaml_value(value)}" for path, value in self.fields.items())
        return f"{what} ({show_gib(self.total)} of {show_gib(self.limit)}, {self.gpus} GPU{'s' * (self.gpus != 1)})"


def yaml_value(value: object) -> str:
    """A value as a manifest has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {yaml_value(one)}" for name, one in value.items()) + "}"
    return str(value).replace("'", '"') if isinstance(value, list) else str(value)


def gpu_products(spec: RLRunSpec) -> dict[str, str | None]:
    """Product that the manifest asks for, of each role that has GPUs of its own."""
    placement, own = spec.placement, spec.trainer.shared_with is None
    found = {}
    if own and spec.task in TRAINING_TASKS and spec.trainer.gpus_per_replica:
        found["trainer"] = placement.trainer.gpu_product or placement.gpu_product
    if own and spec.task != "SFT" and spec.inference.gpus_per_replica:
        found["inference"] = placement.inference.gpu_product or placement.gpu_product
    return found


def needs_of(spec: RLRunSpec, around: Surroundings) -> list[Needs]:
    """Needs of each role that has GPUs.

    Args:
        spec: the run's.
        around: shapes and GPUs.
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
        found.append(engine_needs(engine, around.model, memory=memory["inference"]))
    return found


@dataclass(frozen=True)
class Refusal:
    """Field that does not go with the models: the run would fail at its start, whatever the memory."""

    field: str
    """Path in the manifest."""
    message: str
    """Value and fix."""


def refusals_of(spec: RLRunSpec, around: Surroundings) -> list[Refusal]:
    """All fields of a run that do not go with its models or GPUs."""
    layout = layout_problems(spec, around.model, around.reference, product=around.product)
    found = [*untrainable_models(spec), *layout]
    return [Refusal(".".join(["spec", *(to_camel(str(part)) for part in key)]), message) for key, message in found]


def report_lines(
    name: str, needs: Sequence[Needs], advice: Sequence[Change], model: Architecture, refusals: Sequence[Refusal] = ()
) -> list[str]:
    """The report for people."""
    count = f"{model.parameters / 1e9:.2f} billion parameters{'' if model.exact else ' (about)'}"
    shown = [f"{name}: {count}"]
    shown += [f"  REFUSED: {one.field}: {one.message}" for one in refusals]
    for one in needs:
        verdict = "fits" if one.fits else "DOES NOT FIT"
        shown += [
            "",
            f"{one.role}, {one.gpus} GPU{'s' * (one.gpus != 1)}: {verdict}, each needs {show_gib(one.total)} of {show_gib(one.limit)} "
            f"({one.limit_is})",
        ]
        shown += [
            f"  {part.name:<26}{show_gib(part.bytes):>11}  {part.why}".rstrip() for part in one.parts if part.bytes >= 1
        ]
        shown += [f"  note: {remark}" for remark in one.remarks]
        shown += _advice_lines(one, advice)
    return shown


def _advice_lines(needs: Needs, advice: Sequence[Change]) -> list[str]:
    if needs.fits:
        return []
    own = [change for change in advice if change.role == needs.role]
    if not own:
        return ["  no change that was tried makes it fit: use a smaller model, adapters (trainer.lora), or larger GPUs"]
    return ["  fits with one of:", *(f"    - {change}" for change in own)]


def report_document(
    name: str, needs: Sequence[Needs], advice: Sequence[Change], model: Architecture, refusals: Sequence[Refusal] = ()
) -> dict[str, object]:
    """The report for programs. Sizes in GiB."""
    return {
        "run": name,
        "parameters": model.parameters,
        "exact": model.exact,
        "fits": not refusals and all(one.fits for one in needs),
        "refused": [{"field": one.field, "message": one.message} for one in refusals],
        "roles": [
            {
                "role": one.role,
                "gpus": one.gpus,
                "fits": one.fits,
                "needed_gib": _round_gib(one.total),
                "limit_gib": _round_gib(one.limit),
                "parts_gib": {part.name: _round_gib(part.bytes) for part in one.parts},
                "notes": list(one.remarks),
                "advice": [
                    {"fields": dict(change.fields), "needed_gib": _round_gib(change.total), "gpus": change.gpus}
                    for change in advice
                    if change.role == one.role
                ],
            }
            for one in needs
        ],
    }


def _round_gib(size: float) -> float:
    return round(size / GIB, 3)
