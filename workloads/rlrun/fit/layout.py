"""Rules that hold between a run's layout and its models' sizes, which the roles would find out minutes later."""

from __future__ import annotations

from collections.abc import Iterator

from rlrun.api.resource import RLRunSpec
from rlrun.config.families import Kind, problem
from rlrun.config.models.roles import TRAINING_TASKS
from rlrun.fit.architecture import Architecture

Key = tuple[str | int, ...]
"""A field of the specification, by Python names."""


def layout_problems(spec: RLRunSpec, model: Architecture, reference: Architecture | None) -> Iterator[tuple[Key, str]]:
    """Fields that do not go with the models, each with the value and the fix.

    Args:
        spec: the run's.
        model: the policy's shape.
        reference: that of the frozen model, if it is known.
    """
    own = spec.trainer.shared_with is None
    if spec.task in TRAINING_TASKS and own:
        yield from _trainer(spec, model)
        if reference is not None and reference.vocabulary != model.vocabulary:
            yield (
                ("algorithm", "reference", "model"),
                f"has a vocabulary of {reference.vocabulary:,} tokens, the policy one of {model.vocabulary:,}: they must be the same; "
                "choose a model of the same family",
            )
    if spec.task != "SFT" and own:
        yield from _engine(spec, model)


def _trainer(spec: RLRunSpec, model: Architecture) -> Iterator[tuple[Key, str]]:
    layout = spec.trainer.parallelism
    divided: dict[Kind, int] = {"tp": layout.tp, "cp": layout.cp}
    if model.experts:
        divided["ep"] = layout.ep
    for name, size in divided.items():
        if (fault := problem(model.model_type, name, size)) is not None:
            yield ("trainer", "parallelism", name), f"{size} {fault}"
    if layout.pp > model.layers:
        yield (
            ("trainer", "parallelism", "pp"),
            f"{layout.pp} is more than the model's layers ({model.layers}); lower pp",
        )
    if layout.pp > 1 and spec.algorithm.critic is not None:
        yield (
            ("trainer", "parallelism", "pp"),
            f"{layout.pp} does not go with algorithm.critic, whose values are computed by a whole model; set pp: 1",
        )
    sizes = {"key-value heads": model.kv_heads, "attention heads": model.heads}
    if not model.experts:
        sizes["intermediate size"] = model.intermediate
    for what, count in sizes.items():
        if count % layout.tp:
            yield ("trainer", "parallelism", "tp"), f"{layout.tp} must divide the model's {what} ({count}); lower tp"
            break
    if layout.ep > 1 and not model.experts:
        yield ("trainer", "parallelism", "ep"), f"{layout.ep}: the model has no experts; set ep: 1"
    elif layout.ep > 1 and model.experts % (layout.ep * layout.tp):
        yield (
            ("trainer", "parallelism", "ep"),
            f"{layout.ep} times tp ({layout.tp}) must divide the model's experts ({model.experts}); lower ep or tp",
        )


def _engine(spec: RLRunSpec, model: Architecture) -> Iterator[tuple[Key, str]]:
    tp, given = spec.inference.tensor_parallel, spec.inference.max_model_len
    if model.heads % tp:
        yield (
            ("inference", "tensor_parallel"),
            f"{tp} must divide the model's attention heads ({model.heads}); lower it",
        )
    longest = given or spec.seq_len
    if model.positions is not None and longest > model.positions:
        key: Key = ("seq_len",) if given is None or spec.seq_len > model.positions else ("inference", "max_model_len")
        yield (
            key,
            f"{longest:,} is more than the model's positions (max_position_embeddings: {model.positions:,}); lower it",
        )
