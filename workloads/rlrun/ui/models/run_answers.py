"""Answers on runs: their list, their state and its causes, their curves and configurations, and several beside each other."""

from __future__ import annotations

from typing import Literal

from rlrun.ui.models.answer import Answer


class ProgressView(Answer):
    """Progress as a run reported it last."""

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
    """A folder that looks like a run and is not shown."""

    id: str
    why: str


class RunList(Answer):
    """All runs."""

    nothing: str
    """In words, where no run is to be shown."""
    runs: list[RunRow]
    refused: list[Refused]


class FindingView(Answer):
    """A cause, its evidence and what to do."""

    what: str
    evidence: str
    do: str
    since: str | None
    kind: str


class Why(Answer):
    """Why a run does what it does."""

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
    """An attempt and the steps of it that count."""

    attempt: int
    first_step: int
    last_step: int


class UseView(Answer):
    """Time that was spent on one thing."""

    use: str
    """As in `rlrun.inspect.cost.account.USES`."""
    seconds: int


class CostView(Answer):
    """Time of the run's GPUs, or of the machine where it has none, by use."""

    gpus: bool
    hours: float
    uses: list[UseView]


class WaitView(Answer):
    """Cause of the next step's wait."""

    text: str
    role: str | None
    phase: str | None
    since: str | None


class ConditionView(Answer):
    """One aspect of a run's state, as in `status.conditions`."""

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
    """True if curves and rollouts can be read."""
    unread: list[str]
    """Parts that cannot be read, each with the cause and another way."""
    conditions: list[ConditionView]
    events: list[EventView]
    """Newest first."""
    processes: list[ProcessView]
    """Pods; none of a run on one machine."""
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
    """A field of a configuration that changed."""

    field: str
    before: str
    after: str


class EditView(Answer):
    """Change of the configuration with which an attempt began."""

    attempt: int
    first_step: int
    started: str | None
    changes: list[Change]
    known: bool
    """False: it is known that something changed, and not what."""


class History(Answer):
    """Changes of a run's configuration over its attempts."""

    said: str
    """In words, whether it was ever edited."""
    edits: list[EditView]
    """Newest first."""


class Origin(Answer):
    """The run and step that a run was forked from."""

    id: str | None
    """Of the other run; None: it is none of those that are shown."""
    run: str
    step: int
    attempt: int
    folder: str
    changes: list[Change]


class ForkView(Answer):
    """A run that was forked from the one that is shown."""

    id: str
    label: str
    step: int
    changes: list[Change]


class Lineage(Answer):
    """Origin of a run, and its forks among the runs that are shown."""

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
    """Steps of the mean; 1: there is no mean."""
    mean_steps: list[int]
    means: list[float]
    measured: int
    """Points before they were thinned."""
    low: float
    """Lowest value of a scale without outliers."""
    high: float
    """Highest value of a scale without outliers."""
    outliers: int
    marks: list[Mark]
    """The largest outliers."""


class Curves(Answer):
    """Curves of a run."""

    curves: list[CurveView]


class Sparkline(Answer):
    """Small curve of a run in the list."""

    title: str
    """Empty: the run has no step, or its files are not read here."""
    steps: list[int]
    values: list[float]
    last: float | None


class Part(Answer):
    """A part of the time of steps."""

    name: str
    label: str
    waits: bool
    """True if the trainer waits for others in it."""
    seconds: list[float]
    """Mean per step, for each span."""


class Timeline(Answer):
    """Activities of the trainer over time, and its waits."""

    first: list[int]
    last: list[int]
    """First and last step of each span."""
    parts: list[Part]
    high: float
    """Highest value of a scale without outliers, in seconds."""


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
    """A metric over the last tenth of the steps that all runs have."""

    metric: str
    means: list[float | None]


class Comparison(Answer):
    """Runs beside each other."""

    ids: list[str]
    labels: list[str]
    steps: int
    metrics: list[str]
    last_tenth: list[Mean]
    differences: list[Difference]
    unread: list[str]
    """Runs whose curves cannot be read, each with the cause."""
