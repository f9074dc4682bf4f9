"""Promises of admission, checked after every pass and at the end of a world."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rlrun_operator.queue.admit import TRIES
from rlrun_operator.queue.queue_model import Plan
from tests.sim.queue.promises import PROMISES, Pass, Promise
from tests.sim.queue.world import GPU, LEAVE_SECONDS, LOOK_SECONDS, PODS_SECONDS, RECORD_SECONDS, Run, World

SLACK_SECONDS = 2 * (RECORD_SECONDS + PODS_SECONDS + LEAVE_SECONDS + 6 * LOOK_SECONDS)
"""Delays of the world between two steps of the queue."""
SHARE_ERROR = 0.05


class BrokenError(Exception):
    """Broken invariant."""


class Checks:
    """Checker of one world.

    Args:
        world: world before its first pass.
        promises: promises to check for each pass.

    Attributes:
        world: the given world.
        reached: number of situations of each promise.
    """

    def __init__(self, world: World, promises: Sequence[Promise] = PROMISES) -> None:
        self.world = world
        self._promises = promises
        self.reached: Counter[str] = Counter()
        self._first: tuple[str, float] | None = None
        self._kept: dict[str, float] = {}
        world.watchers.append(self.after_pass)

    def after_pass(self, world: World, plan: Plan) -> None:
        """Check the invariants of each pass."""
        assert world.seen is not None
        self._promised(world.seen)
        _positions(plan)
        _whole(world)
        _rooms(world)
        if world.settings.known == "nodes":
            self._passed(world, plan)
            if not _disturbed(world):
                _conserves(world, plan)
                self._first_begins(world, plan)
            self._keeps(world, plan)

    def _promised(self, seen: Pass) -> None:
        for promise in self._promises:
            for broken in promise(seen):
                self.reached[promise.__name__] += 1
                if broken:
                    raise BrokenError(f"{promise.__name__}: {broken}")

    def _passed(self, world: World, plan: Plan) -> None:
        """No run starts while one of a higher priority waits that fits into the same room."""
        for run in world.there:
            verdict = plan.verdicts.get(run.uid)
            if verdict is None or not verdict.admitted or run.stage != "waiting" or run.admitted_at is not None:
                continue
            for other in world.there:
                waits = plan.verdicts.get(other.uid)
                if waits is None or waits.position is None or waits.reason == "BackingOff":
                    continue
                if plan.state.tries.get(other.uid, (0, 0.0))[0] >= TRIES:
                    continue  # its priority no longer counts
                if other.priority > run.priority and _dominates(run, other):
                    raise BrokenError(f"{run.uid} of priority {run.priority} begins where {other.uid} would fit")

    def _first_begins(self, world: World, plan: Plan) -> None:
        """The first run of the queue starts within the time in which others may pass it, plus the longest of their
        durations.
        """
        first = next(
            (u for u, v in plan.verdicts.items() if v.position == 1 and v.reason == "WaitingForResources"), None
        )
        if first is None or self._first is None or self._first[0] != first:
            self._first = (first, world.now) if first is not None else None
            return
        longest = max(run.work for run in world.runs.values())
        bound = world.settings.rules.pass_seconds + longest + SLACK_SECONDS
        if world.now - self._first[1] > bound and not world.settings.restarts:
            raise BrokenError(f"{first} is the first to begin for more than {bound:.0f} s")

    def _keeps(self, world: World, plan: Plan) -> None:
        """A run with reserved room starts when the running ones have ended."""
        kept = plan.state.reservation
        if kept is None:
            self._kept = {}
            return
        since = self._kept.setdefault(kept.uid, world.now)
        self._kept = {kept.uid: since}
        longest = max((run.work for run in world.runs.values()), default=0.0)
        if world.now - since > longest + SLACK_SECONDS and not _disturbed(world) and not world.settings.restarts:
            raise BrokenError(f"room is kept for {kept.uid} since {world.now - since:.0f} s and it does not begin")


def at_the_end(world: World) -> None:
    """Check the invariants of the end, without further events."""
    empty = dict(world.settings.nodes)
    for run in world.runs.values():
        if run.stage is not None and _fits_empty(world, run, empty):
            raise BrokenError(
                f"{run.uid} never ended: {run.stage}, {world.plan.verdicts.get(run.uid) if world.plan else None}"
            )
        if run.stage is None and not run.disturbed and abs(run.spent - run.work) > 1e-3:
            raise BrokenError(f"{run.uid} trained {run.spent:.0f} s for {run.work:.0f} s of work")
    _starvation(world)
    _ping_pong(world)
    _useful(world)
    if any(world.used(node) for node in world.nodes if not any(r.stage for r in world.runs.values())):
        raise BrokenError("what is over holds room")


def shares(world: World) -> dict[str, tuple[float, float]]:
    """Return the actual and the due share of all GPU seconds for each namespace."""
    rules, total = world.settings.rules, sum(world.held.values())
    weights = sum(rules.weight_of(name) for name in world.held)
    return {name: (held / total, rules.weight_of(name) / weights) for name, held in world.held.items()}


def fair(world: World) -> None:
    """Check that shares over time match the weights."""
    for name, (had, due) in shares(world).items():
        if abs(had - due) > SHARE_ERROR:
            raise BrokenError(f"namespace {name} had {had:.3f} of the cluster and not {due:.3f}")


def _positions(plan: Plan) -> None:
    waiting = sorted(v.position for v in plan.verdicts.values() if v.position is not None)
    if waiting != list(range(1, len(waiting) + 1)):
        raise BrokenError(f"positions are {waiting}")
    if any(v.position is not None and v.waiting != len(waiting) for v in plan.verdicts.values()):
        raise BrokenError("the length of the queue is wrong")
    if any(v.position is None and not v.admitted and not v.stops for v in plan.verdicts.values()):
        raise BrokenError("a run that waits has no position")


def _whole(world: World) -> None:
    """Pods are created completely and only for admitted runs."""
    for run in world.there:
        if run.pods and run.stage == "waiting":
            raise BrokenError(f"{run.uid} has pods and is not admitted")
        if run.stage == "holding" and run.pods and len(run.pods) != sum(s.count for s in run.gang):
            raise BrokenError(f"{run.uid} has {len(run.pods)} pods")


def _rooms(world: World) -> None:
    """Without interference every admitted run's pods get nodes: room given twice shows as a pod without a node."""
    if world.settings.known != "nodes" or world.settings.losses:
        return
    # If the scheduler packs differently from the queue, admitted pods may find no room.
    counted = [run for run in world.there if run.stage == "holding"]
    admitted = sum(
        run_gpus(run) if not (world.settings.sloppy and run.pods) else sum(p.requests[GPU] for p in run.pods if p.node)
        for run in counted
    )
    if admitted > sum(world.nodes.values()):
        raise BrokenError(f"{admitted:g} GPUs are given away, and there are {sum(world.nodes.values())}")
    if not world.settings.uniform or world.settings.sloppy:
        return
    for run in world.there:
        if run.stage == "holding" and any(pod.node is None for pod in run.pods):
            raise BrokenError(f"{run.uid} was admitted and its pods find no room")


def _conserves(world: World, plan: Plan) -> None:
    """A run that fits waits only for reserved room or unknown capacity."""
    if plan.state.reservation is not None or plan.state.granted:
        return
    for run in world.there:
        verdict = plan.verdicts.get(run.uid)
        if verdict is None or verdict.position is None or verdict.reason == "BackingOff":
            continue
        free = {n: gpus - world.used(n) for n, gpus in world.nodes.items()}
        if all(r.stage != "holding" or r.pods for r in world.there) and _fits(run, free):
            raise BrokenError(f"{run.uid} fits and waits: {verdict.message}")


def _starvation(world: World) -> None:
    """Each other run passes it at most once and delays it at most by its own duration.

    Two runs of a higher priority, or a preemption, may insert one more run.
    """
    if _disturbed(world) or world.settings.known != "nodes":
        return
    rules = world.settings.rules
    for run in world.runs.values():
        ahead = [other for other in world.runs.values() if other is not run]
        bound = rules.pass_seconds + SLACK_SECONDS + sum(other.work + SLACK_SECONDS for other in ahead)
        if run.waits > bound:
            raise BrokenError(f"{run.uid} waited {run.waits:.0f} s; the bound is {bound:.0f} s")


def _ping_pong(world: World) -> None:
    """Two runs never take each other's room in turn."""
    for i, (when, victim, head) in enumerate(world.preemptions):
        for then, other, for_whom in world.preemptions[i + 1 :]:
            if (other, for_whom) == (head, victim) and then - when < world.settings.rules.protect_seconds:
                raise BrokenError(f"{victim} and {head} preempt each other")


def _useful(world: World) -> None:
    """Every preemption lets its beneficiary start."""
    if _disturbed(world) or world.settings.known == "blind" or world.settings.restarts:
        return
    for when, victim, head in world.preemptions:
        run = world.runs.get(head)
        begun = run.admissions if run is not None else []
        if not any(when <= each <= when + SLACK_SECONDS for each in begun):
            later = [other for then, _, other in world.preemptions if then >= when and other != head]
            if not any(world.runs[o].priority > (run.priority if run else 0) for o in later if o):
                raise BrokenError(f"{victim} was preempted at {when:.0f} for {head}, which began at {begun}")


def _disturbed(world: World) -> bool:
    return bool(world.settings.losses or world.settings.sloppy or world.fragmented)


def run_gpus(run: Run) -> float:
    """Return the GPUs of a whole gang."""
    return sum(pods.count * pods.requests[GPU] for pods in run.gang)


def _fits_empty(world: World, run: Run, nodes: dict[str, int]) -> bool:
    if world.settings.known != "nodes" and sum(s.count * s.requests[GPU] for s in run.gang) > sum(nodes.values()):
        return False
    return _fits(run, {name: float(gpus) for name, gpus in nodes.items()})


def _fits(run: Run, free: dict[str, float]) -> bool:
    """Whether the gang fits, the largest pods first, each on the node with the least remaining room."""
    left = dict(free)
    for pods in sorted(run.gang, key=lambda s: -s.requests[GPU]):
        for _ in range(pods.count):
            fits = [name for name, gpus in left.items() if gpus >= pods.requests[GPU]]
            if not fits:
                return False
            left[min(fits, key=lambda name: left[name])] -= pods.requests[GPU]
    return True


def _dominates(run: Run, other: Run) -> bool:
    """Whether `other` fits in every place in which `run` fits."""
    mine = sorted((s.requests[GPU] for s in run.gang for _ in range(s.count)), reverse=True)
    theirs = sorted((s.requests[GPU] for s in other.gang for _ in range(s.count)), reverse=True)
    return len(theirs) <= len(mine) and all(t <= m for t, m in zip(theirs, mine, strict=False))
