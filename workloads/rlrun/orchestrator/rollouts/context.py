"""Resources that the parts of an attempt of task RL share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.orchestrator.aio.condition import Signal
from rlrun.orchestrator.engines.operator_requests import Wishes
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from rlrun.orchestrator.rollouts.environment_pool import Arena
from rlrun.orchestrator.trainer.client import TrainerClient
from rlrun.protocol.files.attempts import Attempt
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.volume_faults import Volume


@dataclass(frozen=True)
class RunContext:
    """The run, and the ways to its environments, engines, trainer and volume, all of which are up."""

    config: OrchestratorConfig
    attempt: Attempt
    """The attempt's file."""
    arenas: Sequence[Arena]
    """The environments, in the order of the sampler."""
    chat: ChatTokens
    """Tokenizer and template."""
    pool: EnginePool
    """The engines."""
    trainer: TrainerClient
    signal: Signal
    """Notified after each change, by `pool` too."""
    volume: Volume
    """Volume of the run's folder. Writes that the run cannot go on without wait while it refuses."""
    wishes: Wishes = field(default_factory=Wishes)
    """Wishes of the operator."""

    @property
    def paths(self) -> RunPaths:
        """Files of the run."""
        return RunPaths(Path(self.config.output_dir))
