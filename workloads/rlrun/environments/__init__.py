"""Environments: they provide tasks, play an episode with a model and score it.

`protocol` is the interface that every environment implements, `registry.load_environment` loads an environment by id and
`episode.run_episode` plays one episode with a deadline. `adapters` runs `verifiers` tasksets and programs that are written for
OpenAI's client; `bundled` contains the shipped environments. This package does not import torch or vllm.
"""

from rlrun.environments.adapters.agent import AgentEnvironment, run_program
from rlrun.environments.episode import EpisodeError, run_episode
from rlrun.environments.protocol import (
    ComparesGroups,
    Demonstrates,
    Environment,
    Episode,
    Message,
    ModelClient,
    Reply,
    Score,
    SingleTurnEnvironment,
    Split,
    Task,
    UnplayableTaskError,
)
from rlrun.environments.registry import EnvironmentLoadError, known_environments, load_environment

__all__ = [
    "AgentEnvironment",
    "ComparesGroups",
    "Demonstrates",
    "Environment",
    "EnvironmentLoadError",
    "Episode",
    "EpisodeError",
    "Message",
    "ModelClient",
    "Reply",
    "Score",
    "SingleTurnEnvironment",
    "Split",
    "Task",
    "UnplayableTaskError",
    "known_environments",
    "load_environment",
    "run_episode",
    "run_program",
]
