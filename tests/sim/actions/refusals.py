"""Events of admission, warnings and clocks."""

from __future__ import annotations

from rlrun.runtime import exit_codes
from rlrun_operator.times import format_rfc3339
from tests.sim.actions.action import Action
from tests.sim.cluster.admission import FOR_GOOD, SORTS, Refusal
from tests.sim.cluster.pods import end_of, has_started
from tests.sim.surroundings import EPOCH
from tests.sim.world import NAME, World

KINDS = (
    "Pod",
    "StatefulSet",
    "Deployment",
    "PersistentVolumeClaim",
    "Lease",
    "Secret",
    "Service",
    "ConfigMap",
    "ServiceAccount",
    "Role",
    "RoleBinding",
    "NetworkPolicy",
)
FAR_SECONDS = (-400 * 86400.0, -90_000.0, 90_000.0, 400 * 86400.0)


def _refuses(world: World, a: int, b: int) -> None:
    sorts = [sort for sort in SORTS if sort != FOR_GOOD]
    sort = sorts[b % len(sorts)]
    kind = "Pod" if SORTS[sort].pods_only or b >= len(sorts) else KINDS[a % len(KINDS)]
    world.api.refusals.append(Refusal(world.mark(), sort, kind))


def _refuses_for_good(world: World, a: int, b: int) -> None:
    world.memory.refused_for_good = True
    world.api.refusals.append(Refusal(world.mark(), FOR_GOOD, KINDS[a % len(KINDS)]))


def _allows(world: World, a: int, b: int) -> None:
    world.lift(world.api.refusals[: 1 + a % 2])


def _stands(world: World, a: int, b: int) -> None:
    """Keep the situation until a wait has been explained."""
    world.stand()


def _late_warning(world: World, a: int, b: int) -> None:
    """Deliver an event from before the run after other events."""
    about = (
        ("StatefulSet", f"{NAME}-trainer"),
        ("ReplicaSet", f"{NAME}-inference-5d4f"),
        ("PersistentVolumeClaim", f"{NAME}-data"),
    )[a % 3]
    mark = world.mark()
    world.lifted.add(mark)
    text = f"exceeded quota: {mark}, requested: count=1" if b % 2 else f"pool {mark} is full"
    world.api.warn(
        about,
        "ProvisioningFailed" if a % 3 == 2 else "FailedCreate",
        text,
        age=world.clock.now() - EPOCH + 600.0 + 60 * b,
        uid="earlier" if a % 3 == 2 else None,
    )
    if b % 3 == 0:  # its object also lacks pods for another reason
        world.cluster.round()  # its controller has seen the lifted refusal
        world.cluster.idle.add("Deployment")
        for pod in world.cluster.pods("inference"):
            world.api.drop("Pod", pod["metadata"]["name"])
        world.stand()
        world.cluster.idle.clear()


def _unbound(world: World, a: int, b: int) -> None:
    """Stop the provisioning of volumes for some time, with changing reasons."""
    world.unbind()


def _clock_far_off(world: World, a: int, b: int) -> None:
    world.clock.set_forward(FAR_SECONDS[a % len(FAR_SECONDS)])


def _retries_far_off(world: World, a: int, b: int) -> None:
    """Set the time of the next attempt with a wrong clock."""
    pod = world.cluster.pod("trainer", b)
    if pod is not None and has_started(pod) and end_of(pod) is None:
        world.cluster.exit(pod, exit_codes.FAILURE)
        world.hear()
        world.operate(8)
    if world.status.get("phase") == "Restarting":
        world.edit_status(nextRetryTime=format_rfc3339(world.clock.wall() + 10.0 ** (4 + a % 5)), message="edited")


REFUSALS: dict[str, Action] = {
    "refused": Action(_refuses, 3),
    "refused for good": Action(_refuses_for_good, 1),
    "allowed": Action(_allows, 3),
    "long wait": Action(_stands, 1),
    "late warning": Action(_late_warning, 2),
    "volume late": Action(_unbound, 2),
    "clock far off": Action(_clock_far_off, 1),
    "retry far off": Action(_retries_far_off, 3),
}
