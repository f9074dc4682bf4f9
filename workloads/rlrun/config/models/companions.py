"""The models that stand beside the policy in the trainer: a frozen reference (or teacher), and a critic that learns with it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from rlrun.config.base import Config
from rlrun.config.formats import ModelSource, Revision
from rlrun.config.models.model import ModelConfig
from rlrun.config.rule import Rule

INITIAL = "initial"
"""The model that the run starts from."""

REPOSITORY_MAX = 253
"""Characters of the name of a repository, as of `model.name`; a folder may have more."""


class ReferenceConfig(Config):
    """A frozen model whose log-probs a KL term or a distillation reads: the run's own start, or a teacher."""

    model: ModelSource = INITIAL
    """`initial`: the model that the run starts from; else an absolute folder or a repository on the hub. Same vocabulary."""
    revision: Revision | None = None
    """Branch, tag or commit on the hub; default: the main branch."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.revision) || !(self.model == 'initial' || self.model.startsWith('/'))",
            "revision ({self.revision}) needs a repository on the hub, model is {self.model}; remove revision",
            ".revision",
        ),
    )

    @model_validator(mode="after")
    def _name_of_a_repository(self) -> Self:
        if not self.model.startswith("/") and len(self.model) > REPOSITORY_MAX:
            has = f"model ({self.model[:40]}…) has {len(self.model)} characters"
            raise ValueError(
                f"{has}, and a repository on the hub at most {REPOSITORY_MAX}; name another one, or an absolute folder"
            )
        return self

    @model_validator(mode="after")
    def _revision_of_a_repository(self) -> Self:
        if self.revision is not None and (self.model == INITIAL or self.model.startswith("/")):
            raise ValueError(
                f"revision ({self.revision}) needs a repository on the hub, model is {self.model}; remove revision"
            )
        return self

    def resolved(self, policy: ModelConfig) -> ModelConfig:
        """Source of the reference model; `policy` is the run's model."""
        if self.model == INITIAL:
            return policy
        if self.model.startswith("/"):
            return ModelConfig(path=self.model)
        return ModelConfig(name=self.model, revision=self.revision)


class CriticConfig(Config):
    """A value model for advantage `gae`: the policy's body with a value head, trained in the same group."""

    lr: Annotated[float, Field(gt=0, le=10)] = 1e-5
    """Peak learning rate; the rest is as in `trainer.optimizer` and `trainer.scheduler`."""
    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """Clip of a new value's distance from the one at the start of the step; null: none."""
