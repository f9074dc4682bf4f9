"""Explanation of a sample: its advantage, the versions that sampled it, its tokens, and its part in the objective.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from rlrun.config.models.learning import AdvantageConfig
from rlrun.protocol.files.batch import Batch, Sample
from rlrun.replay.advantage_explanation import Advantage, explain_advantage, outcomes_of
from rlrun.replay.step_files import ReplayError
from rlrun.runtime import exit_codes
from rlrun.runtime.printable import escape_controls

_TOKENS = 12
"""Number of tokens in the printed table."""


@dataclass(frozen=True)
class Span:
    """Tokens `start` (included) to `end` (excluded) of one kind."""

    kind: str
    """`prompt` (before the first trained token), `trained`, or `between` (templates, tools and later prompts)."""
    start: int
    end: int


@dataclass(frozen=True)
class Version:
    """Trained tokens that one policy version sampled."""

    version: int
    tokens: int
    age: int
    """Number of updates between it and the policy at the start of the step."""


@dataclass(frozen=True)
class SampleReport:
    """Facts of a sample that need only the batch."""

    step: int
    sample: int
    """Index of the sample in the batch."""
    environment: str
    task_id: str
    group: int
    rollout: int
    reward: float
    """Reward of the environment."""
    dispatch_version: int
    versions: tuple[Version, ...]
    tokens: int
    trained_tokens: int
    masked: str | None
    """Filter that masked the loss of its tokens, or None."""
    spans: tuple[Span, ...]
    advantage: Advantage | None
    """Explanation of its advantage, or None without an estimator, such as for demonstrations."""


def index_of(batch: Batch, wanted: str) -> int:
    """Return the index of the sample named on the command line by its index, `GROUP/ROLLOUT`, or its task's id.

    Raises:
        ReplayError: no sample or several samples match.
    """
    if wanted.isdecimal() and int(wanted) < len(batch.samples):
        return int(wanted)
    found = [index for index, one in enumerate(batch.samples) if wanted in (one.task_id, f"{one.group}/{one.rollout}")]
    if len(found) == 1:
        return found[0]
    if found:
        places = ", ".join(f"{i} ({batch.samples[i].group}/{batch.samples[i].rollout})" for i in found[:8])
        raise ReplayError(
            f"--sample {wanted} matches {len(found)} samples: {places}; use the index of one", exit_codes.USAGE
        )
    first = batch.samples[0]
    raise ReplayError(
        f"--sample: step {batch.step} has no sample {escape_controls(wanted)}; use an index from 0 to {len(batch.samples) - 1}, "
        f"GROUP/ROLLOUT such as {first.group}/{first.rollout}, or the id of a task",
        exit_codes.USAGE,
    )


def report_sample(batch: Batch, index: int, settings: Mapping[str, AdvantageConfig]) -> SampleReport:
    """Report on a sample from its batch.

    Args:
        batch: batch of the step.
        index: index of the sample.
        settings: estimators by environment; empty in supervised fine-tuning.

    Raises:
        ReplayError: the estimator rejects the batch's rewards.
    """
    sample = batch.samples[index]
    try:
        advantage = explain_advantage(batch, index, settings)
    except ValueError as error:
        raise ReplayError(f"cannot recompute the advantages of step {batch.step}: {error}") from None
    outcome = next((o for o in outcomes_of(batch) if (o.group, o.rollout) == (sample.group, sample.rollout)), None)
    return SampleReport(
        batch.step,
        index,
        sample.environment,
        sample.task_id,
        sample.group,
        sample.rollout,
        sample.reward,
        sample.dispatch_version,
        tuple(_version_lines(sample, batch.step - 1)),
        len(sample),
        int(sample.loss_mask.sum()),
        None if outcome is None else outcome.masked,
        tuple(_token_spans(sample)),
        advantage,
    )


def _version_lines(sample: Sample, policy: int) -> Iterator[Version]:
    numbers, counts = np.unique(sample.versions[sample.loss_mask], return_counts=True)
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        yield Version(int(number), int(count), policy - int(number))


def _token_spans(sample: Sample) -> Iterator[Span]:
    edges = [0, *(np.flatnonzero(np.diff(sample.loss_mask.astype(np.int8))) + 1).tolist(), len(sample)]
    for start, end in pairwise(edges):
        kind = "trained" if sample.loss_mask[start] else "prompt" if start == 0 else "between"
        yield Span(kind, int(start), int(end))


def report_document(found: SampleReport, objective: Mapping[str, object] | None) -> dict[str, object]:
    """Return a report as JSON."""
    values = asdict(found)
    if found.advantage is not None:
        values["advantage"]["equal"] = found.advantage.equal
    return values | {"objective": objective}


def report_text(found: SampleReport, objective: Mapping[str, object] | None) -> str:
    """Return a report as text for a terminal."""
    place = f"{escape_controls(found.environment)} {escape_controls(found.task_id)}, group {found.group}, rollout {found.rollout}"
    lines = [f"sample {found.sample} of step {found.step}: {place}", f"  reward {found.reward:.6g}"]
    lines += advantage_lines(found)
    ages = ", ".join(f"{one.tokens} tokens by version {one.version} ({one.age} behind)" for one in found.versions)
    lines.append(
        f"  sampled: {ages or 'no trained tokens'}; the group was dispatched at version {found.dispatch_version}"
    )
    kinds = ", ".join(f"{one.kind} {one.start}-{one.end - 1}" for one in found.spans[:_TOKENS])
    more = "" if len(found.spans) <= _TOKENS else f" and {len(found.spans) - _TOKENS} more spans"
    lines.append(f"  trained tokens: {found.trained_tokens} of {found.tokens}: {kinds}{more}")
    if objective is not None:
        lines += list(_objective_lines(objective))
    return "\n".join(lines)


def advantage_lines(found: SampleReport) -> list[str]:
    """Return lines about the advantage, with the numbers of each stage."""
    why = found.advantage
    if why is None:
        return ["  advantage: not estimated; the tokens have the weights of the batch"]
    group = ", ".join(f"{reward:.4g}" for reward in why.rewards[:16])
    lines = [f"  rewards of its group: {group}{', ...' if len(why.rewards) > 16 else ''}"]
    lines += [f"    {escape_controls(stage.text)} -> {stage.value:.6g}" for stage in why.stages]
    if why.note is not None:
        lines.append(f"    {why.note}")
    if why.stored:
        lines.append(f"  advantage {_range_text(why.stored)} in the batch; recomputed: {_agreement_text(why)}")
    return lines


def _agreement_text(why: Advantage) -> str:
    return (
        "equal"
        if why.equal
        else f"{_range_text(why.computed)}, different because the estimator's settings were changed later"
    )


def _range_text(values: Sequence[float]) -> str:
    least, most = min(values), max(values)
    return f"{least:.6g}" if least == most else f"{least:.6g} to {most:.6g}"


def _objective_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about the sample's part in the objective."""
    tokens, metrics = found["tokens"], found["metrics"]
    slopes: list[float] = tokens["slope"]
    raised, lowered = sum(slope < 0 for slope in slopes), sum(slope > 0 for slope in slopes)
    options = ", ".join(f"{name} {value}" for name, value in found["options"].items())
    update = f", update {found['update'] + 1} of {found['updates']}" if found["updates"] > 1 else ""
    yield f"  loss {found['loss']} ({options}), {found['aggregation']}, divided by {found['divisor']:g}{update}"
    for name, values in metrics.items():
        if not name.endswith("_max") and values:
            yield f"    {name}: {_share_text(values) if name.endswith('_fraction') else _spread_text(values)}"
    yield f"    share of the step's loss: {sum(tokens['share_of_loss']):.6g}"
    yield (
        f"    the gradient increases the probability of {raised} tokens, decreases it for {lowered}, and keeps it for "
        f"{len(slopes) - raised - lowered}; sum of slopes {sum(slopes):.6g}"
    )
    positions: list[int] = found["positions"]
    columns = ["logprob", "sampled_logprob", "advantage", "loss", "slope"]
    if positions:
        yield "    " + "".join(f"{name:>16}" for name in ("token", *columns))
    for at in range(min(len(positions), _TOKENS)):
        yield "    " + f"{positions[at]:>16}" + "".join(f"{tokens[name][at]:>16.6g}" for name in columns)
    if len(positions) > _TOKENS:
        yield f"    {len(positions) - _TOKENS} more tokens with -o json"


def _share_text(values: Sequence[float]) -> str:
    return f"{int(sum(values))} of {len(values)} tokens"


def _spread_text(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.6g} on average, {_range_text(values)}"
