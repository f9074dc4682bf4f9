"""Input and output of `decide`: plain values, so that each test case is one row of a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlrun.defaults.team_defaults import TeamDefaults as TeamDefaults
from rlrun.runtime.json_types import Json as Json
from rlrun.runtime.json_types import Manifest as Manifest
from rlrun.runtime.printable import escape_controls
from rlrun_operator.names import Ref


@dataclass(frozen=True)
class Grow:
    """Enlarge a claim. A refusal stops all other writes; it comes back as `Observed.growth_refusal`, and the run is decided again."""

    claim: str
    """Name of the claim."""
    uid: str
    """Precondition: UID of the claim; a successor of the same name must not change."""
    version: str | None
    """Precondition: resourceVersion in the cache; a user may have increased the size further."""
    size: str

    @property
    def target(self) -> tuple[str, str]:
        """UID of the claim, and its new size."""
        return self.uid, self.size


@dataclass(frozen=True)
class Disown:
    """Remove the run from the owners of its claim, so that the claim outlives it. A claim that has changed or is gone is left alone."""

    claim: str
    """Name of the claim."""
    uid: str
    """Precondition: UID of the claim; a successor of the same name must not change."""
    version: str | None
    """Precondition: resourceVersion in the cache; the owners may have changed since."""
    owners: tuple[Manifest, ...]
    """Owner references that stay."""


MADE = "be created"
RefusalKind = Literal["not-admitted", "invalid", "name-taken", "key-lost", "not-grown"]
"""Reason why a write was not made:

- not-admitted: a quota or another admission check refuses it, or the operator lacks the permission.
- invalid: the API server refuses a child because of the specification (dry run, quota or admission).
- name-taken: a foreign object has the name of a child.
- key-lost: the Secret with the run's API key was deleted.
- not-grown: the API server does not enlarge the claim.
"""


@dataclass(frozen=True)
class Refusal:
    """A write that was not made, with the reason."""

    ref: Ref
    text: str
    """Message of the API server; for invalid: the invalid fields of the specification."""
    doing: str = MADE
    """Description of the write, as in "cannot be scaled to 2"."""
    quota: bool = False
    """Whether a ResourceQuota is exhausted; a dry-run does not detect that."""
    kind: RefusalKind = "not-admitted"
    grow: Grow | None = None
    """The refused growth of a not-grown refusal."""


@dataclass(frozen=True)
class Placed:
    """Fields that a queue adds to the pods of one role."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Manifest, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    scheduling_gates: tuple[str, ...] = ()
    """Names of the scheduling gates that the queue's controller removes."""
    scheduler: str = ""
    """Scheduler of the pods; empty: the run's own choice."""


@dataclass(frozen=True)
class Admission:
    """Answer of the queue for one run: of the operator's own queue, or of an external one."""

    admitted: bool
    """Whether the run's pods may be created."""
    reason: str
    """Reason of the condition Admitted."""
    message: str
    stops: bool = False
    """Whether the run must release its resources."""
    lapsed: bool = False
    """Whether a recorded admission is void because the run has no pods: its next attempt waits again."""
    position: int | None = None
    """Position in the queue, from 1; None: it does not wait there."""
    waiting: int = 0
    """Number of waiting runs."""
    room: int | None = None
    """Number of trainer pods that an elastic run may have now; None: unknown to the queue."""
    placed: Mapping[str, Placed] = field(default_factory=dict)
    """Additions to the pods of each role, and to the spot engines (`SPOT_SET`), while the run is admitted."""
    conflict: str = ""
    """Explanation of contradictory additions; empty if there are none."""
    refused: tuple[Refusal, ...] = ()
    """Refused writes of the run's Workload or PodGroup."""


@dataclass(frozen=True)
class Observed:
    """Observed state of one run, from the API server."""

    run: Manifest
    """The RLRun."""
    children: Mapping[Ref, Manifest]
    """StatefulSet, Deployment and PersistentVolumeClaim (also one that `storage.claimName` names), from the watches."""
    pods: tuple[Manifest, ...]
    """All pods with the run's label, including terminating ones."""
    lease: Manifest | None
    """The progress Lease."""
    lease_changed_at: float | None
    """Last time at which this operator saw the Lease's renewal change, in seconds since the epoch; other clocks are not compared."""
    lease_moved_at: float | None = None
    """Last time at which it saw a new attempt, step or activity there; None: unknown, so that nothing counts as late."""
    watching_since: float | None = None
    """Time since which it has watched the cluster without a break; None: unknown."""
    gone: tuple[Manifest, ...] = ()
    """Last observed state of deleted trainer and orchestrator pods of the newest attempt, and of the last spot engines. Only deletions that
    this operator watched."""
    events: tuple[Manifest, ...] = ()
    """Recent Warning events about the children; looked up only while a condition waits."""
    nodes: tuple[Manifest, ...] | None = None
    """Nodes of the cluster; None: the operator may not read them, or did not look them up."""
    refusals: tuple[Refusal, ...] = ()
    """Refused writes of earlier passes that are still valid. Refused creations are among `events` too."""
    access: str | None = None
    """Hash of the API server's addresses in the policy that this process last applied for the run."""
    host: Manifest | None = None
    """The RLRun that `trainer.sharedWith` names, if it exists."""
    parts: Mapping[Ref, Manifest] = field(default_factory=dict)
    """Metadata of Services, policies, ConfigMap, account, rights and budget. `held`: fields that the operator's applies own
    (`managed_fields.held_fields`); `accepted`: the same after this process's last apply, or None if it has not applied the object."""
    repaired_ago: float = float("inf")
    """Seconds since this process last requested the repair of one of `parts`."""
    admission: Admission | None = None
    """Answer of the queue; None: this operator has no queue, and every attempt may start."""
    defaults: TeamDefaults | None = None
    """Defaults of the run's namespace, or None."""
    guests: tuple[Manifest, ...] = ()
    """RLRuns whose `trainer.sharedWith` names this run; for a guest: all guests of its host, including itself."""

    @property
    def rejection(self) -> str | None:
        """Invalid fields of the specification, according to the API server; None if it has not refused a child."""
        return next((each.text for each in self.refusals if each.kind == "invalid"), None)

    @property
    def taken(self) -> str | None:
        """Kind and name of a foreign object that has the name of a child."""
        return next((f"{each.ref.kind} {each.ref.name}" for each in self.refusals if each.kind == "name-taken"), None)

    @property
    def lost_key(self) -> str | None:
        """Name of a Secret with the run's API key that this process has found deleted."""
        return next((each.ref.name for each in self.refusals if each.kind == "key-lost"), None)

    @property
    def growth_refusal(self) -> Refusal | None:
        """Refused growth of the claim, until the operator tries it again."""
        return next((each for each in self.refusals if each.kind == "not-grown"), None)

    @property
    def refused(self) -> tuple[Refusal, ...]:
        """Writes that were not admitted at the last attempt to make them."""
        return tuple(each for each in self.refusals if each.kind == "not-admitted")


@dataclass(frozen=True)
class CheckSecret:
    """Check whether a Secret exists, by a create with dryRun=All, which needs no permission to read Secrets.

    If it does not exist, no other write is made, and its name comes back as `Observed.lost_key`. If admission refuses the dry run, the
    answer is unknown.
    """

    manifest: Manifest


@dataclass(frozen=True)
class DryRun:
    """Server-side apply with dryRun=All.

    An invalid specification stops all other writes and comes back as `Observed.rejection`. If admission refuses a dry run, nothing is
    created or applied.
    """

    manifest: Manifest


@dataclass(frozen=True)
class Create:
    """Create one object (claim, Secret, Lease); an existing one is not changed."""

    manifest: Manifest


@dataclass(frozen=True)
class Apply:
    """Server-side apply of one object."""

    manifest: Manifest
    expect_absent: bool = False
    """Whether the object is absent in the cache. An existing object is left alone, because the cache may lag."""
    replaces: str | None = None
    """resourceVersion of the cached object. An object with any other version is left alone, because the cache may lag."""
    known: str | None = None
    """resourceVersion of the cached object; None: the cache has none. An object with another version is read first, to check that it
    belongs to the run; then it is replaced."""
    repairs: bool = False
    """Whether this restores a part of a running attempt that was deleted or edited. No other write depends on it."""


@dataclass(frozen=True)
class Scale:
    """Set only the replicas of a StatefulSet or Deployment."""

    ref: Ref
    uid: str
    """Precondition: UID of the object; a successor of the same name must not change."""
    replicas: int


@dataclass(frozen=True)
class Annotate:
    """Set annotations of an object and nothing else. An object that is gone is left out."""

    ref: Ref
    uid: str
    """Precondition: UID of the object; a successor of the same name must not change."""
    annotations: Mapping[str, str]


@dataclass(frozen=True)
class Delete:
    """Delete one object, in the background."""

    ref: Ref
    uid: str
    """Precondition: UID of the object; a successor of the same name must not be deleted."""
    grace_seconds: int | None = None
    """Grace period; None: the pod's own."""


Write = Grow | CheckSecret | DryRun | Create | Apply | Annotate | Scale | Delete | Disown
_ORDER: tuple[type[Write], ...] = (Grow, CheckSecret, DryRun, Create, Apply, Annotate, Scale, Delete, Disown)


def in_order(writes: Iterable[Write]) -> tuple[Write, ...]:
    """Return the writes in the order in which they are made; writes of one type keep their order.

    The checks come first, because they may stop everything else. Objects that pods mount (`Create`) precede the other children. The order
    of the applies is the caller's: an attempt's parts, then its workloads. Repairs come last, because nothing depends on them.
    """

    def rank(write: Write) -> int:
        return len(_ORDER) if isinstance(write, Apply) and write.repairs else _ORDER.index(type(write))

    return tuple(sorted(writes, key=rank))


@dataclass(frozen=True)
class EventRecord:
    """Event to post on the run."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", escape_controls(self.message, lines=True))


Fact = Literal["events", "nodes"]
"""Unwatched facts that the operator looks up when a decision requests them."""
Urgency = Literal["now", "soon", "progress"]
"""Maximum delay of a status write, to combine it with later changes: none, SOON_SECONDS, or `progress_seconds`."""
SOON_SECONDS = 2.0
PROGRESS_SECONDS = 15.0
LONGEST_PROGRESS_SECONDS = 60.0
FEW_RUNS = 50
YOUNG_SECONDS = 300.0


def progress_seconds(age: float, runs: int) -> float:
    """Return the seconds between two status writes that only report progress: 15, more for an old run or many runs, at most 60.

    Args:
        age: age of the run, in seconds.
        runs: number of runs that this operator serves.
    """
    share = max(1.0, age / YOUNG_SECONDS, runs / FEW_RUNS)
    return min(PROGRESS_SECONDS * share, LONGEST_PROGRESS_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Actions:
    """Part of a decision in addition to status and events; each field as in `Decision`."""

    writes: Sequence[Write] = ()
    """In any order."""
    wake_in: float | None = None
    look_up: frozenset[Fact] = frozenset()


NO_ACTIONS = Actions()
AT_ONCE = Actions(wake_in=0.0)
"""Only another pass: it acts on the status that this pass records."""


@dataclass(frozen=True)
class Decision:
    """Next status, writes and events of a run. The writes are made first, then the status is written, then the events are posted."""

    status: Manifest
    """The complete new status, camelCase, without nulls; written if it differs."""
    urgency: Urgency = "now"
    writes: tuple[Write, ...] = ()
    """In the order of `in_order`. A refused write stops only the writes that depend on it."""
    events: tuple[EventRecord, ...] = ()
    """Events, posted after the status is written, so that a retry does not repeat them."""
    wake_in: float | None = None
    """Seconds after which the run gets another pass even without a change."""
    look_up: frozenset[Fact] = field(default_factory=frozenset)
    """Facts that would explain a wait better; the next observation should contain them."""
