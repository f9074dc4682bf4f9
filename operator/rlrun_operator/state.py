"""Input and output of `decide`: values only, so that every case is a table row in a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlrun.defaults.team import TeamDefaults as TeamDefaults
from rlrun.runtime.json_types import Json as Json
from rlrun.runtime.json_types import Manifest as Manifest
from rlrun.runtime.printable import printable
from rlrun_operator.names import Ref


@dataclass(frozen=True)
class Grow:
    """Raise what a claim asks for."""

    claim: str
    """Name of the claim."""
    uid: str
    """Precondition: a successor of the same name is not meant."""
    version: str | None
    """Precondition: resourceVersion of the one that the cache knows; a user may have raised it further."""
    size: str


@dataclass(frozen=True)
class Disown:
    """Remove the run from the owners of its claim, so that the claim outlives it."""

    claim: str
    """Name of the claim."""
    uid: str
    """Precondition: a successor of the same name is not meant."""
    version: str | None
    """Precondition: resourceVersion of the one that the cache knows; its owners may have changed since."""
    owners: tuple[Manifest, ...]
    """Owner references that stay."""


@dataclass(frozen=True)
class Ungrown:
    """A growth that the API server refused, and its words."""

    grow: Grow
    text: str


MADE = "be made"


@dataclass(frozen=True)
class Refusal:
    """A write to one object that admission does not let in, or for which the operator lacks the right."""

    ref: Ref
    text: str
    """Words of the API server."""
    doing: str = MADE
    """The write, as in "cannot be scaled to 2"."""
    quota: bool = False
    """A ResourceQuota leaves no room; a dry-run says nothing about that."""


@dataclass(frozen=True)
class Placed:
    """Additions of a queue to the pods of one role."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Manifest, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    scheduling_gates: tuple[str, ...] = ()
    """Names of gates that the queue's controller removes."""
    scheduler: str = ""
    """Scheduler of the pods; empty: the run's own choice."""


@dataclass(frozen=True)
class Admission:
    """Answer of the queue for one run: of the operator's own, or of one that it obeys."""

    admitted: bool
    """Its pods may be made."""
    reason: str
    """Reason of the condition Admitted."""
    message: str
    stops: bool = False
    """It has to give back the room that it has."""
    lapsed: bool = False
    """True if an admission on record holds no more, as the run has no pods: its next attempt waits once more."""
    position: int | None = None
    """Place in the queue, from 1; None: it does not wait there."""
    waiting: int = 0
    """Number of runs that wait."""
    room: int | None = None
    """Number of trainer pods that an elastic run may have now; None: the queue does not know."""
    placed: Mapping[str, Placed] = field(default_factory=dict)
    """Additions to the pods of each role, and to the spot engines (`SPOT_SET`), while the run is admitted."""
    conflict: str = ""
    """Reason why the additions contradict each other."""
    refused: tuple[Refusal, ...] = ()
    """Writes to the run's object in a queue of others that are not let in."""


@dataclass(frozen=True)
class Observed:
    """Observed state of one run, from the API server."""

    run: Manifest
    """The RLRun."""
    children: Mapping[Ref, Manifest]
    """Its StatefulSet, Deployment and PersistentVolumeClaim (also one that `storage.claimName` names), from the watches."""
    pods: tuple[Manifest, ...]
    """All pods that carry its label, ending ones included."""
    lease: Manifest | None
    """The progress Lease."""
    lease_changed_at: float | None
    """Time at which this operator saw the Lease's renewal change last, in seconds since the epoch; clocks of others are not compared."""
    lease_moved_at: float | None = None
    """Time at which it saw a new attempt, step or activity there last; None: not known, so that nothing is late."""
    watching_since: float | None = None
    """Time since which it has seen the cluster without a break; None: not known."""
    gone: tuple[Manifest, ...] = ()
    """Trainer and orchestrator pods of its newest attempt that were deleted while this operator watched, and the last spot engines, as they
    were seen last."""
    events: tuple[Manifest, ...] = ()
    """Recent Warning events about its children; looked up only while something waits."""
    nodes: tuple[Manifest, ...] | None = None
    """The cluster's nodes; None: not allowed to read them, or not looked up."""
    rejection: str | None = None
    """Reason why the API server refused this spec's children (dry-run, quota or admission); None: it did not."""
    taken: str | None = None
    """A foreign object under the name of a child, as it was found a moment ago."""
    access: str | None = None
    """Mark of the way to the API server that this process applied the run's policy with last."""
    ungrown: Ungrown | None = None
    """A growth of its claim that was refused, until it is tried again."""
    refused: tuple[Refusal, ...] = ()
    """Writes that the last try was not let in with; those of objects that were to be made are among `events` too."""
    host: Manifest | None = None
    """The RLRun that `trainer.sharedWith` names, if there is one."""
    parts: Mapping[Ref, Manifest] = field(default_factory=dict)
    """Its Services, policies, ConfigMap, account, rights and budget, by their metadata: `held` is what the operator's applies hold of one
    (`managed_fields.held_fields`), `accepted` what they held after this process's last one; None: it has applied none."""
    lost_key: str | None = None
    """Name of a Secret with the run's API key that this process has found deleted."""
    repaired_ago: float = float("inf")
    """Seconds since this process last asked for one of them to be put right."""
    admission: Admission | None = None
    """Answer of the queue; None: this operator has none, and every attempt may begin."""
    defaults: TeamDefaults | None = None
    """Defaults of the run's namespace; None: there are none."""
    guests: tuple[Manifest, ...] = ()
    """The RLRuns whose `trainer.sharedWith` names this run; for a guest: those that name its host, itself included."""


@dataclass(frozen=True)
class Apply:
    """Server-side apply of one object."""

    manifest: Manifest
    expect_absent: bool = False
    """The cache says that it does not exist; one that exists is left alone: the cache may lag."""
    replaces: str | None = None
    """resourceVersion of the one that the cache knows; any other is left alone, likewise."""
    known: str | None = None
    """resourceVersion of the one that the cache knows; None: it knows none. Where it is another one, the object is looked at before, to
    see that it is the run's own; it is then applied over."""


@dataclass(frozen=True)
class Scale:
    """Set the replicas of a StatefulSet or Deployment and nothing else."""

    ref: Ref
    uid: str
    """Precondition: a successor of the same name is not meant."""
    replicas: int


@dataclass(frozen=True)
class Annotate:
    """Set annotations of an object and nothing else."""

    ref: Ref
    uid: str
    """Precondition: a successor of the same name is not meant."""
    annotations: Mapping[str, str]


@dataclass(frozen=True)
class Delete:
    """Delete one object, in the background."""

    ref: Ref
    uid: str
    """Precondition: a successor of the same name is not meant."""
    grace_seconds: int | None = None
    """None: the pod's own."""


@dataclass(frozen=True)
class EventRecord:
    """An event to post on the run."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", printable(self.message, lines=True))


Fact = Literal["events", "nodes"]
"""Facts that are not watched, and looked up when a decision asks for them."""
Urgency = Literal["now", "soon", "progress"]
"""Longest wait of a status to be written together with later changes: not at all, SOON_SECONDS, `progress_seconds`."""
SOON_SECONDS = 2.0
PROGRESS_SECONDS = 15.0
LONGEST_PROGRESS_SECONDS = 60.0
FEW_RUNS = 50
YOUNG_SECONDS = 300.0


def progress_seconds(age: float, runs: int) -> float:
    """Time between two statuses of a run that report progress alone: 15 s, in proportion more of an old run or one of many, 60 at most.

    Args:
        age: of the run, in seconds.
        runs: that this operator looks after.
    """
    share = max(1.0, age / YOUNG_SECONDS, runs / FEW_RUNS)
    return min(PROGRESS_SECONDS * share, LONGEST_PROGRESS_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Actions:
    """Part of a decision beside status and events; each field as in `Decision`."""

    dry_run: Sequence[Manifest] = ()
    create: Sequence[Manifest] = ()
    apply: Sequence[Apply] = ()
    annotate: Sequence[Annotate] = ()
    scale: Sequence[Scale] = ()
    delete: Sequence[Delete] = ()
    repair: Sequence[Apply] = ()
    wake_in: float | None = None
    look_up: frozenset[Fact] = frozenset()


NO_ACTIONS = Actions()
AT_ONCE = Actions(wake_in=0.0)
"""Nothing but another pass: it acts on what this one puts on record."""


@dataclass(frozen=True)
class Decision:
    """Actions, in this order: grow, ask, dry-run, create, apply, annotate, scale, delete, disown, repair, status, events."""

    status: Manifest
    """The whole new status, camelCase, without nulls; written if it differs."""
    urgency: Urgency = "now"
    ask: Manifest | None = None
    """A Secret that should be there, asked for by a POST with dryRun=All, which needs no right to read one. Where it is not there, nothing
    else is done, and its name comes back as `Observed.lost_key`. Where admission refuses the question, that is unknown."""
    dry_run: tuple[Manifest, ...] = ()
    """Apply these server-side with dryRun=All first. What the specification has wrong stops everything else and comes back as
    `Observed.rejection`; where admission refuses one, nothing is created or applied."""
    create: tuple[Manifest, ...] = ()
    """POST; one that exists is left as it is (claim, Secret, Lease)."""
    apply: tuple[Apply, ...] = ()
    annotate: tuple[Annotate, ...] = ()
    """An object that is gone is left out."""
    scale: tuple[Scale, ...] = ()
    delete: tuple[Delete, ...] = ()
    disown: Disown | None = None
    """A claim that has changed since, or is gone, is left alone."""
    repair: tuple[Apply, ...] = ()
    """Parts of a running attempt that were deleted or edited. Nothing waits for them: one that is refused is tried again."""
    grow: Grow | None = None
    """A refusal stops nothing else, and comes back as `Observed.ungrown`."""
    events: tuple[EventRecord, ...] = ()
    """Posted after the status is written, so that a retry does not repeat them."""
    wake_in: float | None = None
    """Look again after this many seconds even if nothing happens."""
    look_up: frozenset[Fact] = field(default_factory=frozenset)
    """Facts that would explain a wait better; the next observation should hold them."""
