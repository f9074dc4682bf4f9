"""Units of a run's progress, by its task: steps that are trained, or answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Words:
    """For messages."""

    unit: str
    """One move forward."""
    first: str
    """The first of an attempt."""
    lacks: str
    """Of one that is waited for."""
    going: str
    """While they come."""
    over: str
    """When all are there."""


TRAINING = Words("step", "first step", "is not done", "steps are trained", "all steps are trained")
ASKING = Words("answer", "first answer", "has not come", "questions are answered", "every policy is measured")
