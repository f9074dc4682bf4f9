"""Rules between a run's layout and its models' sizes, checked before the start because the roles would only fail minutes later."""

from __future__ import annotations

from collections.abc import Iterator

from rlrun.api.resource import RLRunSpec
from rlrun.config.division import CRITIC_PROBLEM, compile_problem, experts_problem, stages_problem, tensor_problem
from rlrun.config.families import Kind, explain_undivided
from rlrun.config.models.parallel import ParallelismConfig
from rlrun.config.models.roles import TRAINING_TASKS
from rlrun.fit.architecture import Architecture
from rlrun.fit.kernels import kernel_problem

Key = tuple[str | int, ...]
"""Path of a field of the specification, in Python names."""
_REFERENCE = "which also divides algorithm.reference,"


def layout_problems(
    spec: RLRunSpec, model: Architecture, reference: Architecture | None, *, product: str | None = None
) -> Iterator[tuple[Key, str]]:
    """Yield fields that do not fit the models, each with the value and the fix.

    Args:
        spec: specification of the run.
        model: shape of the policy.
        reference: shape of the frozen model, if it is known.
        product: product name of the trainer's GPUs, if it is known.
    """
    own = spec.trainer.shared_with is None
    if spec.task in TRAINING_TASKS and own:
        yield from _check_trainer(spec, model)
        if (fault := kernel_problem(spec.trainer, model, product)) is not None:
            yield ("trainer", "attention"), fault
        if reference is not None:
            yield from _check_reference(spec, model, reference)
    if spec.task != "SFT" and own:
        yield from _check_engine(spec, model)


def _check_trainer(spec: RLRunSpec, model: Architecture) -> Iterator[tuple[Key, str]]:
    layout = spec.trainer.parallelism
    for field, text in _find_indivisible(layout, model):
        yield ("trainer", "parallelism", field), f"{getattr(layout, field)} {text}"
    if layout.pp > 1 and spec.algorithm.critic is not None:
        yield ("trainer", "parallelism", "pp"), f"{layout.pp} {CRITIC_PROBLEM}"
    if (
        spec.trainer.compile
        and (fault := compile_problem(layout.tp, later_weights=spec.trainer.later_weights)) is not None
    ):
        yield ("trainer", "compile"), f"true {fault}"


def _find_indivisible(layout: ParallelismConfig, model: Architecture) -> Iterator[tuple[str, str]]:
    """Yield fields of the layout by which a model cannot be divided, each with text that continues after the value."""
    divided: dict[Kind, int] = {"tp": layout.tp, "cp": layout.cp}
    if model.experts:
        divided["ep"] = layout.ep
    for name, size in divided.items():
        if (fault := explain_undivided(model.trained_type, name, size)) is not None:
            yield name, fault
    if (fault := stages_problem(layout.pp, model.layers, per_rank=layout.local_stages)) is not None:
        yield "pp", fault
    if (fault := tensor_problem(layout.tp, model.divided)) is not None:
        yield "tp", fault
    if (dealt := experts_problem(layout.ep, layout.tp, model.experts)) is not None:
        yield dealt


def _check_reference(spec: RLRunSpec, model: Architecture, reference: Architecture) -> Iterator[tuple[Key, str]]:
    """Check the frozen model, which the trainer divides like the policy."""
    layout = spec.trainer.parallelism
    if reference.vocabulary != model.vocabulary:
        yield (
            ("algorithm", "reference", "model"),
            f"has a vocabulary of {reference.vocabulary:,} tokens, but the policy's has {model.vocabulary:,}; "
            "use a model of the same family",
        )
    known = set(_find_indivisible(layout, model))
    for field, text in _find_indivisible(layout, reference):
        if (field, text) not in known:
            yield ("trainer", "parallelism", field), f"{getattr(layout, field)}, {_REFERENCE} {text}"


def _check_engine(spec: RLRunSpec, model: Architecture) -> Iterator[tuple[Key, str]]:
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
            f"{longest:,} is higher than the model's positions (max_position_embeddings: {model.positions:,}); lower it",
        )
