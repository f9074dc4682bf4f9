"""Queue of an operator in a history: the real one, with effects of other runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlrun_operator.decide.reading import read_status
from rlrun_operator.reconcile.admissions import Admissions
from rlrun_operator.reconcile.observe import LookUps
from rlrun_operator.runtime.cache import Key, Store
from rlrun_operator.settings import QueueSettings, RenderSettings
from rlrun_operator.state import Admission
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import find_condition
from tests.sim.clock import Clock

SETTINGS = QueueSettings(enabled=True, start_seconds=60)
"""Settings without access to nodes: the queue starts a run and takes its room back if its pods find no nodes."""


@dataclass
class Others:
    """Effects of other runs on this one.

    Attributes:
        hold: whether they have all room.
        take: whether one of a higher priority wants this run's room.
    """

    hold: bool = False
    take: bool = False


class HistoryAdmissions(Admissions):
    """The operator's admissions with `Others`."""

    def __init__(
        self,
        store: Store,
        look_ups: LookUps,
        render: RenderSettings,
        others: Others,
        again: Callable[[Key, float], None],
        clock: Clock,
    ) -> None:
        super().__init__(
            store,
            look_ups,
            SETTINGS,
            render,
            serves=lambda run: True,
            requeue=again,
            now=clock.wall,
            clock=clock.steady,
        )
        self._others = others

    async def answer(self, run: dict[str, Any]) -> Admission:  # type: ignore[override]
        """Return the answer of the queue unless other runs come first."""
        own = await super().answer(run)
        admitted = find_condition(read_status(run.get("status") or {}).conditions, reasons.ADMITTED)
        holds = admitted is not None and admitted.status == "True"
        if own.admitted and holds and self._others.take:
            return Admission(False, reasons.PREEMPTED, "team-b/urgent has a higher priority", stops=True)
        if own.admitted and not holds and (self._others.hold or self._others.take):
            return Admission(False, reasons.WAITING_FOR_RESOURCES, "others have all room", position=1, waiting=1)
        return own
