"""Models that the trainer holds in addition to the policy: a frozen reference (or teacher) and a trained critic."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from rlrun.config.base import Config
from rlrun.config.formats import ModelSource, Revision
from rlrun.config.models.model import ModelConfig
from rlrun.config.rule import Rule

INITIAL = "initial"
"""Value of `model` for the model that the run starts from."""

REPOSITORY_MAX = 253
"""Longest name of a hub repository, in characters, as for `model.name`. A folder's path may be longer."""


class ReferenceConfig(Config):
    """A frozen model whose log-probs a KL term or distillation reads: the run's initial model, or a teacher."""

    model: ModelSource = INITIAL
    """`initial`: the model that the run starts from. Otherwise an absolute folder or a hub repository with the same vocabulary."""
    revision: Revision | None = None
    """Branch, tag or commit on the hub; default: the main branch."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.revision) || !(self.model == 'initial' || self.model.startsWith('/'))",
            "revision ({self.revision}) needs a hub repository, but model is {self.model}; remove revision",
            ".revision",
        ),
    )

    @model_validator(mode="after")
    def _name_of_a_repository(self) -> Self:
        if not self.model.startswith("/") and len(self.model) > REPOSITORY_MAX:
            has = f"model ({self.model[:40]}…) has {len(self.model)} characters"
            raise ValueError(
                f"{has}, but a hub repository has at most {REPOSITORY_MAX}; use a shorter name or an absolute folder"
            )
        return self

    @model_validator(mode="after")
    def _revision_of_a_repository(self) -> Self:
        if self.revision is not None and (self.model == INITIAL or self.model.startswith("/")):
            raise ValueError(
                f"revision ({self.revision}) needs a hub repository, but model is {self.model}; remove revision"
            )
        return self

    def resolved(self, policy: ModelConfig) -> ModelConfig:
        """Return the source of the reference model; `policy` is the run's model."""
        if self.model == INITIAL:
            return policy
        if self.model.startswith("/"):
            return ModelConfig(path=self.model)
        return ModelConfig(name=self.model, revision=self.revision)


class CriticConfig(Config):
    """A value model for advantage `gae`: a copy of the policy with a value head, trained by the same ranks."""

    lr: Annotated[float, Field(gt=0, le=10)] = 1e-5
    """Peak learning rate. All other settings come from `trainer.optimizer` and `trainer.scheduler`."""
    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """Largest distance of a new value from the value at the start of the step; null: unlimited."""
