"""Rules of the present state of the cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlrun_operator.names import ROLE_LABEL, attempt_of
from tests.sim.cluster.pods import owners
from tests.sim.invariants.common import Json, is_group
from tests.sim.invariants.sizes import the_size_is_within_its_bounds

if TYPE_CHECKING:
    from tests.sim.world import World


def never_two_attempts_at_once(world: World) -> str | None:
    newest = world.cluster.newest_attempt()

    def counts(pod: Json) -> bool:  # late pods of a former leader have no volume and are gone at rest
        return pod["metadata"]["uid"] not in world.memory.made_late or attempt_of(pod["metadata"]) == newest

    group = [pod for pod in world.api.all("Pod") if is_group(pod) and counts(pod)]
    alive = {attempt_of(pod["metadata"]) for pod in group}
    made_by = {(pod["metadata"]["labels"][ROLE_LABEL], *owners(pod)) for pod in group}
    if len(alive) > 1 or len(made_by) > len({role for role, *_ in made_by}):
        return f"trainer or orchestrator pods of attempts {sorted(map(str, alive))}, made by {sorted(made_by)}"
    return None


def the_operator_never_takes_back_what_it_has_seen(world: World) -> str | None:
    return world.operator.store.wrong


def nothing_of_others_is_touched(world: World) -> str | None:
    for (kind, name), made in world.foreign.items():
        found = world.api.get(kind, name)
        if found is not made:
            return f"{kind} {name} of somebody else was {'deleted' if found is None else 'changed'}"
    return None


STATES: tuple[Callable[[World], str | None], ...] = (
    never_two_attempts_at_once,
    the_operator_never_takes_back_what_it_has_seen,
    nothing_of_others_is_touched,
    the_size_is_within_its_bounds,
)
