"""Bugs of an operator's queue in the life of one run."""

from __future__ import annotations

import contextlib
from typing import Any

from rlrun_operator.decide import queueing
from rlrun_operator.reconcile import admissions
from rlrun_operator.reconcile.admissions import Admissions
from rlrun_operator.status import conditions, reasons
from tests.sim.planted.plant import Plant, put


def pods_are_made_before_the_admission_is_on_record(stack: contextlib.ExitStack) -> None:
    put(stack, queueing, "pending_admission_condition", lambda case: None)


def a_run_that_is_younger_than_the_plan_is_not_asked_about(stack: contextlib.ExitStack) -> None:
    put(stack, admissions, "SOON", admissions.OUT)


def a_back_off_counts_by_a_clock_that_is_set(stack: contextlib.ExitStack) -> None:
    init = Admissions.__init__

    def with_wall(self: Admissions, *args: Any, now: Any, clock: Any, **how: Any) -> None:
        init(self, *args, now=now, clock=now, **how)

    put(stack, Admissions, "__init__", with_wall)


def an_admitted_run_says_nothing_until_it_starts(stack: contextlib.ExitStack) -> None:
    put(
        stack,
        conditions,
        "_BY_IMPORTANCE",
        tuple(m for m in conditions._BY_IMPORTANCE if m != (reasons.ADMITTED, "True")),
    )


QUEUED: tuple[Plant, ...] = (
    pods_are_made_before_the_admission_is_on_record,
    a_run_that_is_younger_than_the_plan_is_not_asked_about,
    a_back_off_counts_by_a_clock_that_is_set,
    an_admitted_run_says_nothing_until_it_starts,
)
