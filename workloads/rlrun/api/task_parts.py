"""Rules for the parts of a run that each task needs or ignores."""

from __future__ import annotations

from rlrun.api import unread
from rlrun.api.pods import InferenceBlock, TrainerBlock
from rlrun.api.run_fields import RunFields
from rlrun.config.algorithm.names import DEFAULT_PRESET
from rlrun.config.models.checkpoint import CheckpointConfig, WeightSyncConfig
from rlrun.config.models.learning import AlgorithmConfig
from rlrun.config.models.roles import TRAINING_TASKS
from rlrun.config.models.rollout import SamplingConfig
from rlrun.config.rule import Rule, list_cel

SFT_ALGORITHM_FIELDS = {"preset", "loss", "aggregation", "aggregation_length"}
"""Parts of the objective that apply to supervised fine-tuning."""

TASK_RULES = (
    Rule(
        "self.task == 'SFT' || !has(self.data)",
        "data needs task SFT; remove it or set task to SFT",
        ".data",
    ),
    Rule(
        "self.task == 'SFT' || self.environments.size() > 0",
        "environments is empty, but task {self.task} needs at least one; add an environment",
        ".environments",
    ),
    Rule(
        "self.task != 'SFT' || has(self.data)",
        "data is not set, but task SFT needs it; set data",
        ".data",
    ),
    Rule(
        "self.task != 'SFT' || self.environments.size() == 0",
        "environments needs task RL or Eval, but task is SFT; remove it",
        ".environments",
    ),
    Rule(
        "self.task != 'SFT' || !has(self.evaluation)",
        "evaluation needs task RL or Eval, but task is SFT; remove it",
        ".evaluation",
    ),
    Rule(
        f"self.task != 'SFT' || self.algorithm.preset in {list_cel((DEFAULT_PRESET, 'sft'))}",
        "algorithm.preset ({self.algorithm.preset}) needs task RL; remove it or set it to sft",
        ".algorithm.preset",
    ),
    Rule(
        "!(self.task in ['RL', 'SFT']) || !has(self.policies)",
        "policies needs a task without training, but task is {self.task}; remove it or set task to Eval",
        ".policies",
    ),
)
"""Admission rules of the whole specification."""


def check_task_parts(spec: RunFields) -> None:
    """Check that the parts that the task needs are set, and that parts that it ignores are not set.

    Raises:
        ValueError: The message has field, value and fix.
    """
    if spec.task != "SFT":
        if spec.data is not None:
            raise ValueError("data needs task SFT; remove it or set task to SFT")
        if not spec.environments:
            raise ValueError(f"environments is empty, but task {spec.task} needs at least one; add an environment")
    if spec.task in TRAINING_TASKS and spec.policies is not None:
        raise ValueError(
            f"policies needs a task without training, but task is {spec.task}; remove it or set task to Eval"
        )
    if spec.task == "SFT":
        _check_supervision(spec)
    elif spec.task != "RL":
        unread.refuse_set_field(_parts_of_training(spec), "tasks that train")


def _check_supervision(spec: RunFields) -> None:
    if spec.data is None:
        raise ValueError("data is not set, but task SFT needs it; set data")
    for name in ("environments", "evaluation"):
        if getattr(spec, name):
            raise ValueError(f"{name} needs task RL or Eval, but task is SFT; remove it")
    if spec.algorithm.preset not in ("sft", AlgorithmConfig().preset):
        raise ValueError(f"algorithm.preset ({spec.algorithm.preset}) needs task RL; remove it or set it to sft")
    only_rl: unread.Parts = (
        ("inference", spec.inference, InferenceBlock.model_fields),
        ("sampling", spec.sampling, SamplingConfig.model_fields),
        ("weightSync", spec.weight_sync, WeightSyncConfig.model_fields),
        (
            "orchestrator",
            spec.orchestrator,
            ("batch_size", "max_concurrency", "oversampling_factor", "max_error_ratio"),
        ),
        ("algorithm", spec.algorithm, [n for n in AlgorithmConfig.model_fields if n not in SFT_ALGORITHM_FIELDS]),
    )
    unread.refuse_set_field(only_rl, "task RL", {"orchestrator.batchSize": "; set data.batchSize instead"})


def _parts_of_training(spec: RunFields) -> unread.Parts:
    """Return the parts that a run without a trainer ignores. Environments may be set as in the training run."""
    return (
        ("", spec, ("max_steps", "tracking")),
        ("algorithm", spec.algorithm, AlgorithmConfig.model_fields),
        ("trainer", spec.trainer, [name for name in TrainerBlock.model_fields if name != "lora"]),
        *((("trainer.lora", spec.trainer.lora, ("slots", "modules_to_save")),) if spec.trainer.lora else ()),
        (
            "orchestrator",
            spec.orchestrator,
            (
                *("batch_size", "oversampling_factor", "trajectory_strategy"),
                *("record_rollouts", "keep_traces", "max_error_ratio"),
            ),
        ),
        (
            "checkpoint",
            spec.checkpoint,
            [name for name in CheckpointConfig.model_fields if name != "grace_period_seconds"],
        ),
        ("inference", spec.inference, ("autoscale",)),
        ("weightSync", spec.weight_sync, ("transport", "deltas")),
        *((("evaluation", spec.evaluation, ("interval", "timeout_seconds")),) if spec.evaluation else ()),
    )
