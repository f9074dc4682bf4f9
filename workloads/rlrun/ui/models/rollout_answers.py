"""Answers on rollouts: their lists, their messages and tokens, and two beside each other."""

from __future__ import annotations

from typing import Literal

from rlrun.ui.models.answer import Answer


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
    """In the trace."""
    chosen: int
    """Number of rollouts that the filter takes."""
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
    """First and last step of each unbroken span of steps that have one."""
    evaluations: list[int]
    """Policy versions."""


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
    """Tokens of one training sequence, column by column."""

    texts: list[str]
    sampled: list[bool]
    logprobs: list[float]
    advantages: list[float]
    versions: list[int]
    cut: int
    """Tokens that follow and are not in the answer."""


class Tokens(Answer):
    """Tokens of a rollout; `why` says why there are none."""

    sequences: list[TokenSequence]
    decoded: bool
    """False: the run has no tokenizer here, and texts are numbers of tokens."""
    why: str | None


class NextCommand(Answer):
    """Command that goes further, and what it does."""

    about: str
    command: str


class Reasons(Answer):
    """Why a rollout is worth what it is; `why` says why nothing is told."""

    samples: list[list[str]]
    """Lines on each of its sequences."""
    fetch: str | None
    """Command that brings the run's folder to where the others read it; None: it is there."""
    commands: list[NextCommand]
    """Commands that can succeed with the files of the run."""
    why: str | None


class Piece(Answer):
    """Part of a text that two rollouts share, or that one of them has."""

    side: Literal["both", "first", "second"]
    text: str


class DiffView(Answer):
    """Two rollouts of a group beside each other."""

    first: RolloutRow
    second: RolloutRow
    turns: list[list[Piece]]
    roles: list[str]
