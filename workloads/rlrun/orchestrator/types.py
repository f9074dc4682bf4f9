"""Data types of a recorded sequence, a finished rollout and a finished group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlrun.environments.protocol import Message, Tool
from rlrun.protocol.files.routes import Routes


def run_lengths(mask: npt.NDArray[np.bool_]) -> list[int]:
    """Return the lengths of the runs of true values in `mask` `[T]`, in order."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [int(length) for length in edges[1::2] - edges[::2]]


@dataclass(frozen=True)
class Recorded:
    """One finished sequence. Its columns are those of `rlrun.protocol.files.batch.Sample`, each `[T]`, and its routes `[T, L, K]`."""

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    routes: Routes | None = None
    """Experts of the engines, without dense layers; None without `trainer.router.replay: Rollout`, or if a restart lost them."""


@dataclass(frozen=True)
class Rollout:
    """One episode with its score and all its tokens."""

    sequences: tuple[Recorded, ...]
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    texts: tuple[str, ...] = ()
    """Replies of the policy."""
    finish_reason: str = "stop"
    truncated: bool = False
    seconds: float = 0.0
    task_id: str = ""
    tools: tuple[Tool, ...] = ()
    """Tools in the last request to the model."""

    @property
    def tokens(self) -> int:
        """Number of all tokens, prompts included."""
        return sum(len(s.input_ids) for s in self.sequences)

    @property
    def loss_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return int(sum(s.loss_mask.sum() for s in self.sequences))

    @property
    def reply_lengths(self) -> list[int]:
        """Tokens of each non-empty turn of the policy."""
        return [length for sequence in self.sequences for length in run_lengths(sequence.loss_mask)]


@dataclass(frozen=True)
class FinishedGroup:
    """All rollouts of one task."""

    number: int
    environment: str
    task_id: str
    dispatch_version: int
    temperature: float
    rollouts: tuple[Rollout, ...]

    @property
    def mean_reward(self) -> float:
        """Mean of the environment's rewards, a measure of the task's difficulty for the policy."""
        return sum(rollout.reward for rollout in self.rollouts) / len(self.rollouts)

    @property
    def zero_variance(self) -> bool:
        """Whether all rewards are equal, so that group-relative advantages are all 0."""
        return len({rollout.reward for rollout in self.rollouts}) < 2
