"""Objective of one environment where it differs from the run's: parts, each in place of the run's."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from rlrun.config.algorithm.names import proximal_problem
from rlrun.config.base import Config
from rlrun.config.models.learning import (
    AdvantageConfig,
    Aggregation,
    AlgorithmConfig,
    CorrectionConfig,
    FilterConfig,
    LossConfig,
    Proximal,
    RegularizerConfig,
)
from rlrun.config.rule import Rule


class EnvironmentAlgorithm(Config):
    """Parts of the objective that replace the run's in one environment."""

    loss: LossConfig | None = None
    """Replaces the run's loss."""
    advantage: AdvantageConfig | None = None
    """Replaces the run's advantage."""
    aggregation: Aggregation | None = None
    """Replaces the run's aggregation."""
    aggregation_length: Annotated[int, Field(ge=1)] | None = None
    """Tokens that `constant_length` divides by."""
    proximal: Proximal | None = None
    """Replaces the run's proximal policy; default: the run's where this loss uses it, else the loss's."""
    regularizers: RegularizerConfig | None = None
    """Replaces the run's regularizers."""
    correction: CorrectionConfig | None = None
    """Replaces the run's correction."""
    filters: FilterConfig | None = None
    """Replaces the run's filters."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.advantage) || self.advantage.name != 'gae'",
            "advantage gae is of the whole run, its critic sees all environments; set algorithm.advantage",
            ".advantage",
        ),
    )

    @model_validator(mode="after")
    def _per_rollout(self) -> Self:
        if self.advantage is not None and self.advantage.name == "gae":
            raise ValueError(
                "advantage gae is of the whole run, its critic sees all environments; set algorithm.advantage"
            )
        return self

    def over(self, run: AlgorithmConfig) -> AlgorithmConfig:
        """The algorithm of this environment: the run's, with the parts that are given here in their place.

        Raises:
            ValueError: the parts do not go together, or need what the run does not have; names field, value and fix.
        """
        given = {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
        if "aggregation" in given:  # the run's length belongs to the run's aggregation
            given.setdefault("aggregation_length", None)
        if run.critic is not None and self.advantage is not None:
            raise ValueError(
                f"advantage ({self.advantage.name}) cannot replace gae of the run, whose critic reads the rewards of all "
                "environments; remove it"
            )
        found = run.model_copy(update=given)
        if self.proximal is None and found.proximal not in (None, "inference"):
            # The run's proximal policy belongs to the run's loss: it is left out for a loss that does not use it.
            corrected = found.effective_correction is not None
            if proximal_problem(found.effective_loss.name, found.proximal, corrected=corrected):
                found = found.model_copy(update={"proximal": None})
        found.check_parts()
        return found

    def trainer_part(self, run: AlgorithmConfig) -> EnvironmentAlgorithm | None:
        """The parts without those that the orchestrator alone reads; None when nothing is left.

        With KL in the reward the trainer reads the advantage too: it normalizes after the KL.
        """
        rewards_kl = (self.regularizers or run.regularizers).kl_reward > 0
        own = self.model_copy(update={"advantage": self.advantage if rewards_kl else None, "filters": None})
        return None if own == EnvironmentAlgorithm() else own
