"""Messages between trainer and orchestrator: HTTP between rank 0 (server) and the orchestrator (client), guarded by the run's API key.

    GET  /rlrun/trainer/state                      -> TrainerState
    GET  /rlrun/trainer/events?after=N&wait=S      -> {"attempt": a, "events": [Event, ...]}   (long poll, at most S seconds)
    POST /rlrun/trainer/batches     BatchReady     a packed batch is durable
    POST /rlrun/trainer/checkpoints OrchestratorSaved   the orchestrator's part of a checkpoint is durable
    GET  /rlrun/trainer/ready                      -> 200 once the attempt has started, else 503; for probes, without the key
    POST /rlrun/trainer/shutdown                   the run is complete; rank 0 ends the group with exit code 0
    POST /rlrun/trainer/stop                       the orchestrator must stop: the group saves the last finished step, and ends too

Messages only announce changes; after a restart the files are authoritative. Events are numbered from 1 within an attempt and kept in memory
until the orchestrator, which lives as long as the attempt, requests later ones. A run in another run's trainer has the same routes below
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
"""Status of every route of a run that this trainer does not train, or no longer trains."""

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
    """Event of the trainer."""

    seq: Annotated[int, Field(ge=1)]
    """Position in this attempt's list."""
    kind: EventKind
    """published: version `step` is complete at `path`, or (None) only in the trainer's memory. validated: `metrics` contain the held-out
    loss of version `step`. trained: step `step` is done, with `metrics`. checkpoint_saved: the shards of `step` are durable, and the
    orchestrator must write its part to `path`/orchestrator. checkpoint_complete: its manifest exists. released: version `step` no
    longer needs the GPUs, and the engines may use them. finished: the last step is trained,
    published and saved."""
    step: Annotated[int, Field(ge=0)]
    """Step or policy version."""
    path: str | None = None
    """Written folder."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Metrics of a trained step or a validated version."""


class RankState(Config):
    """Activity of one rank."""

    rank: Annotated[int, Field(ge=0)]
    """Number of the rank."""
    phase: Phase
    """Activity of the rank."""
    step: Annotated[int, Field(ge=0)]
    """Step for which it works."""
    part: Annotated[int, Field(ge=0)] = 0
    """Micro-batch, see `TrainerState.part`."""
    since: float
    """Start of the activity, in seconds since the epoch."""


class StorageTrouble(Config):
    """Message form of `volume_faults.Trouble`."""

    reason: StorageReason
    """Condition reason of the operator."""
    text: str
    """Message for the user."""
    blocks: bool
    """Whether the trainer waits for the volume."""


class TrainerState(Config):
    """Current activity of the trainer."""

    attempt: Annotated[int, Field(ge=1)]
    """Attempt of the trainer."""
    base_step: Annotated[int, Field(ge=0)]
    """Step from which it started."""
    step: Annotated[int, Field(ge=0)]
    """Last trained step."""
    phase: Phase
    """Activity of the trainer."""
    phase_since: float
    """Start of the activity, in seconds since the epoch."""
    last_event: Annotated[int, Field(ge=0)]
    """Number of the newest event."""
    part: Annotated[int, Field(ge=0)] = 0
    """Number of the current or next micro-batch of the rank, from 1; 0: the phase has none."""
    ranks: list[RankState] = Field(default_factory=list)
    """Other ranks, as far as they answered."""
    storage: StorageTrouble | None = None
    """Problem of the volume to which the trainer writes."""

    def trouble(self) -> Trouble | None:
        """Return `storage` in the form of the roles."""
        found = self.storage
        return None if found is None else Trouble(found.reason, found.text, found.blocks)


class EventList(Config):
    """Answer to a long poll."""

    # pydantic-core caches up to 16,384 short strings of all documents; each version has another path, which would fill that cache.
    model_config = ConfigDict(cache_strings="keys")

    attempt: Annotated[int, Field(ge=1)]
    """Attempt of the answering trainer."""
    events: list[Event]
    """Events after the requested number."""


class BatchReady(Config):
    """Message: a packed batch is durable."""

    step: Annotated[int, Field(ge=1)]
    """Step of the batch."""
    path: str
    """Folder of the batch."""


class OrchestratorSaved(Config):
    """Message: the orchestrator's part of a checkpoint is durable."""

    step: Annotated[int, Field(ge=1)]
    """Step of the checkpoint."""
