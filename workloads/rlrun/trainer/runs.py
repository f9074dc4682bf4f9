"""The runs of the trainer's process, where it has its own alone. The same on every rank.

`guests.shared_runs` is the same for a trainer that several runs share: the loop asks one of the two, and knows no guests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlrun.protocol.files.attempts import Attempt
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.shared import SlotState
from rlrun.runtime import exit_codes
from rlrun.trainer.run import Run

Order = dict[str, Any]
"""Next action of all ranks: JSON, as rank 0 broadcasts it."""


class OneRun:
    """The host: what fails in it ends the process.

    Args:
        host: the run that the process was started for.
    """

    def __init__(self, host: Run) -> None:
        self.host, self.runs = host, [host]
        """All runs, in the order in which they came; the host until it is over."""

    def named(self, name: str) -> Run:
        """The run of that name."""
        return next(run for run in self.runs if run.name == name)

    # ---- rank 0 decides

    def failed(self, run: Run, error: RoleError) -> Order:
        """The order that follows when a run cannot go on.

        Raises:
            RoleError: `error`, when the process cannot go on either.
        """
        raise error

    def requested(self) -> Order | None:
        """The order that follows from requests to join and to leave."""
        return None

    def awaited(self) -> bool:
        """True if another run may still join, once none is left."""
        return False

    # ---- all ranks carry it out

    def work(self, run: Run, act: Callable[[Run], None]) -> bool:
        """Let one run do something; returns whether the run goes on.

        Raises:
            StopAgreed: all ranks are to stop.
            Exception: of `act`, when the process cannot go on.
        """
        act(run)
        return True

    def close(self, run: Run) -> None:
        """Take a run away that is over, with all its files."""
        self.runs.remove(run)
        run.close(wait=True)

    def change(self, order: Order) -> None:
        """Carry out an order that only a shared trainer has: a run joins, or is dropped."""
        raise AssertionError(f"{order['do']} is no order of a trainer with one run")

    def stopped(self, run: Run, why: str) -> None:
        """Report the end of the process to a run's orchestrator, where nothing else does."""


def drop_order(run: Run, state: SlotState, reason: str, code: int = exit_codes.OK) -> Order:
    """The order to take a run out of the trainer that has not come to its end here."""
    return {"do": "drop", "run": run.name, "state": state, "reason": reason, "code": code}


def start_of(attempt: Attempt) -> str:
    """Starting point of an attempt, for the log."""
    if attempt.base_attempt is not None:
        return f"the checkpoint of step {attempt.base_step}"
    return "the model" if attempt.origin is None else f"another run's checkpoint {attempt.origin.path}"
