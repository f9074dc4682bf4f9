"""Plan of an evaluation: policies, questions and place of the answers, for a command or a run of task Eval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.config.models.rollout import EvaluationConfig
from rlrun.environments.protocol import Split
from rlrun.evaluate.policies import Policy
from rlrun.evaluate.staging import Export


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings decided before the first question."""

    work: Path
    """Folder of the answers and results."""
    orchestrator: OrchestratorConfig
    """Configuration, with the settings of the questions in `evaluation`."""
    policies: Sequence[Policy]
    split: Split
    export: Export
    attempt: int | None = None
    """Attempt of a run, which writes its own files and reads those of all attempts. None: a command with a locked
    folder.
    """

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.orchestrator.name

    @property
    def evaluation(self) -> EvaluationConfig:
        """Size of the evaluation."""
        assert self.orchestrator.evaluation is not None
        return self.orchestrator.evaluation

    @property
    def adapters(self) -> list[Policy]:
        """Policies that are adapters."""
        return [policy for policy in self.policies if policy.kind == "adapter"]
