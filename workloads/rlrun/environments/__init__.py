"""Environments: tasks, one episode with a model, and its score.

`protocol` is the contract, `registry.load` finds an environment by id, `episode.run_episode` plays one with a deadline;
the rest are the shipped environments and the adapter for `verifiers` tasksets. Nothing here imports torch or vllm.
"""

from rlrun.environments.episode import EpisodeError, run_episode
from rlrun.environments.protocol import (
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
)
from rlrun.environments.registry import EnvironmentLoadError, known, load

__all__ = [
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
    "known",
    "load",
    "run_episode",
]
