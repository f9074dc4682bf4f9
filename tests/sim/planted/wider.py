"""Bugs that only events of children, admission, other operators and clocks reveal: one for each kind of event."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from rlrun_operator import render
from rlrun_operator.decide import api_keys, claims, repairs, restart, snapshot, state_machine, status_builder, suspend
from rlrun_operator.decide.reading import desired_replicas, is_ending
from rlrun_operator.failures import failure_policy
from rlrun_operator.kube import client
from rlrun_operator.kube.client import ApiError
from rlrun_operator.kube.resources import BY_KIND
from rlrun_operator.reconcile import reconciler, run_memory
from rlrun_operator.reconcile.apply import Applier
from rlrun_operator.runtime.cache import Store
from rlrun_operator.state import Apply
from rlrun_operator.status import diagnose, reasons, wait_facts
from tests.sim.operator.process import RELEASES
from tests.sim.planted.plant import Plant, put
from tests.sim.world import World

Manifest = Mapping[str, Any]


# ---- the five bugs found late


def the_observed_generation_is_ignored(stack: contextlib.ExitStack) -> None:
    """The controller's report about pods is used although it has not seen the present request."""

    def let_go(found: Manifest | None) -> bool:
        return found is None or not (
            is_ending(found) or desired_replicas(found) or (found.get("status") or {}).get("replicas")
        )

    for module in (restart, suspend):
        put(stack, module, "has_let_go", let_go)


def a_retry_time_far_in_the_future_is_believed(stack: contextlib.ExitStack) -> None:
    put(stack, failure_policy, "longest_backoff", lambda backoff: math.inf)


def the_lease_of_a_deleted_namesake_is_taken_for_the_own_one(stack: contextlib.ExitStack) -> None:
    real = snapshot.RunSnapshot.leftover_objects.func
    put(
        stack,
        snapshot.RunSnapshot,
        "leftover_objects",
        property(lambda self: [s for s in real(self) if not s.startswith("Lease")]),
    )


def the_oldest_event_is_told(stack: contextlib.ExitStack) -> None:
    real = wait_facts.event_time

    def oldest(events: Any, kind: str, name: str, reason: str | None = None, uid: str | None = None) -> Any:
        found = [
            e for e in events if wait_facts.is_about_object(e, kind, name, uid) and reason in (None, e.get("reason"))
        ]
        return min(found, key=real, default=None)

    put(stack, wait_facts, "newest_event", oldest)


def a_lost_deployment_is_not_made_again(stack: contextlib.ExitStack) -> None:
    put(stack, repairs, "_lost_deployment", lambda *given: [])


# ---- children


def a_lost_lease_is_not_made_again(stack: contextlib.ExitStack) -> None:
    put(stack, repairs, "lost_lease", lambda *given: [])


def small_objects_are_made_for_the_first_attempt_alone(stack: contextlib.ExitStack) -> None:
    real = render.render_prerequisites
    put(
        stack,
        render,
        "render_prerequisites",
        lambda ctx: real(ctx) if ctx.attempt == 1 else real(ctx)._replace(apply=()),
    )


def what_exists_is_not_applied_again(stack: contextlib.ExitStack) -> None:
    real = Applier._apply_object
    left_alone = {resource.kind for resource in BY_KIND.values()} - {"StatefulSet", "Deployment", "Pod"}

    async def applies(self: Applier, item: Apply) -> None:
        if item.manifest["kind"] not in left_alone or await self._find_own(item.manifest) is None:
            await real(self, item)

    put(stack, Applier, "_apply_object", applies)


def what_is_deleted_waits_for_the_next_attempt(stack: contextlib.ExitStack) -> None:
    put(stack, repairs, "compare_parts", lambda found, attempt: repairs.Seen({}))


def an_edit_of_a_small_object_is_not_noticed(stack: contextlib.ExitStack) -> None:
    put(stack, repairs, "unheld_fields", lambda held, part: [])


def a_pod_waits_for_ever_for_a_lost_configuration(stack: contextlib.ExitStack) -> None:
    """The configuration belongs to an attempt whose specification was edited since."""
    put(stack, repairs, "missing_configuration_cause", lambda found: None)


def a_pod_waits_for_ever_for_a_lost_key(stack: contextlib.ExitStack) -> None:
    put(stack, api_keys, "missing_key_cause", lambda found: None)


def another_key_has_the_name_of_the_first(stack: contextlib.ExitStack) -> None:
    """Objects with the first key do not know the other one and are not renewed."""
    put(stack, render.RunContext, "key_secret", property(lambda self: self.names.key_secret(self.uid)))


def engines_hold_a_deleted_claim(stack: contextlib.ExitStack) -> None:
    put(stack, snapshot.RunSnapshot, "claim_is_ending", property(lambda self: False))
    put(stack, claims, "ending_claim_cause", lambda found: None)


def objects_of_others_are_taken_over(stack: contextlib.ExitStack) -> None:
    async def finds(self: Applier, manifest: Manifest) -> Any:
        resource = BY_KIND[manifest["kind"]]
        found = await self._client.get(resource, manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        return None if found is None else {**found, "kind": resource.kind}

    put(stack, Applier, "_find_own", finds)
    put(stack, snapshot.RunSnapshot, "taken", property(lambda self: None))


def a_name_that_was_taken_stays_so(stack: contextlib.ExitStack) -> None:
    put(stack, reconciler, "TAKEN_SECONDS", math.inf)


# ---- admission


def what_admission_refuses_fails_the_run(stack: contextlib.ExitStack) -> None:
    put(stack, ApiError, "kept_out", property(lambda self: False))
    put(stack, ApiError, "refused", property(lambda self: self.status in (400, 403, 422)))


def a_refused_removal_is_told_to_nobody(stack: contextlib.ExitStack) -> None:
    put(stack, repairs, "with_refused_writes", lambda case, said: said)


def a_webhook_that_is_away_is_told_to_nobody(stack: contextlib.ExitStack) -> None:
    put(stack, client, "_NOT_ASKED", "no such words")


def what_was_refused_is_told_for_ever(stack: contextlib.ExitStack) -> None:
    """Events from before the attempt count."""
    put(stack, diagnose, "_refusals_count_from", lambda scene, role: 0.0)


def a_rejection_outlives_the_edit_that_mends_it(stack: contextlib.ExitStack) -> None:
    put(stack, state_machine, "_is_corrected", lambda found: False)


def a_refused_resumption_is_taken_for_begun(stack: contextlib.ExitStack) -> None:
    """The suspended attempt is judged by its missing pods."""
    put(stack, run_memory, "_OF_LIFE", tuple(kind for kind in run_memory._OF_LIFE if kind != reasons.SUSPENDED))


def what_has_no_number_is_called_starting(stack: contextlib.ExitStack) -> None:
    for module in (status_builder, run_memory):
        put(stack, module, "run_phase", lambda conditions, attempt, real=module.run_phase: real(conditions, 1))


def what_was_kept_out_is_never_tried_again(stack: contextlib.ExitStack) -> None:
    put(stack, reconciler, "KEPT_OUT_SECONDS", 1e9)
    put(stack, reconciler, "LONGEST_KEPT_OUT_SECONDS", 1e9)


# ---- operators


def another_release_renders_what_runs_again(stack: contextlib.ExitStack) -> None:
    real = repairs._lost_deployment

    def lost(found: snapshot.RunSnapshot, in_hand: bool) -> list[Apply]:
        other = (
            found.settings is RELEASES[1] and found.deployment is not None and not in_hand and found.spec is not None
        )
        made = (
            render.render_workloads(found.context(found.spec, found.past.attempt)).inference
            if other and found.spec
            else None
        )
        return [Apply(made)] if made is not None else real(found, in_hand)

    put(stack, repairs, "_lost_deployment", lost)


def a_new_leader_believes_its_first_list(stack: contextlib.ExitStack) -> None:
    """Requests in transit of the previous leader are not checked before a write."""
    _unlooked(stack, "replace_operator", "restart_operator")


def a_second_operator_is_not_looked_for(stack: contextlib.ExitStack) -> None:
    """Later objects of the other operator are overwritten."""
    _unlooked(stack, "start_rival", "end_rival")


def _unlooked(stack: contextlib.ExitStack, begins: str, ends: str) -> None:
    """Between two events of the world, children are applied without a check of the present objects."""
    begin, end, apply, make = getattr(World, begins), getattr(World, ends), Applier._apply_object, World.__init__
    unlooked: list[bool] = []

    def anew(self: World, *given: Any, **how: Any) -> None:
        unlooked.clear()  # otherwise a history depends on the previous one of this process
        make(self, *given, **how)

    def on(self: World, *given: Any, **how: Any) -> None:
        unlooked.append(True)
        begin(self, *given, **how)

    def off(self: World, *given: Any, **how: Any) -> None:
        unlooked.clear()
        end(self, *given, **how)

    async def applies(self: Applier, item: Apply) -> None:
        await apply(self, Apply(item.manifest) if unlooked else item)

    put(stack, World, "__init__", anew)
    put(stack, World, begins, on)
    put(stack, World, ends, off)
    put(stack, Applier, "_apply_object", applies)


def the_past_is_told_again_and_believed(stack: contextlib.ExitStack) -> None:
    """Deliver a deletion without the UID of its object."""
    real = Store.remove
    put(stack, Store, "remove", lambda self, kind, namespace, name, uid=None: real(self, kind, namespace, name))


WIDER: tuple[Plant, ...] = (
    the_observed_generation_is_ignored,
    a_retry_time_far_in_the_future_is_believed,
    the_lease_of_a_deleted_namesake_is_taken_for_the_own_one,
    the_oldest_event_is_told,
    a_lost_deployment_is_not_made_again,
    a_lost_lease_is_not_made_again,
    small_objects_are_made_for_the_first_attempt_alone,
    what_exists_is_not_applied_again,
    what_is_deleted_waits_for_the_next_attempt,
    an_edit_of_a_small_object_is_not_noticed,
    a_pod_waits_for_ever_for_a_lost_configuration,
    a_pod_waits_for_ever_for_a_lost_key,
    another_key_has_the_name_of_the_first,
    engines_hold_a_deleted_claim,
    objects_of_others_are_taken_over,
    a_name_that_was_taken_stays_so,
    what_admission_refuses_fails_the_run,
    a_refused_removal_is_told_to_nobody,
    a_webhook_that_is_away_is_told_to_nobody,
    what_was_refused_is_told_for_ever,
    a_rejection_outlives_the_edit_that_mends_it,
    a_refused_resumption_is_taken_for_begun,
    what_has_no_number_is_called_starting,
    what_was_kept_out_is_never_tried_again,
    another_release_renders_what_runs_again,
    a_new_leader_believes_its_first_list,
    a_second_operator_is_not_looked_for,
    the_past_is_told_again_and_believed,
)
