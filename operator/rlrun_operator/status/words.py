"""Words that several messages share: units of a run's progress by its task, and what a queue says before its first answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Words:
    """Parts of messages."""

    unit: str
    """Name of one move forward."""
    first: str
    """Name of an attempt's first."""
    lacks: str
    """Verb for one that is waited for."""
    going: str
    """Clause for the time in which they come."""
    over: str
    """Clause for the end, when all are there."""


TRAINING = Words("step", "first step", "is not done", "steps are trained", "all steps are trained")
ASKING = Words("answer", "first answer", "has not come", "questions are answered", "every policy is measured")
QUEUE_LOOKS_SOON = "the queue looks at the run in a moment"
"""Message of Admitted until the queue has answered."""
