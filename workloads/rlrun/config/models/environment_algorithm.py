"""Objective of one environment, if it differs from the run's objective."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from rlrun.config.algorithm.names import proximal_problem
from rlrun.config.base import Config, Rule
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


class EnvironmentAlgorithm(Config):
    """Parts of the run's objective that are replaced for one environment."""

    loss: LossConfig | None = None
    """Replaces the run's loss."""
    advantage: AdvantageConfig | None = None
    """Replaces the run's advantage."""
    aggregation: Aggregation | None = None
    """Replaces the run's aggregation."""
    aggregation_length: Annotated[int, Field(ge=1)] | None = None
    """Number of tokens that `constant_length` divides by."""
    proximal: Proximal | None = None
    """Replaces the run's proximal policy. Default: the run's if this loss uses it, otherwise the loss's default."""
    regularizers: RegularizerConfig | None = None
    """Replaces the run's regularizers."""
    correction: CorrectionConfig | None = None
    """Replaces the run's correction."""
    filters: FilterConfig | None = None
    """Replaces the run's filters."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.advantage) || self.advantage.name != 'gae'",
            "advantage gae applies to the whole run, because its critic is trained on all environments; set algorithm.advantage instead",
            ".advantage",
        ),
    )

    @model_validator(mode="after")
    def _per_rollout(self) -> Self:
        if self.advantage is not None and self.advantage.name == "gae":
            raise ValueError(
                "advantage gae applies to the whole run, because its critic is trained on all environments; set algorithm.advantage instead"
            )
        return self

    def merged_over(self, run: AlgorithmConfig) -> AlgorithmConfig:
        """Return the algorithm of this environment: the run's, with the parts that are set here replaced.

        Raises:
            ValueError: The parts contradict each other, or need a model that the run does not have; has field, value and fix.
        """
        given = {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
        if "aggregation" in given:  # the run's length belongs to the run's aggregation
            given.setdefault("aggregation_length", None)
        if run.critic is not None and self.advantage is not None:
            raise ValueError(
                f"advantage ({self.advantage.name}) cannot replace the run's advantage gae, because its critic is trained on rewards of "
                "all environments; remove it"
            )
        found = run.model_copy(update=given)
        if self.proximal is None and found.proximal not in (None, "inference"):
            # The run's proximal policy belongs to the run's loss. It is dropped if this environment's loss does not use it.
            corrected = found.effective_correction is not None
            if proximal_problem(found.effective_loss.name, found.proximal, corrected=corrected):
                found = found.model_copy(update={"proximal": None})
        found.check_parts()
        return found

    def with_preset_applied(self, run: AlgorithmConfig) -> EnvironmentAlgorithm:
        """Return the same objective with each part in its own field, or an empty value if this environment has the run's objective.

        Args:
            run: the run's algorithm, before its preset is applied.
        """
        if self == EnvironmentAlgorithm():
            return self
        complete = self.merged_over(run).with_preset_applied()
        fields = {name: getattr(complete, name) for name in type(self).model_fields}
        # Only the run can have the advantage gae.
        return EnvironmentAlgorithm(**fields | {"advantage": self.advantage and complete.advantage})

    def trainer_part(self, run: AlgorithmConfig) -> EnvironmentAlgorithm | None:
        """Return the parts without those that only the orchestrator reads, or None if no part is left.

        With a KL term in the reward the trainer reads the advantage too, because it normalizes after adding the KL.
        """
        rewards_kl = (self.regularizers or run.regularizers).kl_reward > 0
        own = self.model_copy(update={"advantage": self.advantage if rewards_kl else None, "filters": None})
        return None if own == EnvironmentAlgorithm() else own
