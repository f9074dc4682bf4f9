"""Bugs of the count of GPU time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from rlrun_operator.decide import gpu_time
from rlrun_operator.decide.gpu_time import Ledger, Span
from rlrun_operator.decide.snapshot import RunSnapshot
from tests.sim.planted.plant import Plant, put

TICK_SECONDS = 5


def _looks(stack: contextlib.ExitStack, change: Callable[[Span], Span | None]) -> None:
    real = gpu_time.read_ledger

    def look(case: RunSnapshot) -> Ledger:
        found = real(case)
        return replace(found, spans=tuple(new for span in found.spans if (new := change(span)) is not None))

    put(stack, gpu_time, "read_ledger", look)


def a_pod_is_counted_from_its_beginning_each_time(stack: contextlib.ExitStack) -> None:
    put(stack, gpu_time, "_recorded_pods", lambda entries: {})


def time_is_counted_in_ticks(stack: contextlib.ExitStack) -> None:
    """A late pass adds no more than the time between two passes."""

    def ticked(span: Span) -> Span:
        return replace(span, end=min(span.end, span.start + TICK_SECONDS))

    _looks(stack, ticked)


def what_is_gone_is_not_counted_to_its_end(stack: contextlib.ExitStack) -> None:
    _looks(stack, lambda span: span if span.pod is not None else None)


COST: tuple[Plant, ...] = (
    a_pod_is_counted_from_its_beginning_each_time,
    time_is_counted_in_ticks,
    what_is_gone_is_not_counted_to_its_end,
)
