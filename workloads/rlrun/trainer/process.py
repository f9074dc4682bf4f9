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
class SharedObjects:
    """Objects of one rank's process that all runs in it share: the run of the trainer itself, and guests that share the trainer."""

    policy: Policy
    """Model of all runs. It contains the parameters of one run at a time; each run loads its own before it trains."""
    check_stop: Callable[[], None]
    """Check for a request to stop. All ranks call it together between micro-batches; after a request it raises `StopAgreed` on all."""
    report_phase: Callable[[Phase, int, int], None]
    """Receiver of this rank's phase, step and micro-batch, called on each change. Rank 0 reads the values of all ranks."""
    engines: EnginesBeside | None = None
    """Engines that use the same GPUs in turn, or None if the trainer does not share its GPUs."""


@dataclass(frozen=True)
class Link:
    """Connection of a run to its orchestrator, which sends the batches. Only rank 0 has a channel and a feed."""

    channel: Channel | None = None
    """Channel to the run's orchestrator; None in a replay, and on ranks other than 0."""
    feed: Feed | None = None
    """Source of the batches in order of step; None on ranks other than 0."""
    replay: bool = False
    """Whether the batches are recorded and the run has no orchestrator; set on all ranks."""
