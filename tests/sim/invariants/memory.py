"""Facts of the run's past that rules compare with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass
class Memory:
    """What was true before, of the run that has the name now."""

    failures_before: int = 0
    """Processes that had failed when the run was made."""
    status: Json = field(default_factory=dict)
    """As it was checked last."""
    edited: bool = False
    """Somebody else wrote into it after the operator did."""
    actions: int = 0
    """Events of the history, those before the run was made among them: of them all the API server counts the writes."""
    restarts_asked: int = 0
    """How often somebody has asked for a restart."""
    damaged: dict[tuple[str, str], tuple[Json, int]] = field(default_factory=dict)
    """Children that somebody deleted or edited: as each was before, and the newest attempt then."""
    refused_for_good: bool = False
    """Validation has refused a child."""
    was_invalid: bool = False
    """Somebody had edited the specification into one that cannot be run."""
    decided_on: Json = field(default_factory=dict)
    """The run as the sender of the last request knew it."""
    resized_at: float | None = None
    """Time of the last change of an elastic trainer's size, by the steady clock."""
    scaled_at: tuple[float, bool] | None = None
    """Time of the last choice of a number of engines, and whether it was of more."""
    began_at: dict[int, float] = field(default_factory=dict)
    """Time at which each attempt was put on record, by the steady clock."""
    scaled: bool = False
    """Somebody has scaled a workload."""
    made_late: set[str] = field(default_factory=set)
    """UIDs of pods that a process made which led no more, or leads beside another one: no precondition keeps one from being created."""
