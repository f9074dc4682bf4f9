"""Runs of a trainer without guests. Every rank runs the same code.

`guests.shared_runs` has the same interface for a trainer with guests, so that the loop does not distinguish them.
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
    """The host as the only run; its failure ends the process.

    Args:
        host: run for which the process was started.
    """

    def __init__(self, host: Run) -> None:
        self.host, self.runs = host, [host]
        """All runs in order of arrival; contains the host until it has ended."""

    def named(self, name: str) -> Run:
        """Return the run of a name."""
        return next(run for run in self.runs if run.name == name)

    # ---- rank 0 decides

    def failed(self, run: Run, error: RoleError) -> Order:
        """Return the order after a failure of one run.

        Raises:
           RoleError: `error`, if it ends the process.
        """
        raise error

    def requested(self) -> Order | None:
        """Return the order for the next request to join or leave."""
        return None

    def awaited(self) -> bool:
        """Return whether another run may join after the last one has ended."""
        return False

    # ---- all ranks carry it out

    def work(self, run: Run, act: Callable[[Run], None]) -> bool:
        """Call `act` for one run and return whether the run continues.

        Raises:
           StopAgreed: all ranks stop.
           Exception: error of `act` that ends the process.
        """
        act(run)
        return True

    def close(self, run: Run) -> None:
        """Remove an ended run after its files are written."""
        self.runs.remove(run)
        run.close(wait=True)

    def change(self, order: Order) -> None:
        """Carry out an order of shared trainers: a run joins or is dropped."""
        raise AssertionError(f"{order['do']} is not supported by a trainer with one run")

    def stopped(self, run: Run, why: str) -> None:
        """Report the end of the process to a guest's orchestrator."""


def drop_order(run: Run, state: SlotState, reason: str, code: int = exit_codes.OK) -> Order:
    """Return the order to remove a run before its end."""
    return {"do": "drop", "run": run.name, "state": state, "reason": reason, "code": code}


def start_of(attempt: Attempt) -> str:
    """Describe the starting point of an attempt in the log."""
    if attempt.base_attempt is not None:
        return f"the checkpoint of step {attempt.base_step}"
    return "the model" if attempt.origin is None else f"another run's checkpoint {attempt.origin.path}"
