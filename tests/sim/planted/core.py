"""Bugs of decisions, of the store and of writes of a pass."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from rlrun_operator import pods
from rlrun_operator.decide import (
    attempt,
    attempt_end,
    completion,
    restart,
    running,
    snapshot,
    state_machine,
    status_builder,
)
from rlrun_operator.failures import failure_policy
from rlrun_operator.kube.client import Client
from rlrun_operator.pods import Pod, asked_at
from rlrun_operator.reconcile.apply import DONE, Applier, Outcome
from rlrun_operator.reconcile.reconciler import Reconciler
from rlrun_operator.runtime import cache
from rlrun_operator.runtime.cache import Store
from rlrun_operator.state import NO_ACTIONS, Actions, Apply, Decision
from rlrun_operator.status.conditions import NO_CHANGE, UNSET, StatusChange
from tests.sim.planted.plant import Plant, put


def ending_pods_are_taken_for_gone(stack: contextlib.ExitStack) -> None:
    real = snapshot.RunSnapshot.group.func
    group = property(lambda self: [pod for pod in real(self) if pod.deleted_at is None])
    put(stack, snapshot.RunSnapshot, "group", group)


def the_controller_is_not_waited_for(stack: contextlib.ExitStack) -> None:
    put(stack, restart, "has_let_go", lambda statefulset: True)


def disruptions_count(stack: contextlib.ExitStack) -> None:
    real = failure_policy.apply_policy
    put(stack, failure_policy, "apply_policy", lambda cause, **how: replace(real(cause, **how), counted=True))


def the_limit_is_one_too_high(stack: contextlib.ExitStack) -> None:
    real = failure_policy.apply_policy

    def verdict(cause: Any, *, budget: failure_policy.Budget, **how: Any) -> failure_policy.Verdict:
        return real(cause, budget=replace(budget, counted=max(0, budget.counted - 1)), **how)

    put(stack, failure_policy, "apply_policy", verdict)


def the_cache_is_believed_when_it_lacks_something(stack: contextlib.ExitStack) -> None:
    real = Applier._apply_object
    put(
        stack,
        Applier,
        "_apply_object",
        lambda self, item: real(self, Apply(item.manifest, expect_absent=False, replaces=None)),
    )


def what_a_deleted_run_has_left_is_taken_over(stack: contextlib.ExitStack) -> None:
    the_cache_is_believed_when_it_lacks_something(stack)
    put(stack, snapshot.RunSnapshot, "leftover_objects", property(lambda self: []))


def attempts_rise_twice(stack: contextlib.ExitStack) -> None:
    """If the cluster already has the new attempt but the status does not, as after a crash, another attempt is
    started.
    """
    real = state_machine.launch_attempt

    def launch(found: snapshot.RunSnapshot, spec: Any, attempt: int) -> Decision:
        ahead = found.past.attempt and found.statefulset is not None and found.attempt > found.past.attempt
        return real(found, spec, attempt + 1 if ahead else attempt)

    put(stack, state_machine, "launch_attempt", launch)


def the_status_is_written_before_the_children(stack: contextlib.ExitStack) -> None:
    make_writes, report = Applier.make_writes, Reconciler._report_status

    async def nothing(self: Applier, namespace: str, decision: Decision) -> Outcome:
        return DONE

    async def first(self: Reconciler, key: Any, run: Any, decision: Decision, memory: Any) -> None:
        await report(self, key, run, decision, memory)
        await make_writes(self._applier, key[0], decision)

    put(stack, Applier, "make_writes", nothing)
    put(stack, Reconciler, "_report_status", first)


def a_refused_status_is_taken_for_written(stack: contextlib.ExitStack) -> None:
    report, meant = Reconciler._report_status, {}

    async def reports(self: Reconciler, key: Any, run: Any, decision: Decision, memory: Any) -> None:
        meant[key] = {**run, "status": decision.status}
        await report(self, key, run, decision, memory)

    async def refreshes(self: Reconciler, key: Any) -> None:
        run = meant[key]
        newer = str(int(run["metadata"]["resourceVersion"]) + 1)
        self._store.put({**run, "metadata": {**run["metadata"], "resourceVersion": newer}}, self._now())

    put(stack, Reconciler, "_report_status", reports)
    put(stack, Reconciler, "_refresh_run", refreshes)


def the_status_is_written_without_preconditions(stack: contextlib.ExitStack) -> None:
    real = Client.merge_patch

    async def merge_patch(self: Client, resource: Any, namespace: str, name: str, patch: Any, **how: Any) -> Any:
        return await real(self, resource, namespace, name, {k: v for k, v in patch.items() if k != "metadata"}, **how)

    put(stack, Client, "merge_patch", merge_patch)


def what_has_ended_begins_again(stack: contextlib.ExitStack) -> None:
    real = state_machine._is_corrected
    edited = lambda found: found.generation != found.past.observed_generation  # noqa: E731
    put(
        stack,
        state_machine,
        "_is_corrected",
        lambda found: real(found) or (found.past.phase == "Failed" and edited(found)),
    )


def an_older_state_replaces_a_newer_one(stack: contextlib.ExitStack) -> None:
    put(stack, cache, "_is_newer", lambda new, old: new["metadata"] != old["metadata"])


def a_late_event_brings_back_what_is_gone(stack: contextlib.ExitStack) -> None:
    put(stack, cache, "TOMBSTONES", 0)


def a_comparison_forgets_nothing(stack: contextlib.ExitStack) -> None:
    put(stack, Store, "remove_unlisted", lambda self, *what: set())


def a_backoff_wakes_nobody(stack: contextlib.ExitStack) -> None:
    real = status_builder.finish_decision

    def finish(
        found: snapshot.RunSnapshot, said: Any, change: StatusChange, actions: Actions = NO_ACTIONS, **how: Any
    ) -> Decision:
        return real(found, said, change, replace(actions, wake_in=None), **how)

    for module in (attempt, attempt_end, completion, running):
        put(stack, module, "finish_decision", finish)


def a_step_is_taken_for_every_failure(stack: contextlib.ExitStack) -> None:
    """The failure is counted when the attempt restarts, and again when its pods are gone."""
    real = attempt_end.report_restart

    def restarting(
        found: snapshot.RunSnapshot, message: str, reason: str, change: StatusChange = NO_CHANGE, *more: Any, **how: Any
    ) -> Decision:
        if change.restarts is UNSET and found.past.restarts and not found.group:
            change |= StatusChange(restarts=found.past.restarts + 1)
        return real(found, message, reason, change, *more, **how)

    for module in (attempt, attempt_end, restart):
        put(stack, module, "report_restart", restarting)


def a_pod_works_until_its_sidecars_have_ended(stack: contextlib.ExitStack) -> None:
    phase = property(lambda self: self.deleted_at is None and self.phase not in ("Succeeded", "Failed"))
    put(stack, Pod, "keeps_running", phase)


def the_last_request_to_delete_is_taken_for_the_first(stack: contextlib.ExitStack) -> None:
    put(stack, pods, "first_asked_at", asked_at)
    put(stack, attempt_end, "TERMINATED", None)


CORE: tuple[Plant, ...] = (
    ending_pods_are_taken_for_gone,
    the_controller_is_not_waited_for,
    disruptions_count,
    the_limit_is_one_too_high,
    the_cache_is_believed_when_it_lacks_something,
    what_a_deleted_run_has_left_is_taken_over,
    attempts_rise_twice,
    the_status_is_written_before_the_children,
    a_refused_status_is_taken_for_written,
    the_status_is_written_without_preconditions,
    what_has_ended_begins_again,
    an_older_state_replaces_a_newer_one,
    a_late_event_brings_back_what_is_gone,
    a_comparison_forgets_nothing,
    a_backoff_wakes_nobody,
    a_step_is_taken_for_every_failure,
    a_pod_works_until_its_sidecars_have_ended,
    the_last_request_to_delete_is_taken_for_the_first,
)
