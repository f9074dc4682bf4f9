"""Learning of the policy: objective, staleness bounds, optimizer and schedule."""

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
    default_proximal,
    find_entry,
    find_preset,
    is_import_path,
    narrow_bands,
    proximal_problem,
)
from rlrun.config.base import Config
from rlrun.config.models.companions import CriticConfig, ReferenceConfig
from rlrun.config.rule import Rule, list_cel

_IMPORT_PATH = r"^[A-Za-z_]\\w*([.][A-Za-z_]\\w*)*:[A-Za-z_]\\w*$"


def _known_name_rule(kind: str, names: Iterable[str]) -> Rule:
    """Rule of a block whose `name` is one of `names` or an import path."""
    known = sorted(names)
    return Rule(
        f"self.name in {list_cel(known)} || self.name.matches('{_IMPORT_PATH}')",
        f"unknown {kind} '{{self.name}}'; known: {', '.join(known)}, or an import path package.module:function",
        ".name",
    )


class _Objective(Config):
    name: Annotated[str, Field(min_length=1, max_length=253)]
    """A known name, or `package.module:function` of the image."""
    options: dict[str, bool | int | float | str | None] = Field(default_factory=dict)
    """Its options, spelled as in the reference (`delta`, `eps_high`, ...)."""


class LossConfig(_Objective):
    """The policy loss per token."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (_known_name_rule("loss", LOSS_ENTRIES),)

    @model_validator(mode="after")
    def _known(self) -> Self:
        complete_options("loss", self.name, self.options)
        return self


class AdvantageConfig(_Objective):
    """Computation of advantages from a group's rewards."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (_known_name_rule("advantage", ADVANTAGE_ENTRIES),)

    @model_validator(mode="after")
    def _known(self) -> Self:
        complete_options("advantage", self.name, self.options)
        return self


class FilterConfig(Config):
    """Samples that are not trained on, and the penalty of long answers. Rewards in metrics stay as the environment gave them."""

    zero_variance: bool = False
    """Drop groups of equal rewards and sample others (dynamic sampling)."""
    overlong_penalty: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Most taken off the reward over the last `overlongBuffer` of `maxTokens` (DAPO's soft penalty); 0: off."""
    overlong_buffer: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of `maxTokens` over which the penalty rises."""
    overlong_mask: bool = False
    """Do not train on rollouts that were cut off."""
    repetition_mask: bool = False
    """Mask repetition: `repetitionWindow` tokens in a row, each above probability 0.99."""
    repetition_window: Annotated[int, Field(ge=2, le=1_048_576)] = 512
    """Also for the metric `batch/repetition`."""
    gibberish_mask: bool = False
    """Mask rollouts with a token of id above 100000 sampled below e^-2 of uniform probability."""


class RegularizerConfig(Config):
    """Terms added to the loss of each token."""

    entropy: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Weight of the entropy bonus."""
    kl: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Weight of the KL divergence to the reference; needs a reference."""
    kl_kind: Literal["k1", "k2", "k3", "k1+", "k3+", "k3_unbiased"] = "k3"
    """Its estimate, with d = t - ref: k2 is d²/2, k3 e^-d - 1 + d; a +: with the gradient of k2; unbiased: times ρ. k1 has no gradient."""
    kl_reward: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Weight of the KL divergence in the reward of each token; needs a reference."""
    kl_reward_kind: Literal["k1", "k2", "k3"] = "k1"
    """Its estimate, under the policy at the start of the step."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.klKind != 'k1' || self.kl == 0.0",
            "klKind (k1) has an expected gradient of 0 in the loss; set klKind to k2, or klReward to {self.kl} and remove kl",
            ".klKind",
        ),
    )

    @model_validator(mode="after")
    def _has_gradient(self) -> Self:
        if self.kl > 0 and self.kl_kind == "k1":
            raise ValueError(
                f"klKind (k1) has an expected gradient of 0 in the loss; set klKind to k2, or klReward to {self.kl} and remove kl"
            )
        return self


class CorrectionConfig(Config):
    """Correction of the mismatch between trainer and engine, on top of the loss."""

    action: Literal["clamp", "mask", "none"] = "clamp"
    """Clamp: weigh by the ratio, clamped to [low, high]; mask: drop what is outside; none: no correction, also where the preset has one."""
    weight: Literal["none", "token", "sequence", "geometric"] = "none"
    """With mask, weight of what is kept: 1, or a ratio."""
    cap: Annotated[float, Field(gt=0)] | None = None
    """Cap of the weight."""
    level: Literal["token", "sequence"] = "token"
    """Judge each token, or each sequence as a whole."""
    measure: Literal["ratio", "k1", "k2", "k3"] = "ratio"
    """The ratio, or an estimate of the divergence (mask only)."""
    reduce: Literal["mean", "sum", "max"] = "mean"
    """Reduction over a sequence's tokens; the mean of ratios is the geometric one."""
    low: float | None = None
    """Lower bound; default: 0, for k1 `-high`."""
    high: float = 2.0
    """Upper bound."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.action != 'clamp' || self.measure == 'ratio'",
            "correction: action clamp needs measure ratio, got {self.measure}: a divergence is no weight; use action mask",
            ".action",
        ),
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        complete_correction(self.options)
        return self

    @property
    def options(self) -> Options:
        """The options as `rlrun.algorithms` takes them."""
        return self.model_dump(exclude_none=True)


Aggregation = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant_length"]
Proximal = Literal["inference", "recompute", "log_linear"]


_GAE = "has(self.advantage) ? self.advantage.name == 'gae' : self.preset in " + list_cel(
    name for name, find_preset in PRESETS.items() if find_preset.advantage == "gae"
)
_NOT_THERE = " model, which this run does not have; set algorithm."


class AlgorithmConfig(Config):
    """The objective and how far behind the policy its data may be."""

    preset: Annotated[str, Field(min_length=1, max_length=63)] = DEFAULT_PRESET
    """A named objective; the page of presets lists them. The fields that follow replace its parts."""
    loss: LossConfig | None = None
    """Replaces the preset's loss."""
    advantage: AdvantageConfig | None = None
    """Replaces the preset's advantage."""
    aggregation: Aggregation | None = None
    """Replaces the preset's aggregation of all tokens."""
    aggregation_length: Annotated[int, Field(ge=1)] | None = None
    """Tokens that `constant_length` divides by; default: `seqLen`."""
    proximal: Proximal | None = None
    """Policy that the trust region is measured from: the engine's, or that at the start of the step; default: the loss's."""
    regularizers: RegularizerConfig = RegularizerConfig()
    """Entropy bonus and KL to a reference."""
    reference: ReferenceConfig | None = None
    """Frozen model for `regularizers.kl`, `distill` and other parts that need one."""
    critic: CriticConfig | None = None
    """A value model that the trainer trains as well: for advantage `gae`."""
    correction: CorrectionConfig | None = None
    """Truncated importance weights or rejection; replaces the preset's."""
    filters: FilterConfig | None = None
    """Replaces the preset's filters."""
    max_async_level: Annotated[int, Field(ge=0, le=64)] = 2
    """Pipeline depth: rollouts for step n start once version n-1-maxAsyncLevel is published; 0 is synchronous."""
    max_off_policy_steps: Annotated[int, Field(ge=0, le=1024)] = 8
    """A group is trained in step n only if it was dispatched at version n-1-maxOffPolicySteps or later."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"self.preset in {list_cel(PRESETS)}",
            f"unknown preset '{{self.preset}}'; known: {', '.join(sorted(PRESETS))}",
            ".preset",
        ),
        Rule(
            "self.maxOffPolicySteps >= self.maxAsyncLevel",
            "maxOffPolicySteps ({self.maxOffPolicySteps}) must be at least maxAsyncLevel ({self.maxAsyncLevel}): "
            "otherwise the pipeline makes groups that may never be trained; raise maxOffPolicySteps or lower maxAsyncLevel",
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
    def _consistent(self) -> Self:
        find_preset(self.preset)
        if self.max_off_policy_steps < self.max_async_level:
            raise ValueError(
                f"maxOffPolicySteps ({self.max_off_policy_steps}) must be at least maxAsyncLevel ({self.max_async_level}): "
                "otherwise the pipeline makes groups that may never be trained; raise maxOffPolicySteps or lower maxAsyncLevel"
            )
        self.check_parts()
        if self.critic is not None and self.effective_advantage.name != "gae":
            raise ValueError(
                f"critic is not used by advantage {self.effective_advantage.name}; set advantage to gae or remove critic"
            )
        return self

    def check_parts(self) -> None:
        """Refuse parts of the objective that do not go together, or need a model that the run does not have.

        Raises:
            ValueError: names field, value and fix.
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
            if need not in self.provided:
                raise ValueError(
                    f"{what} needs a {need} model, which this run does not have; set algorithm.{need}, "
                    "or choose another preset or part"
                )

    @property
    def needs(self) -> dict[Need, str]:
        """Inputs of the objective besides the policy, each with the part that needs it."""
        found: dict[Need, str] = {}
        if self.regularizers.kl > 0:
            found["reference"] = f"regularizers.kl ({self.regularizers.kl})"
        elif self.regularizers.kl_reward > 0:
            found["reference"] = f"regularizers.klReward ({self.regularizers.kl_reward})"
        found |= algorithm_inputs("loss", self.effective_loss.name, self.effective_loss.options)
        return found | algorithm_inputs("advantage", self.effective_advantage.name, self.effective_advantage.options)

    @property
    def provided(self) -> frozenset[Need]:
        """Inputs that the run has besides the policy."""
        have: dict[Need, object] = {"reference": self.reference, "critic": self.critic}
        return frozenset(need for need, config in have.items() if config is not None)

    @property
    def effective_loss(self) -> LossConfig:
        """The loss after the preset: `loss` when it is given, else the preset's."""
        settings = find_preset(self.preset)
        return self.loss or LossConfig(name=settings.loss, options=dict(settings.loss_options))

    @property
    def effective_advantage(self) -> AdvantageConfig:
        """The advantage after the preset: `advantage` when it is given, else the preset's."""
        settings = find_preset(self.preset)
        return self.advantage or AdvantageConfig(name=settings.advantage, options=dict(settings.advantage_options))

    @property
    def batch_advantage(self) -> AdvantageConfig:
        """The advantage that a batch holds: without the options that act after KL in the reward, which the trainer applies."""
        advantage = self.effective_advantage
        if self.regularizers.kl_reward == 0 or is_import_path(advantage.name) or advantage.name == "gae":
            return advantage
        later = {"adv_mean": "none", "adv_std": "none", "neg_clipped": False}
        return AdvantageConfig(name=advantage.name, options={**advantage.options, **later})

    @property
    def effective_aggregation(self) -> str | None:
        """The aggregation after the preset; None: that of the loss."""
        return self.aggregation or find_preset(self.preset).aggregation

    @property
    def effective_proximal(self) -> str:
        """The proximal policy: `proximal` when it is given, else that of the loss."""
        return self.proximal or default_proximal(self.effective_loss.name)

    @property
    def effective_correction(self) -> CorrectionConfig | None:
        """The correction: `correction` when it is given, else the preset's, which belongs to its loss and needs a proximal policy."""
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
        """Warning about a band of the loss that the rounding of engine and trainer alone leaves, or None."""
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
            f"farther and takes their gradient; {fix}"
        )

    @property
    def effective_filters(self) -> FilterConfig:
        """The filters after the preset: `filters` when they are given, else the preset's."""
        return self.filters or FilterConfig.model_validate(dict(find_preset(self.preset).filters))


class OptimizerConfig(Config):
    """Optimizer that turns gradients into updates of the float32 master weights."""

    name: Literal["adamw", "muon", "sgd"] = "adamw"
    """`muon`: orthogonalised momentum for the layers' matrices, AdamW for all else."""
    lr: Annotated[float, Field(gt=0, le=10)] = 1e-6
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Decoupled weight decay; `sgd` adds it to the gradient."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of AdamW's second moment."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the root of AdamW's second moment."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Momentum of `muon` (default 0.95) and `sgd` (default 0.9)."""
    moments: Literal["float32", "int8"] = "float32"
    """Number format of `adamw`'s moments; `int8`: blocks of 8-bit codes, a quarter of the memory, and slower."""
    offload: bool = False
    """Keep moments in host memory; the device has two buckets of them while it steps. Needs GPUs."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients are scaled down to this global L2 norm; null: no clipping."""

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
        """Refuse what would do nothing. A default is not distinguished from a value left out: `run.json` holds them all."""
        if self.name == "adamw" and self.momentum is not None:
            raise ValueError(f"momentum ({self.momentum}) has no meaning for optimizer adamw; remove it")
        if self.name != "adamw" and self.moments != "float32":
            raise ValueError(f"moments ({self.moments}) has no meaning for optimizer {self.name}; remove it")
        if self.name == "sgd" and (self.beta1, self.beta2, self.eps) != (0.9, 0.999, 1e-8):
            raise ValueError("beta1, beta2 and eps have no meaning for optimizer sgd; remove them")
        return self

    @property
    def effective_momentum(self) -> float:
        """The momentum after its default."""
        if self.momentum is not None:
            return self.momentum
        return 0.95 if self.name == "muon" else 0.9


class SchedulerConfig(Config):
    """The learning rate over the run's steps."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up: constant, or decay to `minLrRatio` of the peak at `maxSteps`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the rate rises linearly from 0 to the peak."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Rate at the end as a share of the peak; for linear and cosine."""
