"""The queue of an operator in a history: the real one, and besides what other runs would make it say."""

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
"""The operator reads no nodes: it lets a run begin, and takes its room back where its pods find none."""


@dataclass
class Others:
    """Effects of other runs on this one: they are no part of a history but for this.

    Attributes:
        hold: they have all room.
        take: one of a higher priority wants this run's.
    """

    hold: bool = False
    take: bool = False


class HistoryAdmissions(Admissions):
    """The operator's admissions, with `Others`."""

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
            store, look_ups, SETTINGS, render, serves=lambda run: True, again=again, now=clock.wall, clock=clock.steady
        )
        self._others = others

    async def answer(self, run: dict[str, Any]) -> Admission:  # type: ignore[override]
        """Answer of the queue, unless others come first."""
        own = await super().answer(run)
        admitted = find_condition(read_status(run.get("status") or {}).conditions, reasons.ADMITTED)
        holds = admitted is not None and admitted.status == "True"
        if own.admitted and holds and self._others.take:
            return Admission(False, reasons.PREEMPTED, "team-b/urgent has a higher priority", stops=True)
        if own.admitted and not holds and (self._others.hold or self._others.take):
            return Admission(False, reasons.WAITING_FOR_RESOURCES, "others have all room", position=1, waiting=1)
        return own
