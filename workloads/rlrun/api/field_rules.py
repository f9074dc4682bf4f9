"""Rules between the fields of a run: lengths in tokens, shared GPUs, and parts that a task needs or ignores.

The lengths are those of prompts, samples and micro-batches. GPUs are shared by trainer and engines with `placement.colocate`.

A set field that the run's task ignores is refused. A field at its default is not refused: it cannot be distinguished from an unset field.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlrun.api.pod_fields import InferenceBlock, PodFields, TrainerBlock
from rlrun.api.run_fields import RunFields
from rlrun.config.algorithm.names import DEFAULT_PRESET
from rlrun.config.base import Config, Rule, list_cel
from rlrun.config.models.checkpoint import CheckpointConfig, WeightSyncConfig
from rlrun.config.models.learning import AlgorithmConfig
from rlrun.config.models.roles import TRAINING_TASKS
from rlrun.config.models.rollout import SamplingConfig

_TOO_LONG = "self.environments.map(e, has(e.sampling) && e.sampling.maxTokens >= self.seqLen)"
_TOO_LONG_TOKENS = (
    "self.environments.map(e, has(e.sampling) && e.sampling.maxTokens >= self.seqLen, e.sampling.maxTokens)[0]"
)

LENGTH_RULES = (
    Rule(
        "!has(self.inference.maxModelLen) || self.inference.maxModelLen >= self.seqLen",
        "inference.maxModelLen ({self.inference.maxModelLen}) must be at least seqLen ({self.seqLen}); "
        "raise maxModelLen or remove it",
        ".inference.maxModelLen",
    ),
    Rule(
        "!has(self.trainer.microBatchTokens) || self.trainer.microBatchTokens >= self.seqLen",
        "trainer.microBatchTokens ({self.trainer.microBatchTokens}) must be at least seqLen ({self.seqLen}): "
        "a micro-batch must hold at least one sample; raise microBatchTokens or remove it",
        ".trainer.microBatchTokens",
    ),
    Rule(
        "!has(self.model.tiny) || self.model.tiny.maxLength >= self.seqLen",
        "model.tiny.maxLength ({self.model.tiny.maxLength}) must be at least seqLen ({self.seqLen}); raise maxLength or lower seqLen",
        ".model.tiny.maxLength",
    ),
    Rule(
        "self.sampling.maxTokens < self.seqLen || self.environments.all(e, has(e.sampling))",
        "sampling.maxTokens ({self.sampling.maxTokens}) must be less than seqLen ({self.seqLen}), "
        "which also includes the prompt; lower maxTokens or raise seqLen",
        ".sampling.maxTokens",
    ),
    Rule(
        f"!{_TOO_LONG}.exists(long, long)",
        f"environments[{{{_TOO_LONG}.indexOf(true)}}].sampling.maxTokens "
        f"({{{_TOO_LONG_TOKENS}}}) must be less than seqLen "
        "({self.seqLen}), which also includes the prompt; lower maxTokens or raise seqLen",
        ".environments",
    ),
)
"""Admission rules of the whole specification."""


def check_samples(spec: RunFields) -> None:
    """Check that engine, micro-batch and model can hold a sample of `seqLen` tokens.

    Raises:
        ValueError: The message has field, value and fix.
    """
    engine_len = spec.inference.max_model_len
    if engine_len is not None and engine_len < spec.seq_len:
        raise ValueError(
            f"inference.maxModelLen ({engine_len}) must be at least seqLen ({spec.seq_len}); raise maxModelLen or remove it"
        )
    row = spec.trainer.micro_batch_tokens
    if row is not None and row < spec.seq_len:
        raise ValueError(
            f"trainer.microBatchTokens ({row}) must be at least seqLen ({spec.seq_len}): a micro-batch must hold at least one sample; "
            "raise microBatchTokens or remove it"
        )
    tiny = spec.model.tiny
    if tiny is not None and tiny.max_length < spec.seq_len:
        raise ValueError(
            f"model.tiny.maxLength ({tiny.max_length}) must be at least seqLen ({spec.seq_len}); raise maxLength or lower seqLen"
        )


def check_replies(spec: RunFields) -> None:
    """Check that `seqLen` exceeds the longest reply, in training and in evaluation, so that a prompt fits too.

    Raises:
        ValueError: The message has field, value and fix.
    """
    for i, environment in enumerate(spec.environments):
        sampling = environment.sampling or spec.sampling
        if sampling.max_tokens >= spec.seq_len:
            path = f"environments[{i}].sampling" if environment.sampling else "sampling"
            raise ValueError(
                f"{path}.maxTokens ({sampling.max_tokens}) must be less than seqLen ({spec.seq_len}), "
                "which also includes the prompt; lower maxTokens or raise seqLen"
            )
        if spec.evaluation is not None and spec.evaluation.sampling is not None:
            try:
                spec.evaluation.sampling.check(sampling, seq_len=spec.seq_len)
            except ValueError as error:
                raise ValueError(f"evaluation.sampling, for environments[{i}]: {error}") from None


Parts = Iterable[tuple[str, Config, Iterable[str]]]
"""Path of a block, the block, and its fields that the task ignores."""


def refuse_set_field(parts: Parts, owner: str, hints: dict[str, str] | None = None) -> None:
    """Refuse the first field that is not at its default.

    Args:
        parts: ignored fields.
        owner: what the fields apply to, as the end of "applies only to ...".
        hints: alternatives, by path.

    Raises:
        ValueError: The message has field, value and fix.
    """
    for block, given, names in parts:
        for name in names:
            info = type(given).model_fields[name]
            value = getattr(given, name)
            if value != info.get_default(call_default_factory=True):
                path = f"{block}.{info.alias}".lstrip(".")
                hint = (hints or {}).get(path, "")
                raise ValueError(f"{path} ({value}) applies only to {owner}; remove it{hint}")


COLOCATION_RULES = (
    Rule(
        "!self.placement.colocate || self.algorithm.maxAsyncLevel == 0",
        "algorithm.maxAsyncLevel ({self.algorithm.maxAsyncLevel}) must be 0 with placement.colocate, because engines sleep while a step "
        "trains; set maxAsyncLevel: 0",
        ".algorithm.maxAsyncLevel",
    ),
    Rule(
        "!self.placement.colocate || !has(self.trainer.elastic)",
        "trainer.elastic (min {self.trainer.elastic.min}) cannot be used with placement.colocate, which puts engines into the trainer's "
        "pods; remove one of them",
        ".trainer.elastic",
    ),
)
"""Admission rules of the whole specification."""


def check_colocation(spec: RunFields) -> None:
    """Check that trainer and engines can use the same GPUs in turn.

    Raises:
        ValueError: The message has field, value and fix.
    """
    if not spec.placement.colocate:
        return
    trainer, engine = spec.trainer, spec.inference
    if spec.task != "RL":
        raise ValueError(f"placement.colocate (true) needs task RL, but task is {spec.task}; remove it")
    if trainer.shared_with is not None:
        raise ValueError(
            f"placement.colocate (true) is set by the host ({trainer.shared_with}) of trainer.sharedWith; remove it"
        )
    if trainer.lora is not None and trainer.lora.slots > 1:
        raise ValueError(
            f"trainer.lora.slots ({trainer.lora.slots}) lets other runs use engines that sleep while this run trains, with "
            "placement.colocate; remove one of them"
        )
    level = spec.algorithm.max_async_level
    if level != 0:
        raise ValueError(
            f"algorithm.maxAsyncLevel ({level}) must be 0 with placement.colocate, because engines sleep while a step trains; "
            "set maxAsyncLevel: 0"
        )
    if trainer.elastic is not None:
        raise ValueError(
            f"trainer.elastic (min {trainer.elastic.min}) cannot be used with placement.colocate, which puts engines into the trainer's "
            "pods; remove one of them"
        )
    if spec.weight_sync.transport != "Filesystem":
        raise ValueError(
            f"weightSync.transport ({spec.weight_sync.transport}) needs two GPUs, but placement.colocate uses one GPU for both; "
            "set transport: Filesystem"
        )
    if engine.replicas not in (1, trainer.replicas):
        raise ValueError(
            f"inference.replicas ({engine.replicas}) must be trainer.replicas ({trainer.replicas}) with placement.colocate: each trainer "
            "pod has one engine; remove it"
        )
    if engine.gpus_per_replica != trainer.gpus_per_replica:
        raise ValueError(
            f"inference.gpusPerReplica ({engine.gpus_per_replica}) must be trainer.gpusPerReplica ({trainer.gpus_per_replica}) with "
            "placement.colocate, because they are the same GPUs; change one of them"
        )
    of_pods: Parts = (
        ("inference", engine, [*PodFields.model_fields, "min_available", "autoscale", "spot"]),
        ("placement", spec.placement, ("inference", "spread_inference")),
    )
    refuse_set_field(of_pods, "engines with their own pods")


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
        refuse_set_field(_parts_of_training(spec), "tasks that train")


def _check_supervision(spec: RunFields) -> None:
    if spec.data is None:
        raise ValueError("data is not set, but task SFT needs it; set data")
    for name in ("environments", "evaluation"):
        if getattr(spec, name):
            raise ValueError(f"{name} needs task RL or Eval, but task is SFT; remove it")
    if spec.algorithm.preset not in ("sft", AlgorithmConfig().preset):
        raise ValueError(f"algorithm.preset ({spec.algorithm.preset}) needs task RL; remove it or set it to sft")
    only_rl: Parts = (
        ("inference", spec.inference, InferenceBlock.model_fields),
        ("sampling", spec.sampling, SamplingConfig.model_fields),
        ("weightSync", spec.weight_sync, WeightSyncConfig.model_fields),
        (
            "orchestrator",
            spec.orchestrator,
            ("batch_size", "max_concurrency", "oversampling_factor", "max_error_ratio"),
        ),
        ("algorithm", spec.algorithm, [n for n in AlgorithmConfig.model_fields if n not in SFT_ALGORITHM_FIELDS]),
        ("trainer", spec.trainer, ("epochs_per_step",)),
    )
    fixes = {
        "orchestrator.batchSize": "; set data.batchSize instead",
        "trainer.epochsPerStep": "; set data.epochs instead",
    }
    refuse_set_field(only_rl, "task RL", fixes)


def _parts_of_training(spec: RunFields) -> Parts:
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
