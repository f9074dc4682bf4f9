"""Curves for the page: title and unit of each metric, an axis that outliers do not flatten, a moving mean."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlrun.inspect.curves import Line, smooth_values, thin_curve
from rlrun.ui import run_answers
from rlrun.ui.steps import StepIndex

_GIB = 2.0**30
_UNITS: tuple[tuple[str, str, str, float], ...] = (
    (r"reward/mean", "Reward", "reward", 1),
    (r"reward/std", "Reward, standard deviation", "reward", 1),
    (r"reward/(.+)/mean", "Reward, {}", "reward", 1),
    (r"eval/(.+)/reward/mean", "Held-out reward, {}", "reward", 1),
    (r"eval/(.+)/reward/mean_all", "Held-out reward with 0 for missing answers, {}", "reward", 1),
    (r"eval/(.+)/(pass@\d+)", "Held-out {1}, {0}", "% of tasks", 100),
    (r"eval/(.+)/(answers|errors|timeouts)", "Held-out {1}, {0}", "answers", 1),
    (r"validation/loss", "Validation loss", "nats/token", 1),
    (r"(?:objective/(.+)/)?loss", "Loss", "loss", 1),
    (r"(?:objective/(.+)/)?entropy", "Entropy of the policy", "nats/token", 1),
    (r"(?:objective/(.+)/)?mismatch_kl", "Mismatch of trainer and engines (KL)", "nats/token", 1),
    (r"(?:objective/(.+)/)?mismatch_kl/q\d", "", "nats/token", 1),
    (r"mismatch_kl_max", "Mismatch of trainer and engines (KL), largest", "nats", 1),
    (r"reference_kl|kl", "KL to the reference", "nats/token", 1),
    (r"kl_reward", "KL in the reward", "reward", 1),
    (r"kl_penalty|entropy_bonus|value_loss", "", "loss", 1),
    (r"grad_norm", "Gradient norm before clipping", "L2 norm", 1),
    (r"critic_grad_norm", "Gradient norm of the critic", "L2 norm", 1),
    (r"(?:critic_)?lr", "Learning rate", "rate", 1),
    (r"off_policy/mean|staleness/mean", "Age of the sampled tokens", "versions", 1),
    (r"off_policy/max", "Age of the oldest sampled token", "versions", 1),
    (r"completion_length/mean", "Length of answers, mean", "tokens", 1),
    (r"completion_length/max", "Length of the longest answer", "tokens", 1),
    (r"removed/(.+)/completion_length/mean", "Length of removed answers ({})", "tokens", 1),
    (r"perf/throughput", "Trained tokens per second", "tokens/s", 1),
    (r"perf/mfu", "Peak FLOP/s of the GPUs that the trainer uses", "%", 100),
    (r"perf/peak_memory", "Peak memory of a trainer GPU", "GiB", 1 / _GIB),
    (r"weights/(?:sent_)?bytes", "", "GiB", 1 / _GIB),
    (r"environment/.+/memory_gib", "", "GiB", 1),
    (r"environment/.+/restarts", "", "restarts", 1),
    (r"time/step", "Duration of a step", "s", 1),
    (r"time/.+|.+_seconds|.+/lost_seconds_longest", "", "s", 1),
    (r"batch/(?:solve_all|solve_none)", "", "% of groups", 100),
    (r"batch/(?:repetition|gibberish|masked|truncated)", "", "% of rollouts", 100),
    (r"(?:objective/(.+)/)?(?:clip_fraction|dropped_fraction|corrected_fraction|value_clip_fraction)", "", "% of tokens", 100),
    (r"ratio|ratio_max|correction_weight", "", "ratio", 1),
    (r"routing/replayed_share", "", "% of tokens", 100),
    (r"routing/changed_share", "", "% of replayed tokens", 100),
    (r"routing/max_violation", "", "of the mean load", 1),
    (r"routing/aux_loss", "", "loss", 1),
    (r"explained_variance", "Explained variance of the critic", "1 is perfect", 1),
    (r"value_mean|return_mean", "", "reward", 1),
    (r"(?:batch/)?(?:loss_)?tokens|objective/.+/loss_tokens", "", "tokens", 1),
    (r"sequences|batch/samples", "", "sequences", 1),
    (r"groups/.+|batch/groups", "", "groups", 1),
    (r"rollouts/.+|batch/(?:.+/)?rollouts|removed/.+/rollouts|errors", "", "rollouts", 1),
    (r"pools/.+|unplayable/.+", "", "tasks", 1),
    (r"engines/(?:waiting|limit|moved_requests)", "", "requests", 1),
    (r"engines/.+", "", "engines", 1),
    (r"skipped_steps|critic_skipped|furthest_step", "", "steps", 1),
    (r"env/(.+)/([^/]+)", "{1}, {0}", "mean of the rollouts", 1),
)  # fmt: skip
"""Metrics by name: title (empty: the name; with groups of the pattern), unit, and factor from the metric to the unit."""
_UNKNOWN = "value"
_HELD_OUT = ("eval/", "validation/")
_SIGNIFICANT = 6
"""Significant digits in responses; more are not visible in a plot."""
_LEAST = 8
"""Number of values below which no value is an outlier."""
_FEW = 0.05
"""Maximum fraction of values that can be outliers."""
_NEWEST = 3
"""Number of newest values that are never all outliers, so that a diverging run is visible."""
_OUTLIERS_SENT = 20
_WINDOW_MAX = 25
_SPARK_POINTS = 60


@dataclass(frozen=True)
class MetricUnit:
    """Title and unit of a metric; value times `factor` is in this unit."""

    title: str
    unit: str
    factor: float = 1.0


def unit_of(metric: str) -> MetricUnit:
    """Return title and unit of a metric."""
    for pattern, title, unit, factor in _UNITS:
        if (found := re.fullmatch(pattern, metric)) is not None:
            groups = [group for group in found.groups() if group is not None]
            named = title.format(*groups)
            if groups and "{" not in title and title:
                named = f"{title}, {groups[0]}"
            return MetricUnit(named or metric, unit, factor)
    return MetricUnit(metric, _UNKNOWN)


@dataclass(frozen=True)
class Scale:
    """Lowest and highest value of an axis."""

    low: float
    high: float

    def contains_value(self, value: float) -> bool:
        """Return whether a value is on the axis."""
        return self.low <= value <= self.high


def scale_of(values: Sequence[float]) -> Scale:
    """Return an axis that a few outliers do not flatten.

    An outlier is further from the central 95 % of the values than their spread. Without outliers the axis contains all values.

    Args:
        values: at least one value, in the order of steps.
    """
    whole, few = Scale(min(values), max(values)), max(1, int(len(values) * _FEW))
    if len(values) < _LEAST:
        return whole
    ordered = sorted(values)
    core = Scale(ordered[few], ordered[-1 - few])
    spread = core.high - core.low
    reach = Scale(core.low - spread, core.high + spread)
    kept = [value for value in ordered if reach.contains_value(value)]
    # A constant has no spread: every other value would be an outlier.
    if (
        spread <= 0
        or len(ordered) - len(kept) > few
        or not any(reach.contains_value(value) for value in values[-_NEWEST:])
    ):
        return whole
    return Scale(kept[0], kept[-1])


def window_of(count: int, smooth: int) -> int:
    """Return the window of the moving mean in steps. `smooth` 0: a twentieth of the steps, at most 25."""
    return smooth or min(_WINDOW_MAX, max(1, count // 20))


def draw_curves(
    index: StepIndex, metrics: Sequence[str], *, first: int | None, last: int | None, smooth: int, points: int
) -> run_answers.Curves:
    """Return curves for drawing.

    Args:
        index: metrics of the run.
        metrics: names of the curves.
        first: first step; None: no lower bound.
        last: last step; None: no upper bound.
        smooth: window of the mean in steps; 1: no mean, 0: depends on the number of steps. Held-out values are not smoothed.
        points: maximum number of points of a curve.
    """
    found = [_draw_curve(index.metric_line(metric, first, last), smooth, points) for metric in metrics]
    return run_answers.Curves(curves=found)


def _draw_curve(line: Line, smooth: int, points: int) -> run_answers.CurveView:
    known = unit_of(line.label)
    values = [value * known.factor for value in line.values]
    scale = scale_of(values) if values else Scale(0.0, 0.0)
    window = 1 if line.label.startswith(_HELD_OUT) else window_of(len(values), smooth)
    drawn = thin_curve(Line(line.label, line.steps, values), points)
    # Outliers are drawn as marks and excluded from the mean, which they would distort for `window` steps.
    pairs = list(zip(line.steps, values, strict=True))
    inside = [(step, value) for step, value in pairs if scale.contains_value(value)]
    mean = Line(line.label, [step for step, _ in inside], smooth_values([value for _, value in inside], window))
    mean = thin_curve(mean, points) if window > 1 else Line(line.label, [], [])
    outliers = [(step, value) for step, value in pairs if not scale.contains_value(value)]
    largest = sorted(outliers, key=lambda one: abs(one[1]), reverse=True)[:_OUTLIERS_SENT]
    return run_answers.CurveView(
        metric=line.label, title=known.title, unit=known.unit, steps=list(drawn.steps), values=_short_name(drawn.values),
        window=window, mean_steps=list(mean.steps), means=_short_name(mean.values), measured=len(values),
        low=_round_value(scale.low), high=_round_value(scale.high), outliers=len(outliers),
        marks=[run_answers.Mark(step=step, value=_round_value(value)) for step, value in sorted(largest)],
    )  # fmt: skip


def _short_name(values: Sequence[float]) -> list[float]:
    return [_round_value(value) for value in values]


def _round_value(value: float) -> float:
    return float(f"{value:.{_SIGNIFICANT}g}")


def draw_sparkline(index: StepIndex) -> run_answers.Sparkline:
    """Return the small curve of a run: the reward, or the loss if there is no reward; empty without steps."""
    names = index.names
    metric = next((name for name in ("reward/mean", "loss") if name in names), "")
    known, line = unit_of(metric), index.metric_line(metric)
    if not line.steps:
        return run_answers.Sparkline(title="", steps=[], values=[], last=None)
    scale = scale_of(line.values)
    held = [min(max(value, scale.low), scale.high) for value in line.values]
    drawn = thin_curve(Line(metric, line.steps, smooth_values(held, window_of(len(held), 0))), _SPARK_POINTS)
    return run_answers.Sparkline(
        title=known.title,
        steps=list(drawn.steps),
        values=_short_name(drawn.values),
        last=_round_value(drawn.values[-1]),
    )


_COMPUTES = ("reference", "proximal", "values", "critic", "forward_backward", "optimizer")
_PARTS = (
    ("compute", "computes", False, tuple(f"time/{name}" for name in _COMPUTES)),
    ("batch", "waits for rollouts", True, ("time/wait_for_batch",)),
    ("turn", "waits for its turn", True, ("time/wait_for_turn",)),
    ("weights", "publishes weights", False, ("time/broadcast_weights",)),
    ("checkpoint", "saves", False, ("time/save_ckpt",)),
    ("validation", "validates", False, ("time/validate",)),
)
"""Parts of `time/step` in drawing order: name, label, whether the trainer waits, metrics."""
_REST = ("rest", "does the rest", False)


def draw_timeline(index: StepIndex, *, first: int | None, last: int | None, spans: int) -> run_answers.Timeline:
    """Return the mean seconds of each part of a step for `spans` intervals with equal numbers of steps."""
    whole = index.metric_line("time/step", first, last)
    count = min(spans, len(whole.steps))
    edges = [at * len(whole.steps) // count for at in range(count + 1)] if count else [0]
    cuts = list(pairwise(edges))
    rest = [sum(whole.values[a:b]) / (b - a) for a, b in cuts]
    parts = []
    for name, label, waits, metrics in _PARTS:
        sums = [0.0] * len(whole.steps)
        for metric in metrics:
            _add_metric(sums, whole.steps, index.metric_line(metric, first, last))
        means = [max(0.0, sum(sums[a:b]) / (b - a)) for a, b in cuts]
        rest = [max(0.0, left - mean) for left, mean in zip(rest, means, strict=True)]
        if any(means):
            parts.append(run_answers.Part(name=name, label=label, waits=waits, seconds=means))
    if any(rest):
        parts.append(run_answers.Part(name=_REST[0], label=_REST[1], waits=_REST[2], seconds=rest))
    totals = [sum(part.seconds[at] for part in parts) for at in range(len(cuts))]
    return run_answers.Timeline(
        first=[whole.steps[a] for a, _ in cuts],
        last=[whole.steps[b - 1] for _, b in cuts],
        parts=parts,
        high=scale_of(totals).high if totals else 0.0,
    )


def _add_metric(sums: list[float], steps: Sequence[int], line: Line) -> None:
    """Add a metric, which may lack some steps, to the sums per step."""
    places = {step: at for at, step in enumerate(steps)} if len(line.steps) != len(steps) else None
    for at, (step, value) in enumerate(zip(line.steps, line.values, strict=True)):
        place = at if places is None else places.get(step)
        if place is not None:
            sums[place] += value
