"""Facts of the run's past for comparisons."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass
class Memory:
    """Past facts of the present run of this name."""

    failures_before: int = 0
    """Number of failed processes when the run was created."""
    status: Json = field(default_factory=dict)
    """Status at the last check."""
    edited: bool = False
    """Whether another writer changed it after the operator."""
    actions: int = 0
    """Events of the history, including those before the run was created, because the API server counts all writes."""
    restarts_asked: int = 0
    """Number of manual restarts."""
    damaged: dict[tuple[str, str], tuple[Json, int]] = field(default_factory=dict)
    """Deleted or edited children: their previous state, and the newest attempt at that time."""
    refused_for_good: bool = False
    """Whether validation has refused a child."""
    was_invalid: bool = False
    """Whether the specification was edited to an invalid one."""
    decided_on: Json = field(default_factory=dict)
    """The run as the sender of the last request knew it."""
    resized_at: float | None = None
    """Steady time of the last size change of an elastic trainer."""
    scaled_at: tuple[float, bool] | None = None
    """Time of the last choice of a number of engines, and whether it was an increase."""
    began_at: dict[int, float] = field(default_factory=dict)
    """Steady time at which each attempt was recorded."""
    scaled: bool = False
    """Whether a workload was scaled manually."""
    made_late: set[str] = field(default_factory=set)
    """UIDs of pods that a former or second leader created: no precondition prevents a creation."""
