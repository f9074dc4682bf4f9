"""Shared resources of an attempt of task RL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.orchestrator.aio.event_loop import Signal
from rlrun.orchestrator.engines.draining import EngineRequests
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from rlrun.orchestrator.rollouts.environment_pool import Arena
from rlrun.orchestrator.trainer.trainer_client import TrainerClient
from rlrun.protocol.files.attempts import Attempt
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.volume_faults import Volume


@dataclass(frozen=True)
class RunContext:
    """Configuration and attempt, with the ready environments, engines, trainer and volume."""

    config: OrchestratorConfig
    attempt: Attempt
    """Content of the attempt's file."""
    arenas: Sequence[Arena]
    """Environments in the order of the sampler."""
    chat: ChatTokens
    """Tokenizer and chat template."""
    pool: EnginePool
    """Pool of the engines."""
    trainer: TrainerClient
    signal: Signal
    """Signal notified after each change, also by `pool`."""
    volume: Volume
    """Volume of the run's folder. While it refuses, writes that the run needs wait."""
    engine_requests: EngineRequests = field(default_factory=EngineRequests)
    """Requests of the operator."""

    @property
    def paths(self) -> RunPaths:
        """Paths of the run's files."""
        return RunPaths(Path(self.config.output_dir))
