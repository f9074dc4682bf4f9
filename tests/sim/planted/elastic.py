"""Bugs of the size of an elastic trainer."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from rlrun.config.models import parallel
from rlrun_operator.decide import elastic_trainer, restart, snapshot
from tests.sim.planted.plant import Plant, put


def a_smaller_group_waits_for_all_of_its_ranks(stack: contextlib.ExitStack) -> None:
    """The StatefulSet has the attempt's size, but the pods' environment has the size of the specification."""
    real = snapshot.RunSnapshot.context

    def context(self: snapshot.RunSnapshot, spec: Any, attempt: int) -> Any:
        return replace(real(self, spec, attempt), spec=spec)

    put(stack, snapshot.RunSnapshot, "context", context)


def a_growth_that_found_no_node_is_tried_again_at_once(stack: contextlib.ExitStack) -> None:
    for module in (elastic_trainer, restart):
        put(stack, module, "grow_delay", lambda rules, growths: 0.0)


def nodes_are_not_waited_for(stack: contextlib.ExitStack) -> None:
    put(stack, elastic_trainer, "_seconds_without_nodes", lambda case: 1e6)


def it_never_grows(stack: contextlib.ExitStack) -> None:
    put(stack, elastic_trainer, "_at_checkpoint", lambda case, heard: False)


def it_grows_wherever_it_is(stack: contextlib.ExitStack) -> None:
    put(stack, elastic_trainer, "_at_checkpoint", lambda case, heard: True)


def the_fewest_pods_are_forgotten(stack: contextlib.ExitStack) -> None:
    put(stack, parallel.Sizes, "at_most", lambda self, pods: pods or None)


ELASTIC: tuple[Plant, ...] = (
    a_smaller_group_waits_for_all_of_its_ranks,
    a_growth_that_found_no_node_is_tried_again_at_once,
    nodes_are_not_waited_for,
    it_never_grows,
    it_grows_wherever_it_is,
    the_fewest_pods_are_forgotten,
)
