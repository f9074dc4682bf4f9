"""Reason why the next step waits: the responsible role, its activity, and the start time. The words are stable; numbers
come last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlrun.protocol.files.paths import Role
from rlrun.protocol.messages.channel import RankState, TrainerState

SETTLED_SECONDS = 5.0
"""Seconds below which a difference between ranks is ignored, because they are about to reach the same phase."""
_RANKS_SHOWN = 4


@dataclass(frozen=True)
class Waiting:
    """Reason for waiting at one moment."""

    role: Role
    phase: str
    """Phase of that role with the step: `training, step 12`."""
    since: float
    """Start of the wait, in seconds since the epoch."""
    detail: str = ""
    """Additional facts."""

    def __str__(self) -> str:
        return f"{self.role}: {self.phase} since {clock_time(self.since)}" + (f"; {self.detail}" if self.detail else "")


def clock_time(seconds: float) -> str:
    """Format a time as `12:03:04Z`."""
    return time.strftime("%H:%M:%SZ", time.gmtime(seconds))


class Since:
    """Start time of the current wait. The renewal of the Lease updates it at least once per second."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._known: tuple[str, str] = ("", "")
        self._began = 0.0

    def waiting(self, role: Role, phase: str, detail: str = "") -> Waiting:
        """Return the current reason for waiting with its start time."""
        if self._known != (role, phase):
            self._known, self._began = (role, phase), self._now()
        return Waiting(role, phase, self._began, detail)


def of_trainer(state: TrainerState, step: int, now: float) -> Waiting:
    """Return the activity that the trainer reports while it works on `step`."""
    details = [f"micro-batch {state.part}"] if state.part else []
    if now - state.phase_since >= SETTLED_SECONDS:
        details += _ranks_apart(state.ranks, state)
    return Waiting("trainer", _phase_text(state.phase, step), state.phase_since, ", ".join(details))


def is_idle(state: TrainerState) -> bool:
    """Return whether the trainer has no work because other parts of the run produce the next batch."""
    return state.phase == "waiting_for_batch"


def _ranks_apart(ranks: Sequence[RankState], state: TrainerState) -> list[str]:
    """Describe the ranks in another phase than rank 0: they delay the group, or wait for it."""
    here = (_comparable_phase(state.phase), state.part)
    found = [rank for rank in ranks if (_comparable_phase(rank.phase), rank.part) != here]
    shown = [_rank_text(rank) for rank in found[:_RANKS_SHOWN]]
    return shown + ([f"{len(found) - len(shown)} more ranks"] if len(found) > len(shown) else [])


def _comparable_phase(phase: str) -> str:
    """Reduce a phase to the part that ranks share. Only rank 0 has the turn and the presence of a batch."""
    return "waiting" if phase.startswith("waiting_") else phase


def _rank_text(rank: RankState) -> str:
    part = f" micro-batch {rank.part}" if rank.part else ""
    return f"rank {rank.rank}: {_phase_text(rank.phase, rank.step)}{part} since {clock_time(rank.since)}"


def _phase_text(phase: str, step: int) -> str:
    return f"{phase.replace('_', ' ')}, step {step}"
