"""Random faults against a small Kubernetes, with a stale cache and an operator that dies between requests.

Invariants: trainers of two attempts never run together, counted restarts stay within the limit, attempts only increase,
nothing is rendered twice within an attempt, and terminal states are final. When the faults stop, the run recovers
without help.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlrun_operator.names import ATTEMPT_LABEL, RESTART_ANNOTATION, Ref, attempt_of
from tests.unit.operator.decide.kube import Kube

MAX_RESTARTS = 2
SPEC = {
    "trainer": {"replicas": 2},
    "inference": {"replicas": 1},
    "maxSteps": 50,
    "nodeLoss": {"forceDeleteSeconds": 5},
    "progress": {"deadlineSeconds": 40, "startupDeadlineSeconds": 120},
    "failurePolicy": {"maxRestarts": MAX_RESTARTS, "backoff": {"initialSeconds": 2, "maxSeconds": 4}},
}
PARTS = ("workloads", "pods", "lease")
CODES = st.sampled_from([0, 1, 10, 137, 143, 255])
EDITS: list[dict[str, object]] = [
    {"seed": 1},
    {"maxSteps": 60},
    {"activeDeadlineSeconds": 60},
    {"inference": {"replicas": 2}},
    {"trainer": {"replicas": 0}},
]


class Life(RuleBasedStateMachine):
    """A run, its operator, and all possible faults."""

    def __init__(self) -> None:
        super().__init__()
        self.kube = Kube(SPEC)
        self.attempt = 0
        self.step = 0
        self.ended: str | None = None
        self.suspending: int | None = None
        self.applied: list[tuple[str, int]] = []

    # ---- the operator

    @rule(lag=st.sets(st.sampled_from(PARTS)))
    def operates(self, lag: set[str]) -> None:
        self.kube.do(self.kube.decide(frozenset(lag)))

    @rule(lag=st.sets(st.sampled_from(PARTS)), stop_after=st.integers(0, 16))
    def dies(self, lag: set[str], stop_after: int) -> None:
        self.kube.do(self.kube.decide(frozenset(lag)), stop_after=stop_after)
        self.kube.new_operator()
        self.kube.watching_since = self.kube.now

    # ---- the cluster

    @rule(seconds=st.integers(0, 5))
    def time_passes(self, seconds: int) -> None:
        self.kube.now += seconds

    @rule(stale=st.booleans())
    def controllers_work(self, stale: bool) -> None:
        self.kube.controllers(stale)

    @rule()
    def a_quiet_while(self) -> None:
        for _ in range(4):
            self.kube.do(self.kube.decide())
            self.kube.controllers()
            self.kube.now += 1

    @rule()
    @precondition(lambda self: self._trains())
    def trains(self) -> None:
        self.step += 1
        if Ref("Lease", "run-progress") in self.kube.objects:
            self.kube.report(self.step, resumed=max(0, self.step - 3))

    @rule()
    @precondition(lambda self: self._trains())
    def hangs(self) -> None:
        for _ in range(3):
            self.kube.now += 15
            if Ref("Lease", "run-progress") in self.kube.objects:
                self.kube.report(self.step, resumed=max(0, self.step - 3))

    @rule()
    @precondition(lambda self: self._trains() and self.step > 1)
    def finishes(self) -> None:
        self.kube.exit("orchestrator", 0)

    # ---- faults

    @rule(index=st.integers(0, 1), code=CODES)
    def a_trainer_exits(self, index: int, code: int) -> None:
        if index < len(self.kube.pods("trainer")):
            self.kube.exit("trainer", code, index)

    @rule(code=st.sampled_from([1, 10, 137, 143, 143, 78]))
    @precondition(lambda self: self._trains())
    def the_orchestrator_exits(self, code: int) -> None:
        self.kube.exit("orchestrator", code)

    @rule(
        role=st.sampled_from(["trainer", "orchestrator", "inference"]),
        how=st.sampled_from(["delete", "disrupt", "force"]),
    )
    def a_pod_goes(self, role: str, how: str) -> None:
        pods = self.kube.pods(role)
        if pods and how == "force":
            del self.kube.objects[self.kube.ref(role)]
        elif pods:
            getattr(self.kube, how)(*([self.kube.ref(role)] if how == "delete" else [role]))

    @rule(roles=st.sets(st.sampled_from(["trainer", "orchestrator", "inference"])))
    def pods_end_slowly(self, roles: set[str]) -> None:
        self.kube.lingering = roles

    @rule(ready=st.sampled_from(["True", "Unknown"]))
    def the_node_answers_or_not(self, ready: str) -> None:
        conditions = [{"type": "Ready", "status": ready, "lastTransitionTime": "2026-01-01T00:00:00Z"}]
        self.kube.nodes = [{"metadata": {"name": "node-1"}, "status": {"conditions": conditions}}]

    @rule(kind=st.sampled_from(["StatefulSet run-trainer", "Deployment run-inference"]))
    def a_workload_is_deleted(self, kind: str) -> None:
        ref = Ref(*kind.split())
        if ref in self.kube.objects:
            self.kube.delete(ref)

    @rule(replicas=st.integers(0, 3))
    def somebody_scales(self, replicas: int) -> None:
        trainer = self.kube.objects.get(Ref("StatefulSet", "run-trainer"))
        if trainer is not None:
            trainer["spec"]["replicas"] = replicas
            trainer["metadata"]["generation"] += 1

    @rule(edit=st.sampled_from(EDITS))
    def somebody_edits(self, edit: dict[str, object]) -> None:
        self.kube.edit(**{"trainer": {"replicas": 2}, **edit})

    @rule(suspend=st.booleans())
    def somebody_suspends_or_resumes(self, suspend: bool) -> None:
        self.kube.edit(suspend=suspend)

    @rule(value=st.sampled_from(["2023-11-14T22:13:20Z", "2023-11-14T22:13:21Z", "now"]))
    def somebody_asks_for_a_restart(self, value: str) -> None:
        self.kube.run["metadata"]["annotations"] = {RESTART_ANNOTATION: value}

    # ---- invariants

    def _trains(self) -> bool:
        pods = self.kube.pods("orchestrator")
        return bool(pods) and pods[-1]["status"]["phase"] == "Running" and "attempt" in self.kube.status

    @invariant()
    def never_two_attempts_at_once(self) -> None:
        alive = {
            pod["metadata"]["labels"][ATTEMPT_LABEL]
            for role in ("trainer", "orchestrator")
            for pod in self.kube.pods(role)
        }
        assert len(alive) <= 1, self.kube.writes[-20:]

    @invariant()
    def counted_restarts_stay_within_the_limit(self) -> None:
        assert self.kube.status.get("restartsCountedTowardsMax", 0) <= MAX_RESTARTS

    @invariant()
    def attempts_only_rise(self) -> None:
        attempt = self.kube.status.get("attempt", 0)
        assert attempt >= self.attempt
        self.attempt = attempt
        trainer = self.kube.objects.get(Ref("StatefulSet", "run-trainer"))
        assert trainer is None or (attempt_of(trainer["metadata"]) or 0) >= attempt - 1

    @invariant()
    def nothing_is_rendered_again_within_its_attempt(self) -> None:
        assert self.kube.rendered_again == []
        made = [attempt for kind, attempt in self.kube.applied if kind == "StatefulSet"]
        assert made == sorted(made), made

    @invariant()
    def no_attempt_begins_while_it_is_being_suspended(self) -> None:
        status = self.kube.status
        suspending = status.get("phase") == "Suspending"
        if suspending and self.suspending is not None:
            assert status["attempt"] == self.suspending, self.kube.writes[-20:]
            assert self.kube.applied == self.applied, "nothing is made on the way"
        self.suspending = status["attempt"] if suspending else None
        self.applied = list(self.kube.applied)

    @invariant()
    def the_end_is_the_end(self) -> None:
        phase, reason = self.kube.status.get("phase"), self.kube.condition("Failed").get("reason")
        if self.ended is not None and phase != self.ended:
            begun = (
                self.ended,
                self.kube.run["spec"]["maxSteps"] > 50,
                bool(self.kube.status.get("restartRequestedAt")),
            )
            assert begun[:2] == ("Complete", True) or (begun[0], begun[2]) == ("Failed", True)
        over = phase == "Complete" or (
            phase == "Failed" and reason != "InvalidConfiguration"
        )  # a correction may still repair it
        self.ended = phase if over else None

    def teardown(self) -> None:
        """Stop the faults: the run must reach a healthy or final state without help."""
        suspends = self.kube.run["spec"].get("suspend", False)
        self.kube.edit(trainer={"replicas": 2})
        self.kube.lingering = set()
        for _ in range(12):
            self.kube.tick(3)
        phases = ("Suspended",) if suspends else ("Starting", "Running")
        assert self.kube.status["phase"] in (*phases, "Complete", "Failed"), self.kube.status["message"]
        if self.kube.status["phase"] in ("Starting", "Running"):
            assert len(self.kube.pods("trainer")) == 2, self.kube.status
            assert self.kube.attempts_of_trainers() == {str(self.kube.status["attempt"])}
            assert len(self.kube.pods("orchestrator")) == 1
        else:
            assert (self.kube.pods("trainer"), self.kube.pods("inference")) == ([], [])


TestLife = Life.TestCase
TestLife.pytestmark = [pytest.mark.full]  # the gate runs the histories of tests/sim
TestLife.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
