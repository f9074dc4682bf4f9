"""Responses about runs: list, state with causes, curves, configurations, and comparisons.

The base class of all responses, and responses without a run, come first.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Answer(BaseModel):
    """Base class of all responses."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)


class Me(Answer):
    """User of the page."""

    user: str | None
    """Name of the user; None: this server has no login."""
    session: bool
    """Whether there is a session that can be closed; False: each request contains a token."""


class Problem(Answer):
    """Error response: the problem and a fix."""

    problem: str
    login: bool = False
    """Whether a login would solve the problem."""


class ProgressView(Answer):
    """Progress in the run's last report."""

    step: int | None
    total_steps: int | None
    policy_version: int | None
    reward: float | None
    loss: float | None
    tokens_per_second: float | None
    staleness_mean: float | None
    last_step_time: str | None
    eta_seconds: float | None
    checkpoint_step: int | None
    steps_lost: int


class RunRow(Answer):
    """A run in the list."""

    id: str
    name: str
    where: str
    task: str
    phase: str
    reason: str | None
    message: str | None
    attempt: int
    restarts: int
    progress: ProgressView
    started: str | None
    ended: str | None


class Refused(Answer):
    """Folder that looks like a run but is not shown."""

    id: str
    why: str


class RunList(Answer):
    """All runs."""

    nothing: str
    """Text for a list without runs."""
    runs: list[RunRow]
    refused: list[Refused]


class FindingView(Answer):
    """Cause with evidence and a suggested action."""

    what: str
    evidence: str
    do: str
    since: str | None
    kind: str


class Why(Answer):
    """Explanation of a run's state."""

    headline: str
    now: list[FindingView]
    before: list[FindingView]
    besides: list[str]
    steps: list[str]


class FailureView(Answer):
    """End of an attempt."""

    attempt: int
    role: str
    process: str
    exit_code: int | None
    reason: str
    message: str
    time: str | None


class AttemptView(Answer):
    """Attempt and its steps that are part of the result."""

    attempt: int
    first_step: int
    last_step: int


class UseView(Answer):
    """Seconds that were spent on one use."""

    use: str
    """Name from `rlrun.inspect.gpu_cost.USES`."""
    seconds: int


class CostView(Answer):
    """Seconds of the run's GPUs by use, or of the machine for a run without GPUs."""

    gpus: bool
    hours: float
    uses: list[UseView]


class WaitView(Answer):
    """Cause of the wait for the next step."""

    text: str
    role: str | None
    phase: str | None
    since: str | None


class ConditionView(Answer):
    """Condition of a run, as in `status.conditions`."""

    type: str
    status: str
    reason: str
    message: str
    since: str | None


class EventView(Answer):
    """Event about a run."""

    reason: str
    message: str
    warning: bool
    time: str | None
    count: int


class ProcessView(Answer):
    """Pod of a run."""

    name: str
    role: str
    attempt: int | None
    state: str
    ready: bool
    restarts: int
    node: str | None


class RunView(Answer):
    """One run."""

    run: RunRow
    place: Literal["folder", "cluster"]
    files: bool
    """Whether curves and rollouts can be read."""
    unread: list[str]
    """Unreadable parts, each with the cause and an alternative."""
    conditions: list[ConditionView]
    events: list[EventView]
    """Events, newest first."""
    processes: list[ProcessView]
    """Pods; empty for a run on one machine."""
    wait: WaitView | None
    heard_seconds: float | None
    command: str | None
    why: Why
    failures: list[FailureView]
    attempts: list[AttemptView]
    metrics: list[str]
    first_step: int | None
    last_step: int | None
    results: list[str]
    cost: CostView | None


class Change(Answer):
    """Changed field of a configuration."""

    field: str
    before: str
    after: str


class EditView(Answer):
    """Configuration change before an attempt."""

    attempt: int
    first_step: int
    started: str | None
    changes: list[Change]
    known: bool
    """Whether the changed fields are known; False: only the fact of a change is known."""


class History(Answer):
    """Changes of a run's configuration over its attempts."""

    said: str
    """Text that summarizes the edits."""
    edits: list[EditView]
    """Edits, newest first."""


class Origin(Answer):
    """Run and step from which a run was forked."""

    id: str | None
    """Id of the other run; None if it is not shown on this page."""
    run: str
    step: int
    attempt: int
    folder: str
    changes: list[Change]


class ForkView(Answer):
    """Run that was forked from the shown run."""

    id: str
    label: str
    step: int
    changes: list[Change]


class Lineage(Answer):
    """Origin of a run, and its forks among the shown runs."""

    origin: Origin | None
    forks: list[ForkView]


class Mark(Answer):
    """An outlier."""

    step: int
    value: float


class CurveView(Answer):
    """Points of a metric, in its unit."""

    metric: str
    title: str
    unit: str
    steps: list[int]
    values: list[float]
    window: int
    """Window of the mean in steps; 1: no mean."""
    mean_steps: list[int]
    means: list[float]
    measured: int
    """Number of points before thinning."""
    low: float
    """Lowest value of the axis without outliers."""
    high: float
    """Highest value of the axis without outliers."""
    outliers: int
    marks: list[Mark]
    """Largest outliers."""


class Curves(Answer):
    """Curves of a run."""

    curves: list[CurveView]


class Sparkline(Answer):
    """Small curve of a run in the list."""

    title: str
    """Title of the curve; empty if the run has no step, or its files are not readable here."""
    steps: list[int]
    values: list[float]
    last: float | None


class Part(Answer):
    """Part of the duration of steps."""

    name: str
    label: str
    waits: bool
    """Whether the trainer waits for other roles in this part."""
    seconds: list[float]
    """Mean seconds per step, for each span."""


class Timeline(Answer):
    """Activities and waits of the trainer over time."""

    first: list[int]
    last: list[int]
    """First and last step of each span."""
    parts: list[Part]
    high: float
    """Highest value of the axis without outliers, in seconds."""


class Staleness(Answer):
    """Sampled tokens of a step by the age of the policy that sampled them."""

    step: int
    lags: list[int]
    tokens: list[int]


class Manifest(Answer):
    """Resolved configuration."""

    text: str


class Difference(Answer):
    """A field whose values differ between runs."""

    field: str
    values: list[str]


class Mean(Answer):
    """Metric over the last tenth of the steps that all runs have."""

    metric: str
    means: list[float | None]


class Comparison(Answer):
    """Comparison of runs."""

    ids: list[str]
    labels: list[str]
    steps: int
    metrics: list[str]
    last_tenth: list[Mean]
    differences: list[Difference]
    unread: list[str]
    """Runs whose curves cannot be read, each with the cause."""
