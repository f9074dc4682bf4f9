"""Messages between trainer, orchestrator and engines: steps, and requests for a policy version.

Rank 0 of the trainer (server) and the orchestrator (client) use HTTP, guarded by the run's API key:

    GET  /rlrun/trainer/state                      -> TrainerState
    GET  /rlrun/trainer/events?after=N&wait=S      -> {"attempt": a, "events": [Event, ...]}   (long poll, at most S seconds)
    POST /rlrun/trainer/batches     BatchReady     a packed batch is durable
    POST /rlrun/trainer/checkpoints OrchestratorSaved   the orchestrator's part of a checkpoint is durable
    GET  /rlrun/trainer/ready                      -> 200 once the attempt has started, else 503; for probes, without the key
    POST /rlrun/trainer/shutdown                   the run is complete; rank 0 ends the group with exit code 0
    POST /rlrun/trainer/stop                       the orchestrator must stop: the group saves the last finished step, and ends too

Messages only announce changes; after a restart the files are authoritative. Events are numbered from 1 within an attempt and kept in
memory until the orchestrator, which lives as long as the attempt, requests later ones. A run in another run's trainer has the same routes
below `shared_trainer_files.channel_of(run)`.

An engine requests a policy version without the volume from rank 0: `POST /rlrun/trainer/transfers`. The answer announces the transfer and
how to join it. Then every root, a trainer rank with a part of the version, broadcasts its buckets in their published order, in one group
of that root and all engines that requested the version together (NCCL between GPUs, gloo between CPUs). Groups are reused for later
versions while the same engines request them. If a group breaks, all of its engines discard the version and keep serving their old one.
Each of them then sends its next requests with `alone`, until a transfer succeeds, so that a hanging or dead engine delays the others only
once.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from rlrun.config.base import Config
from rlrun.protocol.files.volume_faults import StorageReason, Trouble
from rlrun.protocol.messages.buckets import Bucket, TensorInfo, plan_buckets, version_checksum

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


TRANSFERS = "/rlrun/trainer/transfers"
Backend = Literal["nccl", "gloo"]
SECONDS = 60.0
"""Maximum seconds that a group waits for its members, and for one bucket."""


class NotHeldError(Exception):
    """The version is not in the trainer's memory, or no longer."""


class TransferRequest(Config):
    """Request of an engine."""

    version: Annotated[int, Field(ge=0)]
    """Requested policy version."""
    engine: Annotated[str, Field(min_length=1, max_length=128)]
    """Unique name of the engine's process."""
    session: str | None = None
    """Session of the groups that the engine has joined, or None."""
    alone: bool = False
    """Whether the engine's last transfer failed: it gets its own groups until a transfer succeeds."""
    base: int | None = None
    """Checksum of the version in the engine's shared memory; None: it has none, and needs complete versions."""


class Joining(Config):
    """Parameters to join the groups of a session: one per root, which is rank 0 of it."""

    backend: Backend
    """Backend of the groups."""
    store_port: Annotated[int, Field(ge=1, le=65535)]
    """Port of the store at the trainer's address where members meet."""
    members: list[str]
    """Engines by name; the first is rank 1 in every group."""


class Difference(Config):
    """Announcement that buckets are sent as differences from a version that all engines of the round have."""

    base: int
    """Checksum of that version."""
    sizes: list[int]
    """Sent bytes per bucket, in order: the size of its difference (`sparse`); 0: unchanged; the bucket's size: complete."""


class TransferOffer(Config):
    """Announcement of the next transfer."""

    version: int
    """Requested policy version."""
    session: str
    """Session of the groups."""
    joining: Joining | None = None
    """Parameters of new groups; None: the engine's groups are still valid."""
    tensors: list[TensorInfo]
    """Tensors in their published order; with the next two fields they determine the buckets."""
    bucket_bytes: Annotated[int, Field(ge=1)]
    """Maximum size of one bucket, see `plan_buckets`."""
    roots: Annotated[int, Field(ge=1)]
    """Number of roots."""
    checksums: list[int]
    """CRC-32 of each bucket, in order."""
    difference: Difference | None = None
    """Sizes of differences; None: all buckets are sent completely."""

    @property
    def size(self) -> int:
        """Bytes of the version."""
        return sum(tensor.size for tensor in self.tensors)

    @property
    def sent(self) -> int:
        """Number of sent bytes."""
        return self.size if self.difference is None else sum(self.difference.sizes)

    def buckets(self) -> list[Bucket]:
        """Return the buckets of the transfer."""
        return plan_buckets(self.tensors, bucket_bytes=self.bucket_bytes, roots=self.roots)

    def about(self) -> str:
        """Return size and checksum as text, identical in the logs of both sides."""
        about = f"{self.size / 2**30:.2f} GiB in {len(self.checksums)} buckets, checksum {version_checksum(self.checksums):08x}"
        if self.difference is None:
            return about
        return f"{about}; sent as {self.sent} of {self.size} bytes, the difference from {self.difference.base:08x}"


def group_name(session: str, root: int) -> str:
    """Return the name of one root's group in the store, identical for all of its members."""
    return f"transfer/{session}/{root}"
