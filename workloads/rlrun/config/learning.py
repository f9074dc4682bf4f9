"""How the policy learns: objective, staleness bounds, optimizer and schedule."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlrun.config.algorithm_names import complete_options, preset
from rlrun.config.base import Config


class _Objective(Config):
    name: Annotated[str, Field(min_length=1, max_length=253)]
    """A known name, or `package.module:function` for one of your own in the image."""
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Options of this name, in the spelling of the reference page (`delta`, `eps_high`, ...)."""


class LossConfig(_Objective):
    """The policy loss per token."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        complete_options("loss", self.name, self.options)
        return self


class AdvantageConfig(_Objective):
    """How a group's rewards become advantages."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        complete_options("advantage", self.name, self.options)
        return self


class FilterConfig(Config):
    """Which groups are not trained on."""

    zero_variance: bool = False
    """Drop groups whose rewards are all equal (they carry no gradient) and sample others instead (dynamic sampling)."""


class AlgorithmConfig(Config):
    """The objective and how far behind the policy its data may be."""

    preset: Annotated[str, Field(min_length=1, max_length=63)] = "grpo"
    """A named combination of advantage and loss; the page of presets lists them. `loss` and `advantage` replace its parts."""
    loss: LossConfig | None = None
    """Replaces the preset's loss."""
    advantage: AdvantageConfig | None = None
    """Replaces the preset's advantage."""
    max_async_level: Annotated[int, Field(ge=0, le=64)] = 2
    """Depth of the pipeline in steps: rollouts for step n start once version n-1-maxAsyncLevel is published; 0 is synchronous."""
    max_off_policy_steps: Annotated[int, Field(ge=0, le=1024)] = 8
    """A group is trained in step n only if it was dispatched at version n-1-maxOffPolicySteps or later."""
    filters: FilterConfig = FilterConfig()
    """Which groups are dropped and replaced."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        preset(self.preset)
        if self.max_off_policy_steps < self.max_async_level:
            raise ValueError(
                f"maxOffPolicySteps ({self.max_off_policy_steps}) must be at least maxAsyncLevel ({self.max_async_level}): "
                "otherwise the pipeline makes groups that may never be trained; raise maxOffPolicySteps or lower maxAsyncLevel"
            )
        return self

    @property
    def effective_loss(self) -> LossConfig:
        """The loss after the preset: `loss` when it is given, else the preset's."""
        settings = preset(self.preset)
        return self.loss or LossConfig(name=settings.loss, options=dict(settings.loss_options))

    @property
    def effective_advantage(self) -> AdvantageConfig:
        """The advantage after the preset: `advantage` when it is given, else the preset's."""
        settings = preset(self.preset)
        return self.advantage or AdvantageConfig(name=settings.advantage, options=dict(settings.advantage_options))


class OptimizerConfig(Config):
    """AdamW (Loshchilov & Hutter, 2019) on float32 master weights."""

    name: Literal["adamw"] = "adamw"
    """The optimizer."""
    lr: Annotated[float, Field(gt=0, le=10)] = 1e-6
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Decoupled weight decay."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the second moment."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients are scaled down to this global L2 norm; null: no clipping."""


class SchedulerConfig(Config):
    """The learning rate over the run's steps."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up: constant, or decaying to `minLrRatio` of the peak at `maxSteps`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the rate rises linearly from 0 to the peak."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Rate at the end as a share of the peak; for linear and cosine."""
