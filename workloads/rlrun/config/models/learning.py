"""Learning of the policy: objective, staleness bounds, optimizer and learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlrun.config.algorithm.names import (
    ADVANTAGE_ENTRIES,
    DEFAULT_PRESET,
    LOSS_ENTRIES,
    NARROW_BAND,
    PRESETS,
    Need,
    Options,
    algorithm_inputs,
    complete_correction,
    complete_options,
    correction_problem,
    default_aggregation,
    default_proximal,
    find_entry,
    find_preset,
    is_import_path,
    narrow_bands,
    proximal_problem,
)
from rlrun.config.base import Config, Rule, list_cel
from rlrun.config.models.language_models import CriticConfig, ReferenceConfig

_IMPORT_PATH = r"^[A-Za-z_]\\w*([.][A-Za-z_]\\w*)*:[A-Za-z_]\\w*$"


def _known_name_rule(kind: str, names: Iterable[str]) -> Rule:
    """Build the admission rule of a block whose `name` is one of `names` or an import path."""
    known = sorted(names)
    return Rule(
        f"self.name in {list_cel(known)} || self.name.matches('{_IMPORT_PATH}')",
        f"unknown {kind} '{{self.name}}'; known: {', '.join(known)}, or an import path package.module:function",
        ".name",
    )


class _Objective(Config):
    name: Annotated[str, Field(min_length=1, max_length=253)]
    """A built-in name, or an import path `package.module:function` in the image."""
    options: dict[str, bool | int | float | str | None] = Field(default_factory=dict)
    """Options, with the names of the reference page (`delta`, `eps_high`, ...)."""


class LossConfig(_Objective):
    """The policy loss per token."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (_known_name_rule("loss", LOSS_ENTRIES),)

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        complete_options("loss", self.name, self.options)
        return self


class AdvantageConfig(_Objective):
    """Computation of advantages from the rewards of a group."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (_known_name_rule("advantage", ADVANTAGE_ENTRIES),)

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        complete_options("advantage", self.name, self.options)
        return self


class FilterConfig(Config):
    """Samples to exclude from training, and a penalty for long answers. Metrics still report the environment's rewards."""

    zero_variance: bool = False
    """Drop groups whose rewards are all equal and sample others (dynamic sampling)."""
    overlong_penalty: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Largest penalty on the reward over the last `overlongBuffer` of `maxTokens` (DAPO's soft penalty); 0: off."""
    overlong_buffer: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of `maxTokens` over which the penalty increases."""
    overlong_mask: bool = False
    """Exclude rollouts that were truncated."""
    repetition_mask: bool = False
    """Exclude rollouts with repetition: `repetitionWindow` consecutive tokens, each with a probability above 0.99."""
    repetition_window: Annotated[int, Field(ge=2, le=1_048_576)] = 512
    """Window of `repetitionMask` and of the metric `batch/repetition`, in tokens."""
    gibberish_mask: bool = False
    """Exclude rollouts with a token of id above 100000 that was sampled below e^-2 of uniform probability."""


class RegularizerConfig(Config):
    """Terms that are added to the loss of each token."""

    entropy: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Coefficient of the entropy bonus."""
    kl: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Coefficient of the KL divergence to the reference model; needs `reference`."""
    kl_kind: Literal["k1", "k2", "k3", "k1+", "k3+", "k3_unbiased"] = "k3"
    """Estimator, with d = t - ref: k2 is d²/2, k3 is e^-d - 1 + d; +: gradient of k2; unbiased: times ρ. k1 has no gradient."""
    kl_reward: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Coefficient of the KL divergence in the reward of each token; needs `reference`."""
    kl_reward_kind: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of that divergence, under the policy at the start of the step."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.klKind != 'k1' || self.kl == 0.0",
            "klKind (k1) has an expected gradient of 0 in the loss; set klKind to k2, or set klReward to {self.kl} and remove kl",
            ".klKind",
        ),
    )

    @model_validator(mode="after")
    def _has_gradient(self) -> Self:
        if self.kl > 0 and self.kl_kind == "k1":
            raise ValueError(
                f"klKind (k1) has an expected gradient of 0 in the loss; set klKind to k2, or set klReward to {self.kl} and remove kl"
            )
        return self


class CorrectionConfig(Config):
    """Correction of the mismatch between trainer and engine, in addition to the loss."""

    action: Literal["clamp", "mask", "none"] = "clamp"
    """clamp: weight by the ratio, clamped to [low, high]. mask: drop tokens outside. none: no correction, even if the preset has one."""
    weight: Literal["none", "token", "sequence", "geometric"] = "none"
    """With action mask, weight of the kept tokens: 1 (none), or a ratio."""
    cap: Annotated[float, Field(gt=0)] | None = None
    """Upper limit of the weight."""
    level: Literal["token", "sequence"] = "token"
    """Compare each token, or each sequence as a unit, with the bounds."""
    measure: Literal["ratio", "k1", "k2", "k3"] = "ratio"
    """Compared quantity: the ratio, or an estimate of the divergence (only with mask)."""
    reduce: Literal["mean", "sum", "max"] = "mean"
    """Reduction over the tokens of a sequence. The mean of ratios is the geometric mean."""
    low: float | None = None
    """Lower bound. Default: 0; for k1, `-high`."""
    high: float = 2.0
    """Upper bound."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.action != 'clamp' || self.measure == 'ratio'",
            "correction: action clamp needs measure ratio, got {self.measure}, which is not a weight; set action to mask",
            ".action",
        ),
    )

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        complete_correction(self.options)
        return self

    @property
    def options(self) -> Options:
        """Options in the form that `rlrun.algorithms` takes."""
        return self.model_dump(exclude_none=True)


Aggregation = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant_length"]
Proximal = Literal["inference", "recompute", "log_linear"]


_GAE = "has(self.advantage) ? self.advantage.name == 'gae' : self.preset in " + list_cel(
    name for name, find_preset in PRESETS.items() if find_preset.advantage == "gae"
)
_NOT_THERE = " model, which this run does not have; set algorithm."


class AlgorithmConfig(Config):
    """The training objective, and how stale its data may be."""

    preset: Annotated[str, Field(min_length=1, max_length=63)] = DEFAULT_PRESET
    """Name of a complete objective; the page of presets lists them. The fields below replace its parts."""
    loss: LossConfig | None = None
    """Replaces the preset's loss."""
    advantage: AdvantageConfig | None = None
    """Replaces the preset's advantage."""
    aggregation: Aggregation | None = None
    """Replaces the preset's aggregation over tokens."""
    aggregation_length: Annotated[int, Field(ge=1)] | None = None
    """Number of tokens that `constant_length` divides by. Default: `seqLen`."""
    proximal: Proximal | None = None
    """Policy that the trust region is measured from: the engine's, or the policy at the start of the step. Default: the loss's."""
    regularizers: RegularizerConfig = RegularizerConfig()
    """Entropy bonus and KL to a reference."""
    reference: ReferenceConfig | None = None
    """Frozen model for `regularizers.kl`, `distill` and other parts that need it."""
    critic: CriticConfig | None = None
    """Value model that is trained with the policy; for advantage `gae`."""
    correction: CorrectionConfig | None = None
    """Truncated importance weights, or rejection. Replaces the preset's correction."""
    filters: FilterConfig | None = None
    """Replaces the preset's filters."""
    max_async_level: Annotated[int, Field(ge=0, le=64)] = 2
    """Pipeline depth: rollouts for step n start once version n-1-maxAsyncLevel is published; 0 is synchronous."""
    max_off_policy_steps: Annotated[int, Field(ge=0, le=1024)] = 8
    """Largest staleness: step n trains on a group only if its rollouts started at version n-1-maxOffPolicySteps or later."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"self.preset in {list_cel(PRESETS)}",
            f"unknown preset '{{self.preset}}'; known: {', '.join(sorted(PRESETS))}",
            ".preset",
        ),
        Rule(
            "self.maxOffPolicySteps >= self.maxAsyncLevel",
            "maxOffPolicySteps ({self.maxOffPolicySteps}) must be at least maxAsyncLevel ({self.maxAsyncLevel}): "
            "otherwise rollouts may become too old to be trained on; raise maxOffPolicySteps or lower maxAsyncLevel",
            ".maxOffPolicySteps",
        ),
        Rule(
            f"!({_GAE}) || has(self.critic)",
            f"advantage gae needs a critic{_NOT_THERE}critic, or choose another preset or part",
            ".critic",
        ),
        Rule(
            f"!has(self.critic) || ({_GAE})",
            "critic is not used by advantage {has(self.advantage) ? self.advantage.name : 'of the preset'}; "
            "set advantage to gae or remove critic",
            ".critic",
        ),
        Rule(
            "self.regularizers.kl == 0.0 || has(self.reference)",
            f"regularizers.kl ({{self.regularizers.kl}}) needs a reference{_NOT_THERE}reference, or choose another preset or part",
            ".reference",
        ),
        Rule(
            "self.regularizers.klReward == 0.0 || has(self.reference)",
            "regularizers.klReward ({self.regularizers.klReward}) needs a reference"
            f"{_NOT_THERE}reference, or choose another preset or part",
            ".reference",
        ),
    )

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        find_preset(self.preset)
        if self.max_off_policy_steps < self.max_async_level:
            raise ValueError(
                f"maxOffPolicySteps ({self.max_off_policy_steps}) must be at least maxAsyncLevel ({self.max_async_level}): "
                "otherwise rollouts may become too old to be trained on; raise maxOffPolicySteps or lower maxAsyncLevel"
            )
        self.check_parts()
        if self.critic is not None and self.effective_advantage.name != "gae":
            raise ValueError(
                f"critic is not used by advantage {self.effective_advantage.name}; set advantage to gae or remove critic"
            )
        return self

    def check_parts(self) -> None:
        """Refuse parts of the objective that contradict each other, or need a model that the run does not have.

        Raises:
            ValueError: The message has field, value and fix.
        """
        loss, proximal, correction = self.effective_loss.name, self.effective_proximal, self.effective_correction
        if problem := proximal_problem(loss, proximal, corrected=correction is not None):
            raise ValueError(problem)
        if self.aggregation_length is not None and self.effective_aggregation != "constant_length":
            raise ValueError(
                f"aggregationLength ({self.aggregation_length}) needs aggregation constant_length; remove it"
            )
        if correction is not None:
            complete = complete_correction(correction.options)
            if problem := correction_problem(complete, loss, has_proximal=proximal != "inference"):
                raise ValueError(problem)
        if self.regularizers.kl_reward > 0 and not is_import_path(loss) and not find_entry("loss", loss).rewarded:
            raise ValueError(
                f"regularizers.klReward ({self.regularizers.kl_reward}) is not used by loss {loss}, which reads no rewards; "
                "set it to 0, or use regularizers.kl"
            )
        for need, what in self.needs.items():
            if need not in self.provided_inputs:
                raise ValueError(
                    f"{what} needs a {need} model, which this run does not have; set algorithm.{need}, "
                    "or choose another preset or part"
                )

    @property
    def needs(self) -> dict[Need, str]:
        """Inputs of the objective other than the policy, each with the part that needs it."""
        found: dict[Need, str] = {}
        if self.regularizers.kl > 0:
            found["reference"] = f"regularizers.kl ({self.regularizers.kl})"
        elif self.regularizers.kl_reward > 0:
            found["reference"] = f"regularizers.klReward ({self.regularizers.kl_reward})"
        found |= algorithm_inputs("loss", self.effective_loss.name, self.effective_loss.options)
        return found | algorithm_inputs("advantage", self.effective_advantage.name, self.effective_advantage.options)

    @property
    def provided_inputs(self) -> frozenset[Need]:
        """Inputs other than the policy that the run has."""
        have: dict[Need, object] = {"reference": self.reference, "critic": self.critic}
        return frozenset(need for need, config in have.items() if config is not None)

    @property
    def effective_loss(self) -> LossConfig:
        """Loss: `loss` if it is set, otherwise the preset's."""
        settings = find_preset(self.preset)
        return self.loss or LossConfig(name=settings.loss, options=dict(settings.loss_options))

    @property
    def effective_advantage(self) -> AdvantageConfig:
        """Advantage: `advantage` if it is set, otherwise the preset's."""
        settings = find_preset(self.preset)
        return self.advantage or AdvantageConfig(name=settings.advantage, options=dict(settings.advantage_options))

    @property
    def batch_advantage(self) -> AdvantageConfig:
        """Advantage that the orchestrator computes. It omits the options that the trainer applies after adding KL to the reward."""
        advantage = self.effective_advantage
        if self.regularizers.kl_reward == 0 or is_import_path(advantage.name) or advantage.name == "gae":
            return advantage
        later = {"adv_mean": "none", "adv_std": "none", "neg_clipped": False}
        return AdvantageConfig(name=advantage.name, options={**advantage.options, **later})

    @property
    def effective_aggregation(self) -> str | None:
        """Aggregation over tokens: `aggregation` if it is set, otherwise the preset's; None: the aggregation of the loss."""
        return self.aggregation or find_preset(self.preset).aggregation

    @property
    def effective_proximal(self) -> str:
        """Proximal policy: `proximal` if it is set, otherwise the default of the loss."""
        return self.proximal or default_proximal(self.effective_loss.name)

    @property
    def effective_correction(self) -> CorrectionConfig | None:
        """Correction: `correction` if it is set, otherwise the preset's if the preset's loss is used with a proximal policy."""
        if self.correction is not None:
            return None if self.correction.action == "none" else self.correction
        settings = find_preset(self.preset)
        if (
            settings.correction is None
            or self.effective_loss.name != settings.loss
            or self.effective_proximal == "inference"
        ):
            return None
        return CorrectionConfig.model_validate(dict(settings.correction))

    @property
    def band_warning(self) -> str | None:
        """Warning if a band of the loss is so narrow that rounding differences between engine and trainer leave it, or None."""
        loss, proximal = self.effective_loss, self.effective_proximal
        narrow = narrow_bands(loss.name, loss.options)
        if not narrow or proximal == "recompute":
            return None
        bands = ", ".join(f"{name} ({value:g})" for name, value in narrow.items())
        readers = is_import_path(loss.name) or "proximal_logprobs" in find_entry("loss", loss.name).reads
        fix = (
            f"set proximal to recompute, or {next(iter(narrow))} to {NARROW_BAND} or more"
            if readers
            else (f"set {next(iter(narrow))} to {NARROW_BAND} or more")
        )
        return (
            f"loss {loss.name} measures {bands} from the engine's log-probs (proximal: {proximal}), whose rounding alone moves tokens "
            f"outside the band and removes their gradient; {fix}"
        )

    @property
    def effective_filters(self) -> FilterConfig:
        """Filters: `filters` if they are set, otherwise the preset's."""
        return self.filters or FilterConfig.model_validate(dict(find_preset(self.preset).filters))

    def with_preset_applied(self) -> Self:
        """Return the same objective with each part that comes from the preset, or from the loss, in its own field."""
        loss = self.effective_loss
        return self.model_copy(
            update={
                "loss": loss,
                "advantage": self.effective_advantage,
                "aggregation": self.effective_aggregation or default_aggregation(loss.name, loss.options),
                "proximal": self.effective_proximal,
                # Without action `none`, the preset's correction would apply to an environment with another loss.
                "correction": self.effective_correction or CorrectionConfig(action="none"),
                "filters": self.effective_filters,
            }
        )


class OptimizerConfig(Config):
    """Optimizer that applies gradients to the float32 master weights."""

    name: Literal["adamw", "muon", "sgd"] = "adamw"
    """`muon`: orthogonalized momentum for the matrices of the layers, AdamW for all other weights."""
    lr: Annotated[float, Field(gt=0, le=10)] = 1e-6
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Decoupled weight decay. `sgd` adds it to the gradient."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of AdamW's second moment."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the root of AdamW's second moment."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Momentum of `muon` (default 0.95) and `sgd` (default 0.9)."""
    moments: Literal["float32", "int8"] = "float32"
    """Number format of `adamw`'s moments. `int8`: blocks of 8-bit codes; a quarter of the memory, but slower."""
    offload: bool = False
    """Keep the moments in host memory; the GPU holds two buckets of them during an update. Needs GPUs."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Global L2 norm that gradients are scaled down to; null: no clipping."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.name != 'adamw' || !has(self.momentum)",
            "momentum ({self.momentum}) has no meaning for optimizer adamw; remove it",
            ".momentum",
        ),
        Rule(
            "self.name == 'adamw' || self.moments == 'float32'",
            "moments ({self.moments}) has no meaning for optimizer {self.name}; remove it",
            ".moments",
        ),
        Rule(
            "self.name != 'sgd' || (self.beta1 == 0.9 && self.beta2 == 0.999 && self.eps == 1e-8)",
            "beta1, beta2 and eps have no meaning for optimizer sgd; remove them",
            ".name",
        ),
    )

    @model_validator(mode="after")
    def _only_its_own(self) -> Self:
        """Refuse options without effect. `run.json` contains all defaults, so a default value is always accepted."""
        if self.name == "adamw" and self.momentum is not None:
            raise ValueError(f"momentum ({self.momentum}) has no meaning for optimizer adamw; remove it")
        if self.name != "adamw" and self.moments != "float32":
            raise ValueError(f"moments ({self.moments}) has no meaning for optimizer {self.name}; remove it")
        if self.name == "sgd" and (self.beta1, self.beta2, self.eps) != (0.9, 0.999, 1e-8):
            raise ValueError("beta1, beta2 and eps have no meaning for optimizer sgd; remove them")
        return self

    @property
    def effective_momentum(self) -> float:
        """Momentum after its default is applied."""
        if self.momentum is not None:
            return self.momentum
        return 0.95 if self.name == "muon" else 0.9


class SchedulerConfig(Config):
    """Learning rate over the steps of the run."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up: constant, or decay to `minLrRatio` of the peak at `maxSteps`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the rate increases linearly from 0 to the peak."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final rate as a share of the peak; for linear and cosine."""
