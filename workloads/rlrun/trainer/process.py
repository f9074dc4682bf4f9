"""Dependencies of a run in the trainer: objects shared by all runs of the process, and the connection to the run's orchestrator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlrun.protocol.messages.trainer_channel import Phase
from rlrun.trainer.channel.batch_feed import Feed
from rlrun.trainer.channel.run_channel import Channel
from rlrun.trainer.engines_beside import EnginesBeside
from rlrun.trainer.modeling.shared_model import Policy


@dataclass(frozen=True)
class Process:
    """Objects that all runs of the process share. Every rank has them."""

    policy: Policy
    """Model with the parameters of one run at a time."""
    agree: Callable[[], None]
    """Stop point that all ranks call together between micro-batches; raises `StopAgreed` on all of them after a request to stop."""
    tell: Callable[[Phase, int, int], None]
    """Receiver of this rank's phase, step and micro-batch, called on each change."""
    engines: EnginesBeside | None = None
    """Engines that use the same GPUs in turn, or None if the trainer does not share its GPUs."""


@dataclass(frozen=True)
class Link:
    """Source of a run's batches. Only rank 0 has a channel and a feed."""

    channel: Channel | None = None
    """Channel to the run's orchestrator; None in a replay."""
    feed: Feed | None = None
    replay: bool = False
    """Whether the batches are recorded and the run has no orchestrator."""
