"""Bugs of the number of engines and of engines on interruptible nodes."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from rlrun_operator.decide import engine_count, snapshot
from rlrun_operator.decide.engine_count import Choice
from rlrun_operator.pods import Pod
from rlrun_operator.status.wait_facts import Wanted
from tests.sim.planted.plant import Plant, put


def a_lost_spot_engine_ends_the_attempt(stack: contextlib.ExitStack) -> None:
    """Treat it as a member of the group, whose pods live and die together."""

    def group(self: snapshot.RunSnapshot) -> list[Pod]:
        return [
            replace(pod, role="trainer", attempt=self.past.attempt) if _is_lost(pod) else pod for pod in _counting(self)
        ]

    put(stack, snapshot.RunSnapshot, "group", property(group))


def _counting(case: snapshot.RunSnapshot) -> list[Pod]:
    return [pod for pod in case.pods if pod.role != "inference" or _is_lost(pod)]


def _is_lost(pod: Pod) -> bool:
    return pod.spot and pod.disruption is not None


def a_run_waits_for_its_spot_engines(stack: contextlib.ExitStack) -> None:
    put(
        stack,
        Wanted,
        "count",
        lambda self, role: {"trainer": self.trainers, "inference": self.engines}.get(role, 1),
    )


def spot_engines_are_forgotten_at_the_end(stack: contextlib.ExitStack) -> None:
    def deployments(self: snapshot.RunSnapshot) -> list[Any]:
        return [(self.inference_ref, self.deployment)] if self.deployment is not None else []

    put(stack, snapshot.RunSnapshot, "engine_deployments", property(deployments))


def engines_go_before_they_are_drained(stack: contextlib.ExitStack) -> None:
    put(stack, engine_count, "_must_drain", lambda case, heard: False)


def what_was_chosen_is_not_read_again(stack: contextlib.ExitStack) -> None:
    """Each operator starts with the smallest number."""
    put(stack, snapshot.RunSnapshot, "_engine_count", lambda self, spec: spec.inference.min_replicas)


def every_report_is_decided_on(stack: contextlib.ExitStack) -> None:
    """Reports of any duration are used, so that the number oscillates."""
    real = engine_count.choose_engines

    def choose(wanted: int, load: Any, rules: Any) -> Choice:
        return real(wanted, load, replace(rules, stabilization_seconds=0.0))

    put(stack, engine_count, "choose_engines", choose)


ENGINES: tuple[Plant, ...] = (
    a_lost_spot_engine_ends_the_attempt,
    a_run_waits_for_its_spot_engines,
    spot_engines_are_forgotten_at_the_end,
    engines_go_before_they_are_drained,
    what_was_chosen_is_not_read_again,
    every_report_is_decided_on,
)
