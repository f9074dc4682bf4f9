"""What is sampled: environments, sampling and evaluation."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, JsonValue, model_validator

from rlrun.config.base import Config
from rlrun.config.environment_algorithm import EnvironmentAlgorithm


class SamplingConfig(Config):
    """How tokens are drawn. The log-probabilities that are trained on are those of the distribution after all of these."""

    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Softmax temperature. The trainer applies the same."""
    max_tokens: Annotated[int, Field(ge=1, le=1_048_576)] = 256
    """Longest reply of the model in one turn, in tokens."""


class PoolConfig(Config):
    """Tasks that the policy finds easy or hard, by the mean reward of their last group."""

    threshold: float
    """Mean reward of the last group."""
    fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Share of draws."""
    train: bool = True
    """Or sample others instead."""


class CurriculumConfig(Config):
    """Which tasks are drawn when."""

    shuffle: bool = True
    """A new order per epoch."""
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Steps until all tasks are open, the first first."""
    easy: PoolConfig | None = None
    """Tasks of this reward or more."""
    hard: PoolConfig | None = None
    """Tasks of this reward or less."""

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.easy is not None and self.hard is not None and self.hard.threshold >= self.easy.threshold:
            raise ValueError(
                f"hard.threshold ({self.hard.threshold}) must be below easy.threshold ({self.easy.threshold}); lower it"
            )
        return self


class EnvironmentConfig(Config):
    """One environment that makes tasks, runs episodes and scores them."""

    id: Annotated[str, Field(min_length=1, max_length=253)]
    """A shipped environment (`reverse-text`, `gsm8k`, ...), `verifiers:<name>`, or `package.module:function`."""
    name: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """How metrics and traces call it; default: its id. Two environments with the same id need different names."""
    args: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the environment; each names its own in its documentation."""
    ratio: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Share of groups relative to the other environments' ratios."""
    curriculum: CurriculumConfig | None = None
    """Which tasks are drawn when."""
    group_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Rollouts per task; their rewards are compared with each other."""
    sampling: SamplingConfig | None = None
    """Replaces `spec.sampling` for this environment."""
    algorithm: EnvironmentAlgorithm = EnvironmentAlgorithm()
    """Parts of the objective of this environment alone, as `spec.algorithm` describes them."""
    timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """Longest time for one episode including its score, in seconds; then the rollout is rejected and counted."""
    reward_timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 60.0
    """Longest time for one score, in seconds."""
    start_timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 300.0
    """Longest time for loading the environment, in seconds."""
    memory_gib: Annotated[float, Field(gt=0, le=65536)] = 8.0
    """Memory of the environment's processes together; above it they are restarted."""
    python: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Interpreter of a virtual environment that holds the environment's packages; default: the orchestrator's, or `python3` of `image`."""
    image: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Image of a container of its own beside the orchestrator, with Python and pydantic in it; on one machine it is left out."""

    @property
    def label(self) -> str:
        """The environment's name in metrics and traces."""
        return self.name or self.id


class EvaluationConfig(Config):
    """Held-out tasks, answered by one policy version between steps."""

    interval: Annotated[int, Field(ge=1)] = 20
    """Evaluate every this many policy versions, and always the first and the last."""
    num_tasks: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    """Tasks from each environment's `eval` split."""
    samples_per_task: Annotated[int, Field(ge=1, le=1024)] = 1
    """Rollouts per task; the mean over them is avg@k."""
    sampling: SamplingConfig | None = None
    """Replaces the environments' sampling during evaluation."""
