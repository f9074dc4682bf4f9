"""Runs of a trainer without guests. Every rank runs the same code.

`guests.shared_runs` has the same interface for a trainer with guests, so that the loop does not distinguish them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rlrun.protocol.files.attempts import Attempt
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.shared_trainer_files import SlotState
from rlrun.runtime import exit_codes
from rlrun.trainer.trained_run import Run


@dataclass(frozen=True)
class StepOrder:
    """Train the next step of a run."""

    do: ClassVar[str] = "step"
    run: str
    path: str
    """Folder of the batch."""
    save: bool
    """Save a checkpoint after the step, even if none is due."""


@dataclass(frozen=True)
class SaveOrder:
    """Save the last step of a run again, because the volume refused its checkpoint."""

    do: ClassVar[str] = "save"
    run: str


@dataclass(frozen=True)
class FinishOrder:
    """Report the end of training of a run."""

    do: ClassVar[str] = "finish"
    run: str


@dataclass(frozen=True)
class LeaveOrder:
    """Save a guest that leaves before its end."""

    do: ClassVar[str] = "leave"
    run: str


@dataclass(frozen=True)
class CloseOrder:
    """Remove a run that has ended."""

    do: ClassVar[str] = "close"
    run: str


@dataclass(frozen=True)
class JoinOrder:
    """Add a guest."""

    do: ClassVar[str] = "join"
    config: dict[str, Any]
    """Configuration of the guest's trainer, as JSON."""
    attempt: dict[str, Any]
    """Fields of the guest's `Attempt`."""
    folder: str


@dataclass(frozen=True)
class DropOrder:
    """Remove a guest before its end."""

    do: ClassVar[str] = "drop"
    run: str
    state: SlotState
    reason: str
    code: int = exit_codes.OK


@dataclass(frozen=True)
class WaitOrder:
    """Meet again after one tick."""

    do: ClassVar[str] = "wait"


@dataclass(frozen=True)
class EndOrder:
    """End the loop, because all runs have ended."""

    do: ClassVar[str] = "end"


Order = StepOrder | SaveOrder | FinishOrder | LeaveOrder | CloseOrder | JoinOrder | DropOrder | WaitOrder | EndOrder
"""Next action of all ranks, selected by rank 0."""
_KINDS: dict[str, type[Order]] = {
    kind.do: kind
    for kind in (
        StepOrder,
        SaveOrder,
        FinishOrder,
        LeaveOrder,
        CloseOrder,
        JoinOrder,
        DropOrder,
        WaitOrder,
        EndOrder,
    )
}


def write_order(order: Order) -> dict[str, Any]:
    """Return the JSON document with which rank 0 broadcasts an order: `do` and the order's fields."""
    return {"do": order.do, **vars(order)}


def read_order(document: Mapping[str, Any]) -> Order:
    """Parse a document of `write_order`."""
    fields = dict(document)
    return _KINDS[fields.pop("do")](**fields)


class OneRun:
    """The host as the only run; its failure ends the process.

    Args:
        host: run for which the process was started.
    """

    def __init__(self, host: Run) -> None:
        self.host, self.runs = host, [host]
        """All runs in order of arrival; contains the host until it has ended."""

    def find_run(self, name: str) -> Run:
        """Return the run of a name."""
        return next(run for run in self.runs if run.name == name)

    # ---- rank 0 decides

    def handle_failure(self, run: Run, error: RoleError) -> Order:
        """Return the order after a failure of one run.

        Raises:
            RoleError: `error`, if it ends the process.
        """
        raise error

    def next_request(self) -> Order | None:
        """Return the order for the next request to join or leave."""
        return None

    def expects_runs(self) -> bool:
        """Return whether another run may join after the last one has ended."""
        return False

    # ---- all ranks carry it out

    def run_work(self, run: Run, act: Callable[[Run], None]) -> bool:
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

    def apply_order(self, order: JoinOrder | DropOrder) -> None:
        """Carry out an order of shared trainers: a run joins or is dropped."""
        raise AssertionError(f"{order.do} is not supported by a trainer with one run")

    def report_stop(self, run: Run, why: str) -> None:
        """Report the end of the process to a guest's orchestrator."""


def start_of(attempt: Attempt) -> str:
    """Describe the starting point of an attempt in the log."""
    if attempt.base_attempt is not None:
        return f"the checkpoint of step {attempt.base_step}"
    return "the model" if attempt.origin is None else f"another run's checkpoint {attempt.origin.path}"
