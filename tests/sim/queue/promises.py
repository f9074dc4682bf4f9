"""Promises of docs/queueing.md about one pass of admission, as pure functions of its inputs and its plan.

Each function yields once for each situation of its promise: an empty text if the promise is kept, otherwise the fault.
The number of situations shows that the simulation reached them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from rlrun_operator.queue.admit import TRIES
from rlrun_operator.queue.queue_model import Applicant, Plan, PodSet, QueueRules, QueueState

GPU = "nvidia.com/gpu"
_CLOSE = 1e-6


@dataclass(frozen=True)
class Pass:
    """One pass of admission.

    Attributes:
        now: seconds, like all times of runs.
        runs: runs in the view of the pass.
        rules: settings of admission.
        before: state of the previous pass.
        plan: outcome.
        nodes: GPUs by node.
        known: source of the capacity: nodes, total or blind.
    """

    now: float
    runs: tuple[Applicant, ...]
    rules: QueueRules
    before: QueueState
    plan: Plan
    nodes: Mapping[str, int]
    known: str

    def admits(self, run: Applicant) -> bool:
        """Whether this pass admits the run."""
        return run.uid in self.plan.state.granted and run.uid not in self.before.granted

    def stops(self, run: Applicant, reason: str) -> bool:
        """Whether this pass preempts or releases the run."""
        return run.uid not in self.before.stopping and self.plan.state.stopping.get(run.uid, ("",))[0] == reason

    def waiting(self) -> list[Applicant]:
        """Return the waiting runs at the start of the pass, without those in their back-off."""
        tries = self.before.tries
        return [
            run
            for run in self.runs
            if run.stage == "waiting"
            and run.uid not in self.before.granted
            and tries.get(run.uid, (0, 0.0))[1] <= self.now
        ]

    def releases(self, run: Applicant) -> int:
        """Return the number of consecutive releases of a run."""
        return self.plan.state.tries.get(run.uid, (0, 0.0))[0]

    def positions(self) -> list[tuple[int, Applicant]]:
        """Return the waiting runs after the pass with their positions."""
        found = [(self.plan.verdicts[run.uid].position, run) for run in self.runs if run.uid in self.plan.verdicts]
        return sorted(((at, run) for at, run in found if at is not None), key=lambda one: one[0])

    def free(self, *without: Applicant) -> dict[str, float]:
        """Return the free GPUs by node at the start of the pass, ignoring the pods of the runs `without`."""
        free = {name: float(gpus) for name, gpus in self.nodes.items()}
        for run in self.runs:
            for pod in run.pods if run not in without else ():
                if pod.node in free:
                    free[pod.node] -= pod.requests[GPU]
        return free

    def lacking(self) -> list[Applicant]:
        """Return the admitted runs with pods without nodes."""
        holding = [run for run in self.runs if run.stage == "holding"]
        return [run for run in holding if missing(run) or not run.pods]

    def is_settled(self) -> bool:
        """Whether the free GPUs equal those of the nodes: each admission is recorded, and each pod has a node."""
        return self.known == "nodes" and not self.before.granted and not self.lacking()


def missing(run: Applicant) -> tuple[PodSet, ...]:
    """Return the pods of a run without a node."""
    placed = [pod.role for pod in run.pods if pod.node is not None]
    left = [(pods, pods.count - placed.count(pods.role)) for pods in run.gang]
    return tuple(PodSet(pods.role, count, pods.requests) for pods, count in left if count > 0)


def gpus(run: Applicant) -> float:
    """Return the GPUs of a whole run."""
    return sum(pods.count * pods.requests[GPU] for pods in run.gang)


def fits(gang: tuple[PodSet, ...], free: Mapping[str, float]) -> bool:
    """Whether the pods fit, the largest first, each on the node with the least remaining room."""
    left = dict(free)
    for pods in sorted(gang, key=lambda each: -each.requests[GPU]):
        for _ in range(pods.count):
            nodes = [name for name, amount in left.items() if amount >= pods.requests[GPU] - _CLOSE]
            if not nodes:
                return False
            left[min(nodes, key=lambda name: left[name])] -= pods.requests[GPU]
    return True


def preempted(seen: Pass) -> tuple[Applicant | None, list[Applicant]]:
    """Return the run for which this pass preempts others, and the preempted runs."""
    victims = [run for run in seen.runs if seen.stops(run, "Preempted")]
    kept = seen.plan.state.reservation
    head = next((run for run in seen.runs if kept is not None and run.uid == kept.uid), None)
    return head, victims


def young_runs_are_protected(seen: Pass) -> Iterator[str]:
    """A run is not preempted for a share in the time after its start."""
    head, victims = preempted(seen)
    for run in victims:
        if head is not None and run.priority == head.priority:
            young = seen.now - run.started < seen.rules.protect_seconds
            yield f"{run.uid} is preempted {seen.now - run.started:.0f} s after its start" if young else ""


def each_victim_is_needed(seen: Pass) -> Iterator[str]:
    """The beneficiary would not fit without any one of the preempted runs."""
    head, victims = preempted(seen)
    if head is None or not victims or not seen.is_settled() or any(map(seen.admits, seen.runs)):
        return
    leaving = [run for run in seen.runs if run.stage == "leaving"]
    for spared in victims:
        free = seen.free(*leaving, *(run for run in victims if run is not spared))
        yield f"{spared.uid} is preempted for {head.uid} and not needed" if fits(head.gang, free) else ""


def preemption_follows_its_setting(seen: Pass) -> Iterator[str]:
    """Never: no run; Priority: runs of a lower priority; PriorityAndShare: also runs of the same priority in another namespace."""
    head, victims = preempted(seen)
    for run in victims:
        lower = head is not None and run.priority < head.priority
        equal = head is not None and run.priority == head.priority and run.namespace != head.namespace
        allowed = {"Never": False, "Priority": lower, "PriorityAndShare": lower or equal}[seen.rules.preemption]
        yield "" if allowed else f"{run.uid} is preempted with {seen.rules.preemption}"


def preemption_leaves_shares(seen: Pass) -> Iterator[str]:
    """For a share, a namespace gets no more than its due share, and the preempted one keeps its due share."""
    head, victims = preempted(seen)
    equal = [run for run in victims if head is not None and run.priority == head.priority]
    if head is None or not equal or not seen.is_settled() or any(map(seen.admits, seen.runs)):
        return
    total, rules = sum(seen.nodes.values()), seen.rules
    stopping = {run.uid for run in victims if run not in equal} | set(seen.before.stopping)
    there = [run for run in seen.runs if run.stage in ("waiting", "holding")]
    weights = sum(rules.weight_of(name) for name in {run.namespace for run in there})
    for run in equal:
        held = [one for one in seen.runs if one.stage == "holding" and one.uid not in stopping and one not in equal]
        keeps, gets = (
            sum(gpus(one) for one in held if one.namespace == each) / total for each in (run.namespace, head.namespace)
        )
        due, wants = rules.weight_of(run.namespace) / weights, rules.weight_of(head.namespace) / weights
        kept = keeps >= due - _CLOSE and gets + gpus(head) / total <= wants + _CLOSE
        yield (
            ""
            if kept
            else f"{run.namespace} keeps {keeps:.2f} of {due:.2f}, {head.namespace} gets {gets:.2f} of {wants:.2f}"
        )


def releases_move_a_run_to_the_end(seen: Pass) -> Iterator[str]:
    """After three consecutive releases a run comes after all others, for any priority."""
    for (_, first), (_, second) in pairwise(seen.positions()):
        often = [seen.releases(run) >= TRIES for run in (first, second)]
        if any(often) and not all(often):
            yield f"{first.uid}, released {seen.releases(first)} times, comes before {second.uid}" if often[0] else ""


def priority_comes_first(seen: Pass) -> Iterator[str]:
    """The higher priority comes first among runs without three releases."""
    for (_, first), (_, second) in pairwise(seen.positions()):
        if first.priority != second.priority and max(seen.releases(first), seen.releases(second)) < TRIES:
            yield f"{first.uid} comes before {second.uid}" if first.priority < second.priority else ""


def arrival_decides_within_a_namespace(seen: Pass) -> Iterator[str]:
    """Runs of one namespace and priority start in order of arrival, unless they were released or have reserved room."""
    kept, last = seen.plan.state.reservation, dict[tuple[str, int], Applicant]()
    for _, run in seen.positions():
        if seen.releases(run) or (kept is not None and kept.uid == run.uid):
            continue
        before = last.get((run.namespace, run.priority))
        last[run.namespace, run.priority] = run
        if before is not None:
            yield f"{before.uid} comes before {run.uid}, which came earlier" if before.since > run.since else ""


def kept_room_stays_free(seen: Pass) -> Iterator[str]:
    """No run of the same or a lower priority starts if the scheduler could put it into reserved room."""
    kept = seen.before.reservation
    holder = next((run for run in seen.waiting() if kept is not None and run.uid == kept.uid), None)
    now = seen.plan.state.reservation
    stays = kept is not None and (seen.admits(holder) if holder is not None and now is None else now == kept)
    if kept is None or holder is None or not stays or not seen.is_settled():
        return
    free, new = seen.free(), [run for run in seen.waiting() if seen.admits(run)]
    for run in seen.waiting():
        if run is holder or run.priority > holder.priority or (new and new != [run]):
            continue
        asked = [pods.requests[GPU] for pods in run.gang]
        lands = [
            node
            for node, amounts in kept.amounts.items()
            for one in asked
            if free.get(node, 0.0) - amounts.get(GPU, 0.0) < one <= free.get(node, 0.0) + _CLOSE
        ]
        if lands:
            yield f"{run.uid} starts and may land on {lands[0]}, which is kept for {holder.uid}" if new else ""


def admitted_runs_without_room_come_first(seen: Pass) -> Iterator[str]:
    """While an admitted run lacks room for its pods, no later one of the same or a lower priority starts."""
    if seen.known != "nodes" or seen.before.granted:
        return
    free, plan = seen.free(), seen.plan
    lost = [run for run in seen.lacking() if run.uid in seen.before.lacking and not fits(missing(run), free)]
    ranks = [run.priority for run in lost if plan.verdicts[run.uid].admitted]
    for run in seen.waiting():
        if ranks and run.priority <= max(ranks) and fits(run.gang, free):
            yield f"{run.uid} starts while {lost[0].uid} lacks room" if seen.admits(run) else ""


def one_run_at_a_time_is_released(seen: Pass) -> Iterator[str]:
    """If several runs got no nodes in time, one of them gives its room up."""
    lacking, limit = seen.before.lacking, seen.rules.displaced_seconds
    late = [run for run in seen.lacking() if seen.now - lacking.get(run.uid, seen.now) >= limit]
    gone = [run.uid for run in seen.runs if seen.stops(run, "Released")]
    if len(late) > 1 and gone:
        yield "" if len(gone) == 1 else f"{gone} are released at once"


def retries_wait_twice_as_long(seen: Pass) -> Iterator[str]:
    """A released run is retried after 30 s, doubled each time up to ten minutes."""
    for run in seen.runs:
        if seen.stops(run, "Released"):
            count, until = seen.plan.state.tries[run.uid]
            due = min(600.0, 30.0 * 2 ** (count - 1))
            yield (
                "" if abs(until - seen.now - due) < 1 else f"{run.uid} waits {until - seen.now:.0f} s and not {due:.0f}"
            )


def one_run_at_a_time_starts_if_nothing_is_known(seen: Pass) -> Iterator[str]:
    """With unknown capacity, the next run starts when all pods of the previous one have nodes."""
    if seen.known != "blind" or not seen.waiting():
        return
    before = [run.uid for run in seen.lacking()] + list(seen.before.granted)
    new = [run.uid for run in seen.runs if seen.admits(run)]
    if before or new:
        yield f"{new} start after {before}" if len(new) > 1 or (before and new) else ""


Promise = Callable[[Pass], Iterator[str]]
PROMISES: tuple[Promise, ...] = (
    young_runs_are_protected,
    each_victim_is_needed,
    preemption_follows_its_setting,
    preemption_leaves_shares,
    releases_move_a_run_to_the_end,
    priority_comes_first,
    arrival_decides_within_a_namespace,
    kept_room_stays_free,
    admitted_runs_without_room_come_first,
    one_run_at_a_time_is_released,
    retries_wait_twice_as_long,
    one_run_at_a_time_starts_if_nothing_is_known,
)
