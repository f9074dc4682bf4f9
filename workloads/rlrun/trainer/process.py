"""Surroundings of a run in the trainer: what all runs of the process share, and the way to one run's orchestrator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlrun.protocol.messages.channel import Phase
from rlrun.trainer.channel.batch_feed import Feed
from rlrun.trainer.channel.run_channel import Channel
from rlrun.trainer.engines_beside import EnginesBeside
from rlrun.trainer.modeling.shared_model import Policy


@dataclass(frozen=True)
class Process:
    """Objects that all runs of the process share; the same on every rank."""

    policy: Policy
    """It holds the values of one run at a time."""
    agree: Callable[[], None]
    """Called by all ranks together where a step may be left; raises on all of them when they are to stop."""
    tell: Callable[[Phase, int, int], None]
    """Gets phase, step and micro-batch of this rank whenever they change."""
    engines: EnginesBeside | None = None
    """Engines that have the same GPUs, in turn; None: the trainer has them for itself."""


@dataclass(frozen=True)
class Link:
    """A run's source of batches. Channel and feed are rank 0's alone."""

    channel: Channel | None = None
    """Channel to the run's orchestrator, if it has one."""
    feed: Feed | None = None
    replay: bool = False
    """True if the batches are recorded ones, and there is no orchestrator."""
