"""Rollout configuration: environments, sampling and evaluation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel

from rlrun.config.base import Config
from rlrun.config.formats import (
    PRINTABLE,
    EnvironmentId,
    EnvironmentName,
    ImageReference,
    VariableName,
    VolumePath,
)
from rlrun.config.free import FreeMapping
from rlrun.config.models.environment_algorithm import EnvironmentAlgorithm
from rlrun.config.rule import Rule, list_cel, quote_cel

SOLVED = 1.0
"""Reward from which a rollout counts as solved, unless its environment has a threshold of its own."""
_RECOMPUTED = "the trainer recomputes log-probs of the whole distribution, which this changes; remove it"
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
"""Names that rendering a chat template takes for itself."""


def unread_argument(arguments: Iterable[str], template: str) -> str | None:
    """Reason why a chat template cannot have these arguments, the field's value and the fix: Jinja would drop one in silence; None: it can.

    A name anywhere in the template counts as read.
    """
    for name in arguments:
        if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", template):
            return (
                f"the model's chat template has no argument {name}; remove it, or take a model whose template reads it"
            )
    return None


class Sampling(Config):
    """The one table of sampling parameters; names and meanings are vLLM's, and the defaults change nothing."""

    refused_fields: ClassVar[dict[str, str]] = dict.fromkeys(
        ("logit_bias", "bad_words", "allowed_token_ids"), _RECOMPUTED
    )
    """Parameters of engines that are not for policies, with the reason."""

    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    """0: the likeliest token. Default: as in training."""
    max_tokens: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    """Longest reply in one turn. Default: as in training."""
    min_tokens: Annotated[int, Field(ge=0, le=1_048_576)] = 0
    """Tokens before a reply may end."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Only the likeliest tokens of this total probability."""
    top_k: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Only this many of the likeliest tokens; 0: all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Only tokens of this share of the likeliest one's probability."""
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Divides the logits of tokens seen before."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtracted from the logits of tokens sampled before."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """The same, for each time."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Seed that all samples' seeds are made of. Default: none; in evaluation as in training."""
    stop: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16)] = Field(
        default_factory=list
    )
    """Texts that end a reply; in evaluation none: as in training."""
    chat_template_arguments: FreeMapping = Field(default_factory=dict)
    """Arguments of the chat template, such as `enable_thinking: false`; in evaluation none: as in training."""

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
        """Sampling parameters of the engine beyond temperature and length, by vLLM's names: those that differ from its defaults.

        Args:
            seed: of this request.
        """
        others = {"temperature", "max_tokens", "seed", "chat_template_arguments"}
        own = self.model_dump(exclude_defaults=True, exclude=others)
        return own if seed is None else own | {"seed": seed}


_RESHAPING = {
    to_camel(name): info.default
    for name, info in Sampling.model_fields.items()
    if isinstance(info.default, int | float)
}
"""Parameters that change the distribution, each with the value that leaves it whole."""
_RESHAPED = f"[{', '.join(f'[dyn({quote_cel(n)}), dyn(self.{n}), dyn({v})]' for n, v in _RESHAPING.items())}].filter(p, p[1] != p[2])"


class SamplingConfig(Sampling):
    """Sampling of tokens in training. But for the temperature, nothing may change the distribution whose log-probs are trained."""

    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Softmax temperature. The trainer applies the same."""
    max_tokens: Annotated[int, Field(ge=1, le=1_048_576)] = 256
    """Longest reply of the model in one turn, in tokens."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"{_RESHAPED}.size() == 0",
            f"{{{_RESHAPED}[0][0]}} ({{{_RESHAPED}[0][1]}}) is not for training: "
            f"{_RECOMPUTED} (evaluation.sampling takes it)",
        ),
    )

    @model_validator(mode="after")
    def _whole_distribution(self) -> Self:
        values = self.model_dump(by_alias=True)
        for name, whole in _RESHAPING.items():
            if values[name] != whole:
                raise ValueError(
                    f"{name} ({values[name]}) is not for training: {_RECOMPUTED} (evaluation.sampling takes it)"
                )
        return self


class EvaluationSamplingConfig(Sampling):
    """Sampling of tokens in evaluation; what is left out is as in training."""

    def check(self, training: SamplingConfig, *, seq_len: int) -> None:
        """Refuse what does not fit the sampling of one environment.

        Raises:
            ValueError: names the field, its value and the fix.
        """
        longest = training.max_tokens if self.max_tokens is None else self.max_tokens
        if longest >= seq_len:
            raise ValueError(
                f"maxTokens ({longest}) must be less than seqLen ({seq_len}), which holds the prompt too; "
                "lower maxTokens or raise seqLen"
            )
        if self.min_tokens > longest:
            raise ValueError(
                f"minTokens ({self.min_tokens}) must be at most maxTokens ({longest}); lower it or raise maxTokens"
            )

    def over(self, training: SamplingConfig) -> CompleteSampling:
        """Complete sampling for one environment.

        Args:
            training: the environment's sampling, for what is left out here.
        """
        own = self.model_dump(exclude_defaults=True)
        return CompleteSampling(**training.model_dump() | own)


class CompleteSampling(Sampling):
    """Evaluation's sampling in one environment, with nothing left out."""

    temperature: Annotated[float, Field(ge=0, le=10)]
    max_tokens: Annotated[int, Field(ge=1, le=1_048_576)]

    def seed_of(self, sample: int) -> int | None:
        """Seed of a task's sample, by its number from 0; each has its own."""
        return None if self.seed is None else (self.seed + sample) % 2**31

    def identity(self) -> dict[str, object]:
        """All that answers depend on, as JSON; fields at their defaults are left out, so that a new field leaves old answers valid."""
        return self.model_dump(mode="json", exclude_defaults=True)


class PoolConfig(Config):
    """Tasks that the policy finds easy or hard, by the mean reward of their last group."""

    threshold: float
    """Mean reward of the last group."""
    fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Share of draws."""
    train: bool = True
    """Off: sample others instead."""


class CurriculumConfig(Config):
    """Choice of tasks over the run."""

    shuffle: bool = True
    """A new order per epoch."""
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Steps until all tasks are open, the first first."""
    easy: PoolConfig | None = None
    """Tasks of this reward or more."""
    hard: PoolConfig | None = None
    """Tasks of this reward or less."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.easy) || !has(self.hard) || self.hard.threshold < self.easy.threshold",
            "hard.threshold ({self.hard.threshold}) must be below easy.threshold ({self.easy.threshold}); lower it",
        ),
    )

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.easy is not None and self.hard is not None and self.hard.threshold >= self.easy.threshold:
            raise ValueError(
                f"hard.threshold ({self.hard.threshold}) must be below easy.threshold ({self.easy.threshold}); lower it"
            )
        return self


class EnvironmentConfig(Config):
    """One environment that makes tasks, runs episodes and scores them."""

    id: EnvironmentId
    """A shipped environment (`reverse-text`, `gsm8k`, ...), `verifiers:<name>`, or `package.module:function`."""
    name: EnvironmentName | None = None
    """Name in metrics and traces; default: its id. Must be unique in the run."""
    args: FreeMapping = Field(default_factory=dict)
    """Arguments of the environment; each names its own in its documentation."""
    ratio: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Share of groups relative to the other environments' ratios."""
    curriculum: CurriculumConfig | None = None
    """Choice of tasks over the run."""
    group_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Rollouts per task; their rewards are compared with each other."""
    solved_reward: Annotated[float, Field(ge=-1e9, le=1e9)] = SOLVED
    """A rollout of this reward or more counts as solved."""
    sampling: SamplingConfig | None = None
    """Replaces `spec.sampling` for this environment."""
    algorithm: EnvironmentAlgorithm = EnvironmentAlgorithm()
    """Parts of the objective of this environment alone, as `spec.algorithm` describes them."""
    timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """Longest time for one episode with its score, in seconds; then the rollout is rejected and counted."""
    reward_timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 60.0
    """Longest time for one score, in seconds."""
    start_timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 300.0
    """Longest time for loading the environment, in seconds."""
    memory_gib: Annotated[float, Field(gt=0, le=65536)] = 8.0
    """Memory of one worker's processes, above which they are restarted."""
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """Processes that play side by side."""
    python: Annotated[str, Field(min_length=1, max_length=1024), PRINTABLE] | None = None
    """Interpreter that has the environment's packages; default: the orchestrator's, or `python3` of `image`."""
    variables: Annotated[list[VariableName], Field(max_length=64)] = Field(default_factory=list)
    """Environment variables of the orchestrator that its code gets besides the usual ones; `AWS_*`: all that begin so."""
    image: ImageReference | None = None
    """Image of the environment's own container beside the orchestrator, with Python and pydantic; left out on one machine."""
    isolation: Literal["Container", "Process"] | None = None
    """Place of its code in a cluster, without `image`. `Container` (default): a container of the orchestrator's pod that holds no secret,
    shared by the run's environments. `Process`: the orchestrator's container."""
    volume_paths: Annotated[list[VolumePath], Field(max_length=16)] = Field(default_factory=list)
    """Folders and files of the run's volume that the container of `image` may read, as paths below its mount; default: none."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.volumePaths) || self.volumePaths.size() == 0 || has(self.image)",
            "volumePaths is for the container of image; set image or remove volumePaths",
            ".volumePaths",
        ),
        Rule(
            "!has(self.isolation) || self.isolation == 'Container' || !has(self.image)",
            "isolation ({self.isolation}) is for an environment without image; remove isolation or image",
            ".isolation",
        ),
    )

    @model_validator(mode="after")
    def _container_matches_image(self) -> Self:
        if self.volume_paths and self.image is None:
            raise ValueError("volumePaths is for the container of image; set image or remove volumePaths")
        if self.isolation == "Process" and self.image is not None:
            raise ValueError("isolation (Process) is for an environment without image; remove isolation or image")
        return self

    @property
    def shares_container(self) -> bool:
        """True if a cluster runs it in the container that environments without an image share."""
        return self.image is None and self.isolation != "Process"

    @property
    def label(self) -> str:
        """The environment's name in metrics and traces."""
        return self.name or self.id


def solved_rewards(environments: Iterable[EnvironmentConfig]) -> dict[str, float]:
    """Reward from which a rollout counts as solved, by the environment's label."""
    return {environment.label: environment.solved_reward for environment in environments}


class EvaluationConfig(Config):
    """Held-out tasks, answered by one policy version between steps."""

    interval: Annotated[int, Field(ge=1)] = 20
    """Evaluate every this many policy versions, and always the first and the last."""
    num_tasks: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    """Tasks from each environment's `eval` split."""
    samples_per_task: Annotated[int, Field(ge=1, le=1024)] = 1
    """Rollouts per task; the mean over them is avg@k."""
    timeout_seconds: Annotated[float, Field(gt=0, le=604_800)] = 1800.0
    """Longest time that an evaluation holds back newer weights, in seconds; what is answered by then counts. The time in which its
    questions wait for rollouts of the training to end does not count."""
    sampling: EvaluationSamplingConfig | None = None
    """Sampling in evaluation, where it is not as in training."""

    def sampling_over(self, training: SamplingConfig) -> CompleteSampling:
        """Sampling of evaluation in an environment; `training` is the environment's own sampling."""
        return (self.sampling or EvaluationSamplingConfig()).over(training)
