"""Random generation of worlds."""

from __future__ import annotations

from random import Random

from rlrun_operator.names import Role
from rlrun_operator.queue.queue_model import PodSet, QueueRules
from tests.sim.queue.world import GPU, Run, Settings, World

RULES = QueueRules(pass_seconds=60.0, start_seconds=120.0, displaced_seconds=30.0, protect_seconds=120.0)
LONGEST = 600.0
"""Largest training time of a run in seconds."""

SATURATED_SECONDS = 24 * 3600.0


def pods(role: Role, count: int, gpus: int) -> PodSet:
    """Return equal pods with GPUs."""
    return PodSet(role, count, {GPU: float(gpus)})


def random_world(seed: int) -> World:
    """Generate a small cluster with a few runs and possible faults."""
    rng = Random(seed)
    nodes = {f"node-{i}": rng.choice((2, 4, 8)) for i in range(rng.randint(1, 5))}
    total, largest = sum(nodes.values()), max(nodes.values())
    known = rng.choice(("nodes", "nodes", "nodes", "total", "blind"))
    priorities = rng.choice(((0,), (0, 10)))
    size = rng.choice((None, None, min(nodes.values())))
    runs = []
    for i in range(rng.randint(3, 10)):
        gang = _gang(rng, total, largest, rng.choice((1, 2, 4, 8)) if size is None else size, size)
        runs.append(
            Run(
                uid=f"run-{i}",
                namespace=f"team-{rng.randrange(3)}",
                gang=gang,
                work=rng.uniform(60.0, LONGEST),
                came=rng.uniform(0.0, 500.0),
                priority=rng.choice(priorities),
            )
        )
    weights = {f"team-{i}": float(rng.choice((1, 1, 2, 3))) for i in range(3)}
    preemption = rng.choice(("PriorityAndShare", "PriorityAndShare", "Priority", "Never"))
    rules = QueueRules(
        weights, preemption, RULES.pass_seconds, 86400.0, RULES.start_seconds, RULES.displaced_seconds, 120.0, 600.0
    )
    settings = Settings(nodes, runs, rules, known, size is not None, sloppy=known != "nodes" or rng.random() < 0.2)
    if rng.random() < 0.3:
        lost = rng.choice(sorted(nodes))
        settings.losses = [(rng.uniform(50.0, 900.0), lost, rng.uniform(20.0, 900.0))]
    if rng.random() < 0.2:
        settings.restarts = [rng.uniform(50.0, 900.0)]
    return World(settings, rng)


def _gang(rng: Random, total: int, largest: int, size: int, engine: int | None) -> tuple[PodSet, ...]:
    """Generate a gang that mostly fits into the empty cluster."""
    size = min(size, largest)
    trainers = pods("trainer", rng.randint(1, max(1, min(3, total // size))), size)
    if rng.random() < 0.5:
        return (trainers,)
    return trainers, pods("inference", rng.randint(1, 3), engine or 1)


def crowded_world(seed: int) -> World:
    """Generate a run that needs all nodes among an endless sequence of small ones."""
    rng = Random(seed)
    nodes = {f"node-{i}": 4 for i in range(rng.randint(1, 3))}
    small = (pods("trainer", 1, rng.choice((1, 2))),)
    runs = [Run(f"small-{i:05}", "team-0", small, rng.uniform(60.0, 300.0), 0.0) for i in range(4 * len(nodes) + 2)]
    runs.append(Run("big", "team-1", (pods("trainer", len(nodes), 4),), 100.0, rng.uniform(50.0, 300.0)))
    count = [10000]

    def next_one(run: Run, now: float) -> Run:
        count[0] += 1
        namespace, gang = ("team-0", small) if run.uid != "big" else ("team-2", small)
        return Run(f"small-{count[0]:05}", namespace, gang, rng.uniform(60.0, 300.0), now)

    rules = QueueRules(preemption="Priority", pass_seconds=60.0)
    return World(Settings(nodes, runs, rules, until=2000.0, supply=next_one), rng)


def contended_world(seed: int) -> World:
    """Generate a world in which one namespace has the whole cluster before the others arrive, and a node is lost while
    all want more.
    """
    rng = Random(seed)
    nodes = {"node-0": 4, "node-1": 4, "node-2": 4, "node-3": 1}
    early = (pods("trainer", 2, 2),)
    runs = [Run(f"early-{i}", "team-0", early, rng.uniform(400.0, 900.0), float(i)) for i in range(3)]
    for i in range(8):
        gang = (pods("trainer", rng.choice((1, 2)), rng.choice((1, 2))),)
        came, priority = rng.uniform(20.0, 600.0), rng.choice((0, 0, 0, 10))
        runs.append(Run(f"late-{i}", f"team-{1 + i % 2}", gang, rng.uniform(60.0, 300.0), came, priority))
    settings = Settings(nodes, runs, RULES)
    if seed % 2:
        when = rng.uniform(200.0, 500.0)
        settings.losses = [(when, rng.choice(sorted(nodes)), rng.uniform(100.0, 300.0))]
        runs += [Run(f"small-{i}", "team-2", (pods("trainer", 1, 1),), 60.0, when + 5.0 * i) for i in range(1, 5)]
    return World(settings, rng)


def saturated_world(seed: int) -> World:
    """Generate namespaces that want more than the capacity for hours, so that their shares become visible."""
    rng = Random(seed)
    nodes = {f"node-{i}": 8 for i in range(3)}
    teams = {f"team-{i}": float(rng.choice((1, 2, 3))) for i in range(rng.randint(2, 3))}
    runs, lasts = [], {}
    for team in teams:
        gpus, count = rng.choice((1, 2, 4)), rng.choice((1, 2))
        lasts[team] = rng.uniform(900.0, 1800.0)
        gang = (pods("trainer", count, gpus),)
        first = range(24 // (gpus * count) + 2)
        runs += [Run(f"{team}-{i:05}", team, gang, lasts[team], i * 1e-3) for i in first]
    numbers = dict.fromkeys(teams, 1000)

    def next_one(run: Run, now: float) -> Run:
        numbers[run.namespace] += 1
        work = lasts[run.namespace] * rng.uniform(0.7, 1.3)
        return Run(f"{run.namespace}-{numbers[run.namespace]:05}", run.namespace, run.gang, work, now)

    rules = QueueRules(
        teams, preemption=rng.choice(("PriorityAndShare", "Never")), pass_seconds=300.0, half_life_seconds=4 * 3600.0
    )
    return World(Settings(nodes, runs, rules, until=SATURATED_SECONDS, supply=next_one), rng)
