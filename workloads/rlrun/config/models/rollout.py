"""Rollout configuration: environments, sampling and evaluation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel

from rlrun.config.base import Config, FreeMapping, Rule, list_cel, quote_cel
from rlrun.config.formats import (
    PRINTABLE,
    EnvironmentId,
    EnvironmentName,
    ImageReference,
    VariableName,
    VolumePath,
)
from rlrun.config.models.environment_algorithm import EnvironmentAlgorithm

SOLVED = 1.0
"""Default reward at which a rollout counts as solved."""
_RECOMPUTED = "it changes the distribution whose log-probs the trainer recomputes; remove it"
_OWN_ARGUMENTS = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
)
"""Argument names that the renderer of the chat template sets itself."""


def unread_argument(arguments: Iterable[str], template: str) -> str | None:
    """Return why a chat template cannot have these arguments (name and fix), or None if it can.

    Jinja would ignore an unknown argument silently.

    A name anywhere in the template counts as read.
    """
    for name in arguments:
        if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", template):
            return (
                f"the model's chat template has no argument {name}; remove it, or use a model whose template reads it"
            )
    return None


class Sampling(Config):
    """Sampling parameters, with vLLM's names and meanings. The defaults leave the distribution unchanged."""

    refused_fields: ClassVar[dict[str, str]] = dict.fromkeys(
        ("logit_bias", "bad_words", "allowed_token_ids"), _RECOMPUTED
    )
    """Engine parameters that are not supported for policies, with the reason."""

    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    """Softmax temperature; 0: always the likeliest token. Default: as in training."""
    max_tokens: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    """Longest reply in one turn, in tokens. Default: as in training."""
    min_tokens: Annotated[int, Field(ge=0, le=1_048_576)] = 0
    """Fewest tokens of a reply."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample only from the likeliest tokens with this total probability."""
    top_k: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Sample only from this many likeliest tokens; 0: all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample only from tokens with at least this share of the likeliest token's probability."""
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Divisor of the logits of tokens that occurred before."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Amount subtracted from the logits of tokens that were sampled before."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Amount subtracted from a token's logit for each time it was sampled."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Seed from which each sample's seed is derived. Default: none in training; as in training in evaluation."""
    stop: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16)] = Field(
        default_factory=list
    )
    """Texts that end a reply. Default in evaluation: as in training."""
    chat_template_arguments: FreeMapping = Field(default_factory=dict)
    """Arguments of the chat template, such as `enable_thinking: false`. Default in evaluation: as in training."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"!self.chatTemplateArguments.exists(k, k in {list_cel(_OWN_ARGUMENTS)})",
            f"chatTemplateArguments has {{self.chatTemplateArguments.filter(k, k in {list_cel(_OWN_ARGUMENTS)})[0]}}, "
            "which the orchestrator sets itself; remove it",
        ),
    )

    @model_validator(mode="after")
    def _arguments_of_the_template(self) -> Self:
        for name in self.chat_template_arguments:
            if name in _OWN_ARGUMENTS:
                raise ValueError(f"chatTemplateArguments has {name}, which the orchestrator sets itself; remove it")
        return self

    def engine_parameters(self, seed: int | None = None) -> dict[str, object]:
        """Return vLLM's sampling parameters other than temperature and length that differ from their defaults.

        Args:
            seed: seed of this request.
        """
        others = {"temperature", "max_tokens", "seed", "chat_template_arguments"}
        own = self.model_dump(exclude_defaults=True, exclude=others)
        return own if seed is None else own | {"seed": seed}


_RESHAPING = {
    to_camel(name): info.default
    for name, info in Sampling.model_fields.items()
    if isinstance(info.default, int | float)
}
"""Parameters that change the distribution, each with the value at which it has no effect."""
_RESHAPED = f"[{', '.join(f'[dyn({quote_cel(n)}), dyn(self.{n}), dyn({v})]' for n, v in _RESHAPING.items())}].filter(p, p[1] != p[2])"


class SamplingConfig(Sampling):
    """Sampling of tokens in training. Only the temperature may change the distribution, because its log-probs are trained."""

    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Softmax temperature. The trainer applies the same temperature."""
    max_tokens: Annotated[int, Field(ge=1, le=1_048_576)] = 256
    """Longest reply of the model in one turn, in tokens."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"{_RESHAPED}.size() == 0",
            f"{{{_RESHAPED}[0][0]}} ({{{_RESHAPED}[0][1]}}) is not supported in training: "
            f"{_RECOMPUTED} or set it in evaluation.sampling",
        ),
    )

    @model_validator(mode="after")
    def _whole_distribution(self) -> Self:
        values = self.model_dump(by_alias=True)
        for name, neutral in _RESHAPING.items():
            if values[name] != neutral:
                raise ValueError(
                    f"{name} ({values[name]}) is not supported in training: {_RECOMPUTED} or set it in evaluation.sampling"
                )
        return self


class EvaluationSamplingConfig(Sampling):
    """Sampling of tokens in evaluation. Omitted values are as in training."""

    def check(self, training: SamplingConfig, *, seq_len: int) -> None:
        """Refuse values that do not fit the sampling of one environment.

        Raises:
            ValueError: The message has field, value and fix.
        """
        longest = training.max_tokens if self.max_tokens is None else self.max_tokens
        if longest >= seq_len:
            raise ValueError(
                f"maxTokens ({longest}) must be less than seqLen ({seq_len}), which also includes the prompt; "
                "lower maxTokens or raise seqLen"
            )
        if self.min_tokens > longest:
            raise ValueError(
                f"minTokens ({self.min_tokens}) must be at most maxTokens ({longest}); lower it or raise maxTokens"
            )

    def merged_over(self, training: SamplingConfig) -> CompleteSampling:
        """Return the complete sampling of one environment.

        Args:
            training: the environment's sampling, which provides omitted values.
        """
        own = self.model_dump(exclude_defaults=True)
        return CompleteSampling(**training.model_dump() | own)


class CompleteSampling(Sampling):
    """Complete evaluation sampling of one environment."""

    temperature: Annotated[float, Field(ge=0, le=10)]
    max_tokens: Annotated[int, Field(ge=1, le=1_048_576)]

    def seed_of(self, sample: int) -> int | None:
        """Return the seed of a task's sample, by the sample's number from 0. Each sample has its own seed."""
        return None if self.seed is None else (self.seed + sample) % 2**31

    def identity(self) -> dict[str, object]:
        """Return all values that answers depend on, as JSON. Defaults are omitted, so that a new field does not invalidate old answers."""
        return self.model_dump(mode="json", exclude_defaults=True)


class PoolConfig(Config):
    """Tasks that are easy or hard for the policy, by the mean reward of their last group."""

    threshold: float
    """Mean reward of the last group."""
    fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Share of draws from these tasks."""
    train: bool = True
    """Train on groups of these tasks. Off: sample other groups instead."""


class CurriculumConfig(Config):
    """Choice of tasks over the run."""

    shuffle: bool = True
    """Shuffle the tasks in each epoch."""
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Steps until all tasks are available; tasks become available in order."""
    easy: PoolConfig | None = None
    """Tasks with this mean reward or more."""
    hard: PoolConfig | None = None
    """Tasks with this mean reward or less."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.easy) || !has(self.hard) || self.hard.threshold < self.easy.threshold",
            "hard.threshold ({self.hard.threshold}) must be below easy.threshold ({self.easy.threshold}); lower it",
        ),
    )

    @model_validator(mode="after")
    def _check_thresholds(self) -> Self:
        if self.easy is not None and self.hard is not None and self.hard.threshold >= self.easy.threshold:
            raise ValueError(
                f"hard.threshold ({self.hard.threshold}) must be below easy.threshold ({self.easy.threshold}); lower it"
            )
        return self


class EnvironmentConfig(Config):
    """One environment: it creates tasks, runs episodes and scores them."""

    id: EnvironmentId
    """A built-in environment (`reverse-text`, `gsm8k`, ...), `verifiers:<name>`, or `package.module:function`."""
    name: EnvironmentName | None = None
    """Name in metrics and traces; unique in the run. Default: the id."""
    args: FreeMapping = Field(default_factory=dict)
    """Arguments of the environment; see the environment's documentation."""
    ratio: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Share of groups relative to the other environments' ratios."""
    curriculum: CurriculumConfig | None = None
    """Choice of tasks over the run."""
    group_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Rollouts per task. Their rewards are compared with each other."""
    solved_reward: Annotated[float, Field(ge=-1e9, le=1e9)] = SOLVED
    """Reward at or above which a rollout counts as solved."""
    sampling: SamplingConfig | None = None
    """Replaces `spec.sampling` for this environment."""
    algorithm: EnvironmentAlgorithm = EnvironmentAlgorithm()
    """Parts of the objective for this environment only, with the fields of `spec.algorithm`."""
    timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """Longest time for one episode including its score, in seconds. A slower rollout is rejected and counted."""
    reward_timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 60.0
    """Longest time for one score, in seconds."""
    start_timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 300.0
    """Longest time for loading the environment, in seconds."""
    memory_gib: Annotated[float, Field(gt=0, le=65536)] = 8.0
    """Memory limit of one worker's processes, in GiB. A worker above it is restarted."""
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """Processes that run episodes in parallel."""
    python: Annotated[str, Field(min_length=1, max_length=1024), PRINTABLE] | None = None
    """Python interpreter with the environment's packages. Default: the orchestrator's, or `python3` of `image`."""
    variables: Annotated[list[VariableName], Field(max_length=64)] = Field(default_factory=list)
    """Additional environment variables that are passed on from the orchestrator; `AWS_*` matches a prefix."""
    image: ImageReference | None = None
    """Image of the environment's own container in the orchestrator's pod, with Python and pydantic. Ignored on one machine."""
    isolation: Literal["Container", "Process"] | None = None
    """Where the environment runs in a cluster, without `image`. `Container` (default): a container of the orchestrator's pod without
    secrets, shared by the run's environments. `Process`: the orchestrator's container."""
    volume_paths: Annotated[list[VolumePath], Field(max_length=16)] = Field(default_factory=list)
    """Folders and files of the run's volume that the container of `image` may read, as paths below its mount. Default: no access."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.volumePaths) || self.volumePaths.size() == 0 || has(self.image)",
            "volumePaths applies only to the container of image; set image or remove volumePaths",
            ".volumePaths",
        ),
        Rule(
            "!has(self.isolation) || self.isolation == 'Container' || !has(self.image)",
            "isolation ({self.isolation}) applies only to environments without image; remove isolation or image",
            ".isolation",
        ),
    )

    @model_validator(mode="after")
    def _container_matches_image(self) -> Self:
        if self.volume_paths and self.image is None:
            raise ValueError("volumePaths applies only to the container of image; set image or remove volumePaths")
        if self.isolation == "Process" and self.image is not None:
            raise ValueError(
                "isolation (Process) applies only to environments without image; remove isolation or image"
            )
        return self

    @property
    def shares_container(self) -> bool:
        """Whether a cluster runs the environment in the shared container for environments without an image."""
        return self.image is None and self.isolation != "Process"

    @property
    def label(self) -> str:
        """Name of the environment in metrics and traces."""
        return self.name or self.id


def solved_rewards(environments: Iterable[EnvironmentConfig]) -> dict[str, float]:
    """Return the reward at which a rollout counts as solved, by the environment's label."""
    return {environment.label: environment.solved_reward for environment in environments}


class EvaluationConfig(Config):
    """Evaluation of held-out tasks between steps, each by one policy version."""

    interval: Annotated[int, Field(ge=1)] = 20
    """Policy versions between evaluations. The first and the last version are always evaluated."""
    num_tasks: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    """Tasks from each environment's `eval` split."""
    samples_per_task: Annotated[int, Field(ge=1, le=1024)] = 1
    """Rollouts per task. Their mean is avg@k."""
    timeout_seconds: Annotated[float, Field(gt=0, le=604_800)] = 1800.0
    """Longest time that an evaluation delays newer weights, in seconds. Tasks that are unfinished then are not counted. The wait for
    training rollouts to finish is not included."""
    sampling: EvaluationSamplingConfig | None = None
    """Sampling in evaluation, for values that differ from training."""

    def sampling_over(self, training: SamplingConfig) -> CompleteSampling:
        """Return the sampling of evaluation in an environment; `training` is the environment's own sampling."""
        return (self.sampling or EvaluationSamplingConfig()).merged_over(training)
