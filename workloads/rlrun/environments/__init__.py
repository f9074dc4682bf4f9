"""Environments: tasks, one episode with a model, and its score.

`protocol` is the contract, `registry.load_environment` finds an environment by id, `episode.run_episode` plays one with a deadline;
`agent` and `openai_*` serve programs that are written for OpenAI's client; the rest are the shipped environments and the adapter for
`verifiers` tasksets. Nothing here imports torch or vllm.
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
