"""Reason why the next step waits: the role that works on it, its activity, and since when. Words are stable, numbers come after them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlrun.protocol.files.paths import Role
from rlrun.protocol.messages.channel import RankState, TrainerState

SETTLED_SECONDS = 5.0
"""Ranks that have been apart for less are on their way to the same place."""
_RANKS_SHOWN = 4


@dataclass(frozen=True)
class Waiting:
    """Reason for waiting at one look."""

    role: Role
    phase: str
    """Phase of that role, with the step: `training, step 12`."""
    since: float
    """Start of the wait, in seconds since the epoch."""
    detail: str = ""
    """Further facts about it."""

    def __str__(self) -> str:
        return f"{self.role}: {self.phase} since {clock_time(self.since)}" + (f"; {self.detail}" if self.detail else "")


def clock_time(seconds: float) -> str:
    """`12:03:04Z`."""
    return time.strftime("%H:%M:%SZ", time.gmtime(seconds))


class Since:
    """Remembers since when the same has been waited for. Asked at least every second, by who renews the Lease."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._known: tuple[str, str] = ("", "")
        self._began = 0.0

    def waiting(self, role: Role, phase: str, detail: str = "") -> Waiting:
        """Present reason for waiting."""
        if self._known != (role, phase):
            self._known, self._began = (role, phase), self._now()
        return Waiting(role, phase, self._began, detail)


def of_trainer(state: TrainerState, step: int, now: float) -> Waiting:
    """Activity that the trainer reports while it works for `step`."""
    told = [f"micro-batch {state.part}"] if state.part else []
    if now - state.phase_since >= SETTLED_SECONDS:
        told += _ranks_apart(state.ranks, state)
    return Waiting("trainer", _phase_text(state.phase, step), state.phase_since, ", ".join(told))


def is_idle(state: TrainerState) -> bool:
    """True if the trainer has no work: other parts of the run produce the next batch."""
    return state.phase == "waiting_for_batch"


def _ranks_apart(ranks: Sequence[RankState], state: TrainerState) -> list[str]:
    """Ranks that are elsewhere than rank 0: they hold the group up, or are ahead and wait for it."""
    here = (_comparable_phase(state.phase), state.part)
    found = [rank for rank in ranks if (_comparable_phase(rank.phase), rank.part) != here]
    told = [_rank_text(rank) for rank in found[:_RANKS_SHOWN]]
    return told + ([f"{len(found) - len(told)} more ranks"] if len(found) > len(told) else [])


def _comparable_phase(phase: str) -> str:
    """Phase as ranks compare: only rank 0 knows whose turn it is, and whether a batch is there."""
    return "waiting" if phase.startswith("waiting_") else phase


def _rank_text(rank: RankState) -> str:
    part = f" micro-batch {rank.part}" if rank.part else ""
    return f"rank {rank.rank}: {_phase_text(rank.phase, rank.step)}{part} since {clock_time(rank.since)}"


def _phase_text(phase: str, step: int) -> str:
    return f"{phase.replace('_', ' ')}, step {step}"
