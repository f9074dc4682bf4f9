"""Messages between trainer and orchestrator: HTTP between rank 0 (server) and the orchestrator (client), guarded by the run's API key.

    GET  /rlrun/trainer/state                      -> TrainerState
    GET  /rlrun/trainer/events?after=N&wait=S      -> {"attempt": a, "events": [Event, ...]}   (long poll, at most S seconds)
    POST /rlrun/trainer/batches     BatchReady     a packed batch is durable
    POST /rlrun/trainer/checkpoints OrchestratorSaved   the orchestrator's part of a checkpoint is durable
    GET  /rlrun/trainer/ready                      -> 200 once the attempt has begun, else 503; for probes, without the key
    POST /rlrun/trainer/shutdown                   all is done; rank 0 ends the group with exit code 0
    POST /rlrun/trainer/stop                       the orchestrator is asked to stop: the group saves the last finished step, and ends too

News travel this way; the files are the truth after a restart. Events are numbered from 1 within an attempt and kept in memory until the
orchestrator, which lives as long as the attempt, has asked for later ones. A run in another run's trainer has the same routes below
`shared.channel_of(run)`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from rlrun.config.base import Config
from rlrun.protocol.files.volume_faults import StorageReason, Trouble

STATE = "/rlrun/trainer/state"
EVENTS = "/rlrun/trainer/events"
BATCHES = "/rlrun/trainer/batches"
CHECKPOINTS = "/rlrun/trainer/checkpoints"
SHUTDOWN = "/rlrun/trainer/shutdown"
STOP = "/rlrun/trainer/stop"
GONE = 410
"""Status of every route of a run that this trainer does not train (any more)."""

Phase = Literal[
    "starting",
    "loading",
    "publishing",
    "waiting_for_batch",
    "waiting_for_turn",
    "validating",
    "training",
    "saving",
    "finished",
]
EventKind = Literal[
    "published", "validated", "trained", "checkpoint_saved", "checkpoint_complete", "released", "finished"
]


class Event(Config):
    """One piece of news from the trainer."""

    seq: Annotated[int, Field(ge=1)]
    """Position in this attempt's list."""
    kind: EventKind
    """published: version `step` is complete at `path`, or (None) in the trainer's memory alone. validated: `metrics` hold the held-out loss
    of version `step`. trained: step `step` is done, with `metrics`. checkpoint_saved: the shards of `step` are durable, the
    orchestrator's part is wanted in `path`/orchestrator. checkpoint_complete: its manifest exists. released: what version
    `step` needed of the GPUs is given up, and the engines may have them. finished: the last step is trained,
    published and saved."""
    step: Annotated[int, Field(ge=0)]
    """Step or policy version."""
    path: str | None = None
    """Folder of what was written."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Metrics of a trained step or a validated version."""


class RankState(Config):
    """Activity of one rank."""

    rank: Annotated[int, Field(ge=0)]
    """Number of the rank."""
    phase: Phase
    """Activity of the rank."""
    step: Annotated[int, Field(ge=0)]
    """Step that it works for."""
    part: Annotated[int, Field(ge=0)] = 0
    """Micro-batch as in `TrainerState`."""
    since: float
    """Start of the activity, in seconds since the epoch."""


class StorageTrouble(Config):
    """`volume_faults.Trouble`, on its way."""

    reason: StorageReason
    """Reason as the operator names it."""
    text: str
    """Text for a person."""
    blocks: bool
    """True if the trainer waits for the volume."""


class TrainerState(Config):
    """Current activity of the trainer."""

    attempt: Annotated[int, Field(ge=1)]
    """Attempt of the trainer."""
    base_step: Annotated[int, Field(ge=0)]
    """The step that it started from."""
    step: Annotated[int, Field(ge=0)]
    """The last step that it trained."""
    phase: Phase
    """Activity of the trainer."""
    phase_since: float
    """Start of the activity, in seconds since the epoch."""
    last_event: Annotated[int, Field(ge=0)]
    """Number of the newest event."""
    part: Annotated[int, Field(ge=0)] = 0
    """Number of the micro-batch that the rank computes, or is about to, from 1; 0: the phase has none."""
    ranks: list[RankState] = Field(default_factory=list)
    """The other ranks, as far as they could be asked."""
    storage: StorageTrouble | None = None
    """Reason why the volume is of no use where the trainer writes."""

    def trouble(self) -> Trouble | None:
        """`storage` as the roles have it."""
        found = self.storage
        return None if found is None else Trouble(found.reason, found.text, found.blocks)


class EventList(Config):
    """Answer to a long poll."""

    # pydantic-core keeps up to 16,384 short strings of all documents, and the path of each version is another one.
    model_config = ConfigDict(cache_strings="keys")

    attempt: Annotated[int, Field(ge=1)]
    """Attempt of the trainer that answers."""
    events: list[Event]
    """Events after the one that was asked for."""


class BatchReady(Config):
    """A packed batch is durable."""

    step: Annotated[int, Field(ge=1)]
    """The step that it is for."""
    path: str
    """Its folder."""


class OrchestratorSaved(Config):
    """The orchestrator's part of a checkpoint is durable."""

    step: Annotated[int, Field(ge=1)]
    """The checkpoint's step."""
