"""From the resource to the roles' configuration: one pure function, used by `rlrun local`, `rlrun render` and the operator."""

from __future__ import annotations

from rlrun.api.resource import RLRunSpec
from rlrun.api.task_parts import SFT_ALGORITHM_FIELDS
from rlrun.config.base import Config, Fields
from rlrun.config.models.learning import AlgorithmConfig
from rlrun.config.models.roles import (
    InferenceConfig,
    InferenceSpec,
    OrchestratorConfig,
    OrchestratorSpec,
    RoleConfig,
    TrainerConfig,
    TrainerSpec,
    micro_batch_tokens,
)
from rlrun.config.models.run import RunConfig


def resolve(spec: RLRunSpec, *, name: str, uid: str, output_dir: str) -> RunConfig:
    """Fill every shared value into every role.

    Args:
        spec: a valid specification.
        name: the run's name.
        uid: unique over all runs that ever had this name.
        output_dir: the run's folder as the roles see it.
    """
    shared = RoleConfig(
        name=name,
        uid=uid,
        output_dir=output_dir,
        task=spec.task,
        model=spec.model,
        max_steps=spec.max_steps,
        seq_len=spec.seq_len,
        seed=spec.seed,
        colocated=spec.placement.colocate,
    )
    common = dict(shared)
    algorithm = _algorithm(spec)
    environments = [
        environment.model_copy(update={"sampling": environment.sampling or spec.sampling})
        for environment in spec.environments
    ]
    return RunConfig(
        trainer=TrainerConfig(
            **_trainer(spec),
            **common,
            algorithm=algorithm,
            environment_algorithms={
                environment.label: own
                for environment in environments
                if (own := environment.algorithm.trainer_part(algorithm))
            },
            checkpoint=spec.checkpoint,
            weight_sync=spec.weight_sync,
        ),
        inference=InferenceConfig(**_inference(spec), **common, lora=spec.trainer.lora, weight_sync=spec.weight_sync)
        if _serves(spec)
        else None,
        orchestrator=OrchestratorConfig(
            **_computing(spec.orchestrator, OrchestratorSpec),
            **common,
            algorithm=algorithm,
            environments=environments,
            data=spec.data,
            policies=spec.policies,
            sampling=spec.sampling,
            evaluation=spec.evaluation,
            checkpoint=spec.checkpoint,
            weight_sync=spec.weight_sync,
            shared_with=spec.trainer.shared_with,
            engine_parsers=spec.inference.parsers,
        ),
        tracking=spec.tracking,
        mirror=spec.storage.mirror,
    )


def _algorithm(spec: RLRunSpec) -> AlgorithmConfig:
    if spec.task != "SFT":
        return spec.algorithm
    parts = {name: getattr(spec.algorithm, name) for name in SFT_ALGORITHM_FIELDS}
    return AlgorithmConfig(**parts | {"preset": "sft"})


def _trainer(spec: RLRunSpec) -> Fields:
    block = _computing(spec.trainer, TrainerSpec)
    block["micro_batch_tokens"] = spec.trainer.micro_batch_tokens or micro_batch_tokens(spec.seq_len)
    return block


def _inference(spec: RLRunSpec) -> Fields:
    block = _computing(spec.inference, InferenceSpec)
    block["max_model_len"] = spec.inference.max_model_len or spec.seq_len
    block["replicas"] = spec.trainer.replicas if spec.placement.colocate else spec.inference.least
    return block


def _serves(spec: RLRunSpec) -> bool:
    """True if the run has engines of its own."""
    return spec.task != "SFT" and spec.trainer.shared_with is None


def _computing(block: Config, spec: type[Config]) -> Fields:
    """The fields of a role's block that say what it computes; the others are about its pods."""
    return {name: getattr(block, name) for name in spec.model_fields}
