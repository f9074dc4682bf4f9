"""Texts that several messages share: units of a run's progress by its task, and the queue's message before its first answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Words:
    """Texts for the progress of one task."""

    unit: str
    """Name of one unit of progress."""
    first: str
    """Name of the first unit of an attempt."""
    lacks: str
    """Predicate for a unit that has not come yet."""
    going: str
    """Clause while units are coming."""
    over: str
    """Clause for the end, when all units are complete."""


TRAINING = Words("step", "first step", "is not done", "steps are trained", "all steps are trained")
ASKING = Words("answer", "first answer", "has not come", "questions are answered", "every policy is measured")
QUEUE_LOOKS_SOON = "the queue has not considered the run yet"
"""Message of Admitted until the queue has answered."""
