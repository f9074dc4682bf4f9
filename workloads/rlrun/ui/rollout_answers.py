"""Responses about rollouts: lists, messages, tokens, and comparisons of two rollouts."""

from __future__ import annotations

from typing import Literal

from rlrun.ui.run_answers import Answer


class RolloutRow(Answer):
    """A rollout in a list."""

    number: int
    group: int | None
    rollout: int | None
    environment: str
    task_id: str
    reward: float | None
    advantage: float | None
    tokens: int | None
    completion_tokens: int | None
    finish_reason: str | None
    truncated: bool
    error: str | None
    turns: int
    versions: list[int]
    prompt: str
    answer: str


class RolloutPage(Answer):
    """A page of rollouts."""

    total: int
    """Number of rollouts in the trace."""
    chosen: int
    """Number of rollouts that the filter selects."""
    offset: int
    rows: list[RolloutRow]
    environments: list[str]
    reward_mean: float | None
    reward_min: float | None
    reward_max: float | None


class TracedSteps(Answer):
    """Traces of a run."""

    run: str
    """Name of the run."""
    spans: list[tuple[int, int]]
    """First and last step of each contiguous span of steps with a trace."""
    evaluations: list[int]
    """Policy versions with an evaluation trace."""


class CallView(Answer):
    """A call of a tool."""

    name: str
    arguments: str


class TurnView(Answer):
    """A message."""

    role: str
    text: str
    calls: list[CallView]


class Measured(Answer):
    """A metric of an environment."""

    metric: str
    value: float | None


class RolloutView(Answer):
    """One rollout."""

    run: str
    """Name of the run."""
    row: RolloutRow
    turns: list[TurnView]
    tools: list[str]
    measures: list[Measured]
    seconds: float | None
    dispatch_version: int | None


class TokenSequence(Answer):
    """Tokens of one training sequence, as columns."""

    texts: list[str]
    sampled: list[bool]
    logprobs: list[float]
    advantages: list[float]
    versions: list[int]
    cut: int
    """Number of further tokens that are not in the response."""


class Tokens(Answer):
    """Tokens of a rollout; `why` is the reason if there are none."""

    sequences: list[TokenSequence]
    decoded: bool
    """Whether texts are decoded; False: the run has no tokenizer here, and texts are token ids."""
    why: str | None


class NextCommand(Answer):
    """Command for further analysis, and its description."""

    about: str
    command: str


class Reasons(Answer):
    """Explanation of a rollout's advantage; `why` is the reason if there is none."""

    samples: list[list[str]]
    """Lines about each of the rollout's sequences."""
    fetch: str | None
    """Command that copies the run's folder to this machine for the other commands; None if the folder is local."""
    commands: list[NextCommand]
    """Commands that can succeed with the files of the run."""
    why: str | None


class Piece(Answer):
    """Part of a text that both rollouts share, or that only one of them has."""

    side: Literal["both", "first", "second"]
    text: str


class DiffView(Answer):
    """Comparison of two rollouts of a group."""

    first: RolloutRow
    second: RolloutRow
    turns: list[list[Piece]]
    roles: list[str]
