"""One pass over one run against an API server: order, preconditions, refusals, throttled status, events."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest

from rlrun.api.run_status import UNSERVED
from rlrun_operator import validate_spec as judging
from rlrun_operator.decide.running import TAKEN_SECONDS
from rlrun_operator.kube.client import ApiError, Client, UnavailableError
from rlrun_operator.names import Names, Ref
from rlrun_operator.reconcile.apply import ACT_SECONDS
from rlrun_operator.reconcile.observe import LookUps
from rlrun_operator.reconcile.reconciler import Dependencies, Reconciler, merge_patch
from rlrun_operator.runtime.cache import Key, Store
from rlrun_operator.runtime.event_recorder import Poster
from rlrun_operator.runtime.metrics import Metrics
from rlrun_operator.settings import RenderSettings
from rlrun_operator.state import (
    Admission,
    Annotate,
    Apply,
    Decision,
    Delete,
    EventRecord,
    Observed,
    Refusal,
    Scale,
    progress_seconds,
)
from rlrun_operator.status.run_progress import HEARTBEAT_SECONDS
from rlrun_operator.validate_spec import judge_spec
from tests.unit.operator.decisions import scripted_decision
from tests.unit.operator.edge.fake_api import STAMP, FakeApi, serving

RUN = "/apis/rlrun.io/v1alpha1/namespaces/ns/rlruns/a"
SERVICE = "/api/v1/namespaces/ns/services/a-trainer"
STS = "/apis/apps/v1/namespaces/ns/statefulsets/a-trainer"
POD = "/api/v1/namespaces/ns/pods/a-orchestrator-1"
PROGRESS = "/apis/coordination.k8s.io/v1/namespaces/ns/leases/a-progress"
KEY: Key = ("ns", "a")


def child(kind: str = "StatefulSet", name: str = "a-trainer", owner: str | None = None, **more: Any) -> dict[str, Any]:
    version = {"Pod": "v1", "Secret": "v1"}.get(kind, "apps/v1")
    owners = [{"kind": "RLRun", "name": "a", "uid": owner}] if owner else []
    metadata = {"name": name, "namespace": "ns", "labels": {"rlrun.io/run": "a"}, "ownerReferences": owners}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **more}


class Bench:
    """A reconciler with a scripted brain over an API server."""

    def __init__(
        self,
        api: FakeApi,
        client: Client,
        brain: Callable[[Observed], Decision],
        *,
        spec: Mapping[str, Any] | None = None,
    ) -> None:
        self.spec = spec or {}
        self.api, self.client = api, client
        self.seen: list[Observed] = []
        self.again: list[float] = []
        self.woken: list[Key] = []
        self.time = 1000.0
        self.store = Store()
        self.metrics = Metrics(self.store)

        def decide(observed: Observed, now: float, **_: Any) -> Decision:
            self.seen.append(observed)
            return brain(observed)

        clock = lambda: self.time  # noqa: E731
        self.reconciler = Reconciler(
            decide=decide,
            outside=Dependencies(
                client=client,
                store=self.store,
                look_ups=LookUps(client, read_nodes=True, clock=clock),
                poster=Poster(client, "operator-0", clock=clock),
                metrics=self.metrics,
            ),
            settings=RenderSettings(),
            name="team-a",
            again=self._again,
            now=clock,
            clock=clock,
            random=Random(0),
        )
        self.uid = self.seed_run()

    def _again(self, key: Key, seconds: float) -> None:
        self.again.append(seconds)
        self.woken.append(key)

    def seed_run(self, **metadata: Any) -> str:
        document = {"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "metadata": metadata, "spec": self.spec}
        run = self.api.seed(RUN, document)
        self.store.put(run, self.time)
        return str(run["metadata"]["uid"])

    async def go(self) -> None:
        await self.reconciler.reconcile(KEY)

    @property
    def status(self) -> Mapping[str, Any]:
        return self.api.objects[RUN].get("status", {})  # type: ignore[no-any-return]


async def test_everything_is_done_in_the_promised_order_and_the_store_knows_it_at_once() -> None:
    api = FakeApi()
    engines = api.seed("/apis/apps/v1/namespaces/ns/deployments/a-inference", child("Deployment", "a-inference"))
    old = api.seed("/api/v1/namespaces/ns/pods/old", child("Pod", "old"))

    def brain(observed: Observed) -> Decision:
        return scripted_decision(
            status={"phase": "Starting"},
            dry_run=(child(),),
            create=(child("Secret", "a-rlrun"),),
            apply=(Apply(child()),),
            annotate=(
                Annotate(Ref("Pod", "old"), old["metadata"]["uid"], {"example.org/cost": "-1"}),
                Annotate(Ref("Pod", "gone"), "uid-gone", {"example.org/cost": "-1"}),
                Annotate(Ref("Deployment", "a-inference"), "uid-of-another", {"example.org/cost": "-1"}),
            ),
            scale=(Scale(Ref("Deployment", "a-inference"), engines["metadata"]["uid"], 3),),
            delete=(Delete(Ref("Pod", "old"), old["metadata"]["uid"], grace_seconds=0),),
            repair=(Apply(child("Service", "a-trainer")),),
            events=(EventRecord("Normal", "Started", "go"),),
        )

    async with serving(api) as client:
        bench = Bench(api, client, brain)
        await bench.go()
    assert [(verb, path.split("/")[-2]) for verb, path in api.requests] == [
        ("dry-run", "statefulsets"),
        ("create", "ns"),
        ("patch", "statefulsets"),
        ("patch", "pods"),
        ("patch", "pods"),
        ("patch", "deployments"),
        ("get", "deployments"),  # of another UID: was it refused, or is it another one?
        ("patch", "deployments"),
        ("delete", "pods"),
        ("patch", "services"),
        ("patch", "a"),
        ("create", "ns"),
    ]
    assert api.grace == [0]
    assert bench.status == {"phase": "Starting"}
    assert bench.store.get("StatefulSet", "ns", "a-trainer") is not None
    inference = bench.store.get("Deployment", "ns", "a-inference")
    assert inference is not None
    assert inference["spec"] == {"replicas": 3}


async def test_the_next_pass_decides_on_what_this_one_wrote_even_before_the_watch_tells() -> None:
    api = FakeApi()
    async with serving(api) as client:
        bench = Bench(
            api, client, lambda observed: scripted_decision(status={"phase": "Starting"}, apply=(Apply(child()),))
        )
        await bench.go()
        await bench.go()
    assert bench.seen[1].run["status"] == {"phase": "Starting"}
    assert Ref("StatefulSet", "a-trainer") in bench.seen[1].children
    assert min(bench.again) <= 0.2, "own writes bring no watch event: the pass comes again by itself"


async def test_runs_that_share_a_trainer_are_woken_by_a_status_that_no_watch_will_tell() -> None:
    api = FakeApi()
    async with serving(api) as client:
        bench = Bench(api, client, lambda observed: scripted_decision(status={"phase": "Complete"}))
        guest = {"name": "guest", "namespace": "ns", "uid": "uid-of-guest", "resourceVersion": "1"}
        bench.store.put({"kind": "RLRun", "metadata": guest, "spec": {"trainer": {"sharedWith": "a"}}}, bench.time)
        await bench.go()
        assert bench.woken == [("ns", "guest")]
        await bench.go()
        assert bench.woken == [("ns", "guest")], "nothing is written, so nobody is woken"


@pytest.mark.parametrize(
    ("phase", "silent", "reads"),
    [
        ("Running", HEARTBEAT_SECONDS, 1),
        ("Completing", HEARTBEAT_SECONDS, 1),
        ("Running", HEARTBEAT_SECONDS - 1.0, 0),
        ("Complete", HEARTBEAT_SECONDS, 0),
    ],
)
async def test_a_lease_of_which_the_watch_brings_nothing_is_read_before_it_counts_as_silent(
    phase: str, silent: float, reads: int
) -> None:
    api = FakeApi()
    async with serving(api) as client:
        bench = Bench(api, client, lambda observed: scripted_decision(status={"phase": phase}))
        document = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {}, "spec": {"renewTime": "1"}}
        bench.store.put(api.seed(PROGRESS, document), bench.time)
        await bench.go()
        api.seed(PROGRESS, {**document, "spec": {"renewTime": "2"}})
        before = bench.time
        for _ in range(2):
            bench.time = before + silent
            await bench.go()
        assert api.requests.count(("get", PROGRESS)) == reads
        assert bench.seen[-1].lease_changed_at == (bench.time if reads else before)
        bench.time += HEARTBEAT_SECONDS
        await bench.go()
        assert api.requests.count(("get", PROGRESS)) == (0 if phase == "Complete" else reads + 1)


async def test_a_lease_that_nobody_answers_for_is_read_again_before_anything_is_decided() -> None:
    api = FakeApi()
    async with serving(api) as client:
        bench = Bench(api, client, lambda observed: scripted_decision(status={"phase": "Running"}))
        document = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {}, "spec": {"renewTime": "1"}}
        bench.store.put(api.seed(PROGRESS, document), bench.time)
        await bench.go()
        bench.time += HEARTBEAT_SECONDS
        away = (503, "ServiceUnavailable", "away")
        api.hook = lambda verb, path, body: away if (verb, path) == ("get", PROGRESS) else None
        for _ in range(2):
            with pytest.raises(UnavailableError):
                await bench.go()
        assert len(bench.seen) == 1
        api.hook = lambda verb, path, body: None
        await bench.go()
        assert api.requests.count(("get", PROGRESS)) == 3


async def test_an_unchanged_status_is_not_written_and_removed_fields_go() -> None:
    api, statuses = FakeApi(), [{"phase": "Starting", "progress": {"step": 1, "reward": 0.5}}]
    async with serving(api) as client:
        bench = Bench(api, client, lambda observed: scripted_decision(status=statuses[0]))
        await bench.go()
        await bench.go()
        assert len(api.writes()) == 1
        statuses[0] = {"phase": "Starting", "progress": {"step": 2}}
        await bench.go()
    assert bench.status == statuses[0]


async def test_status_shows_direction_controls_as_escapes_and_is_written_once() -> None:
    api = FakeApi()
    async with serving(api) as client:
        bench = Bench(
            api,
            client,
            lambda observed: scripted_decision(status={"phase": "Failed", "message": "pod said \u202eolleh"}),
        )
        await bench.go()
        await bench.go()
    assert bench.status["message"] == "pod said \\u202eolleh"
    assert len(api.writes()) == 1


async def test_a_crd_that_drops_a_field_does_not_make_the_operator_write_for_ever() -> None:
    api, status = FakeApi(), {"phase": "Starting", "future": 1}
    original = api._patch

    def pruning(request: Any, path: str, body: dict[str, Any]) -> Any:
        body.get("status", {}).pop("future", None)
        return original(request, path, body)

    api._patch = pruning  # type: ignore[method-assign]
    async with serving(api) as client:
        bench = Bench(api, client, lambda observed: scripted_decision(status=dict(status)))
        for _ in range(5):
            await bench.go()
        assert len(api.writes()) == 1
        status["phase"] = "Running"
        await bench.go()
    assert bench.status == {"phase": "Running"}


@pytest.mark.parametrize(("urgency", "patience"), [("now", 0.0), ("soon", 2.0), ("progress", 15.0)])
async def test_statuses_of_little_urgency_are_written_together(urgency: Any, patience: float) -> None:
    api, step = FakeApi(), 0
    async with serving(api) as client:
        bench = Bench(
            api,
            client,
            lambda observed: scripted_decision(
                status={"step": step}, urgency=urgency, events=(EventRecord("Normal", f"S{step}", "s"),)
            ),
        )
        await bench.go()
        for number in range(1, 5):
            step = number
            bench.time += 0.25
            await bench.go()
        if patience:
            assert bench.status == {"step": 0}
            assert bench.again[-1] == pytest.approx(patience - 1.0)
            assert not any("S4" in str(o) for o in api.objects.values()), "an event comes after its status, not before"
        bench.time += patience
        await bench.go()
    assert bench.status == {"step": 4}
    assert len([w for w in api.writes() if w[1].endswith("/status")]) == (5 if not patience else 2)
    assert any("S4" in str(o) for o in api.objects.values())


def test_progress_alone_is_told_less_often_of_an_old_run_and_of_one_among_many() -> None:
    assert progress_seconds(age=0.0, runs=1) == progress_seconds(age=299.0, runs=50) == 15.0
    assert progress_seconds(age=600.0, runs=1) == progress_seconds(age=0.0, runs=100) == 30.0
    assert progress_seconds(age=86400.0, runs=1) == progress_seconds(age=0.0, runs=1000) == 60.0


async def test_a_child_taken_for_absent_is_left_alone_when_it_exists() -> None:
    api = FakeApi()

    def brain(observed: Observed) -> Decision:
        if observed.children:
            return scripted_decision(status={"phase": "Running"})
        return scripted_decision(status={"phase": "Starting"}, apply=(Apply(child(), expect_absent=True),))

    async with serving(api) as client:
        bench = Bench(api, client, brain)
        api.seed(STS, child(spec={"replicas": 2}))  # the watch has not told yet
        await bench.go()
    assert api.objects[STS]["spec"] == {"replicas": 2}
    assert bench.status == {"phase": "Running"}
    assert [path for verb, path in api.writes()] == [STS, f"{RUN}/status"], (
        "the first one was refused by its precondition"
    )


async def test_one_of_somebody_else_that_comes_just_before_the_apply_is_left_alone() -> None:
    api = FakeApi()
    foreign = {"kind": "StatefulSet", "metadata": {"name": "a-trainer"}, "spec": {"replicas": 9}}

    def appear(verb: str, path: str, body: dict[str, Any]) -> tuple[int, str, str] | None:
        if (verb, path) == ("patch", STS):
            api.hook = lambda verb, path, body: None
            api.seed(STS, foreign)
        return None

    api.hook = appear
    async with serving(api) as client:
        bench = Bench(
            api,
            client,
            lambda observed: scripted_decision(
                status={"taken": observed.taken}, apply=() if observed.taken else (Apply(child()),)
            ),
        )
        await bench.go()
    assert api.objects[STS]["spec"] == {"replicas": 9}
    assert bench.status == {"taken": "StatefulSet a-trainer"}


async def test_a_child_that_no_attempt_has_needed_is_made_without_a_look_and_a_runs_own_is_applied_over() -> None:
    api = FakeApi()
    first = scripted_decision(status={}, apply=(Apply(child(spec={"replicas": 1})),))
    async with serving(api) as client:
        bench = Bench(api, client, lambda observed: first)
        await bench.go()
        assert [verb for verb, _ in api.requests] == ["patch"]
        await bench.go()
        assert [verb for verb, _ in api.requests] == ["patch", "patch", "get", "patch"]
        known = api.objects[STS]["metadata"]["resourceVersion"]
        again = scripted_decision(status={}, apply=(Apply(child(spec={"replicas": 1}), known=known),))
        await Bench(api, client, lambda observed: again).go()
    assert [verb for verb, _ in api.requests][4:] == ["patch"], "one that the cache knows needs no look"


async def test_a_child_that_is_absent_is_made() -> None:
    api = FakeApi()
    async with serving(api) as client:
        bench = Bench(
            api, client, lambda observed: scripted_decision(status={}, apply=(Apply(child(), expect_absent=True),))
        )
        await bench.go()
    assert STS in api.objects
    assert [verb for verb, _ in api.requests] == ["patch"]


async def test_a_workload_of_the_same_name_that_somebody_made_anew_is_not_scaled() -> None:
    api, seen = FakeApi(), []

    def brain(observed: Observed) -> Decision:
        known = observed.children[Ref("StatefulSet", "a-trainer")]
        seen.append(known["metadata"]["uid"])
        mine = known["metadata"]["uid"] == "before"
        return scripted_decision(
            status={}, scale=(Scale(Ref("StatefulSet", "a-trainer"), "before", 0),) if mine else ()
        )

    async with serving(api) as client:
        bench = Bench(api, client, brain)
        before = child(spec={"replicas": 2})
        before["metadata"] |= {"uid": "before", "resourceVersion": "1"}
        bench.store.put(before, bench.time)
        after = api.seed("/apis/apps/v1/namespaces/ns/statefulsets/a-trainer", child(spec={"replicas": 2}))
        await bench.go()
    assert seen == ["before", after["metadata"]["uid"]], "it is decided anew, about what there is"
    assert api.objects["/apis/apps/v1/namespaces/ns/statefulsets/a-trainer"]["spec"] == {"replicas": 2}


async def test_a_refusal_goes_back_to_the_brain_and_is_forgotten_with_the_next_spec() -> None:
    api = FakeApi()
    message = "StatefulSet.apps is invalid: spec.template.spec.containers[0].image: Required value"
    api.hook = lambda verb, path, body: (422, "Invalid", message) if verb == "dry-run" else None

    def brain(observed: Observed) -> Decision:
        if observed.rejection:
            return scripted_decision(status={"phase": "Failed", "message": observed.rejection})
        return scripted_decision(status={"phase": "Pending"}, dry_run=(child(),), apply=(Apply(child()),))

    async with serving(api) as client:
        bench = Bench(api, client, brain)
        await bench.go()
        assert message in bench.status["message"]
        assert "a-trainer" in bench.status["message"]
        assert STS not in api.objects, "a refused dry-run stops everything else"
        await bench.go()
        assert [verb for verb, _ in api.requests].count("dry-run") == 1, "it is not asked again"
        bench.store.put(
            api.seed(RUN, {**api.objects[RUN], "metadata": api.objects[RUN]["metadata"] | {"generation": 2}}), 0
        )
        api.hook = lambda verb, path, body: None
        await bench.go()
    assert STS in api.objects


def labelled(kind: str, name: str, run: str | None) -> dict[str, Any]:
    found = child(kind, name)
    found["metadata"]["labels"] = {} if run is None else {"rlrun.io/run": run}
    return found


@pytest.mark.parametrize("step", ["apply", "create"])
@pytest.mark.parametrize(("made_for", "is_own"), [("a", True), ("b", False), (None, False)])
async def test_an_object_of_somebody_else_is_left_alone_and_told_until_it_is_gone(
    step: str, made_for: str | None, is_own: bool
) -> None:
    """An apply with force would take it over and delete it with the run; a claim that exists would be used."""
    api, kind, plural = (
        FakeApi(),
        *(("Service", "services") if step == "apply" else ("PersistentVolumeClaim", "persistentvolumeclaims")),
    )
    path, wanted = f"/api/v1/namespaces/ns/{plural}/a-x", {"apiVersion": "v1"} | labelled(kind, "a-x", "a")
    before = api.seed(path, labelled(kind, "a-x", made_for) | {"spec": {"of": "somebody"}})

    def brain(observed: Observed) -> Decision:
        if observed.taken is not None:
            return scripted_decision(status={"message": f"{observed.taken} is taken"})
        if step == "apply":
            return scripted_decision(status={"message": "begun"}, apply=(Apply(wanted), Apply(child())))
        return scripted_decision(status={"message": "begun"}, create=(wanted,), apply=(Apply(child()),))

    async with serving(api) as client:
        bench = Bench(api, client, brain)
        await bench.go()
        assert ("/apis/apps/v1/namespaces/ns/statefulsets/a-trainer" in api.objects) is is_own
        if is_own:
            assert bench.status == {"message": "begun"}
            return
        assert bench.status == {"message": f"{kind} a-x is taken"}
        assert api.objects[path] == before
        asked = len(api.requests)
        await bench.go()
        assert len(api.requests) == asked, "it is not looked for at each pass"
        del api.objects[path]
        bench.time += TAKEN_SECONDS
        await bench.go()
        assert bench.status == {"message": "begun"}


def quota(name: str) -> Callable[[str, str, Any], tuple[int, str, str] | None]:
    def hook(verb: str, path: str, body: Any) -> tuple[int, str, str] | None:
        full = name in (path.rsplit("/", 1)[1], body.get("metadata", {}).get("name"))
        return (403, "Forbidden", f'"{name}" is forbidden: exceeded quota: small') if full and verb != "get" else None

    return hook


async def test_a_pod_that_a_quota_keeps_out_is_told_while_all_else_goes_on() -> None:
    api = FakeApi()
    api.hook = quota("a-orchestrator-1")

    def brain(observed: Observed) -> Decision:
        told = " ".join(event["message"] for event in observed.events)
        pod = child("Pod", "a-orchestrator-1", spec={})
        status = {"phase": "Starting", "attempt": 1, "message": told}
        repair = (Apply(child("Service", "a-trainer")),)
        return scripted_decision(status=status, dry_run=(pod,), apply=(Apply(pod), Apply(child())), repair=repair)

    async with serving(api) as client:
        bench = Bench(api, client, brain)
        await bench.go()
        assert "exceeded quota: small" in bench.status["message"]
        assert bench.status["attempt"] == 1
        assert STS in api.objects
        assert SERVICE in api.objects
        assert bench.again == [10.0]
        api.hook = lambda verb, path, body: None
        await bench.go()
        await bench.go()
    assert POD in api.objects
    assert bench.status["message"] == ""


async def test_a_repair_that_admission_refuses_stops_no_other_and_is_tried_again() -> None:
    api = FakeApi()
    api.hook = quota("a-inference")

    def brain(observed: Observed) -> Decision:
        repair = (Apply(child("Service", "a-inference")), Apply(child("Service", "a-trainer")))
        told = " ".join(event["message"] for event in observed.events)
        return scripted_decision(status={"phase": "Running", "message": told}, repair=repair)

    async with serving(api) as client:
        bench = Bench(api, client, brain)
        await bench.go()
    assert SERVICE in api.objects
    assert "exceeded quota: small" in bench.status["message"]
    assert bench.again == [10.0]


async def test_a_claim_that_a_quota_keeps_out_is_told_and_nothing_is_recorded_as_done() -> None:
    api = FakeApi()
    api.hook = quota("a-rlrun")

    def brain(observed: Observed) -> Decision:
        told = " ".join(event["message"] for event in observed.events)
        said = [("Scheduled", "False"), ("Reconciling", "True")]
        conditions = [
            {"type": kind, "status": truth, "reason": "Waiting", "message": told, "lastTransitionTime": STAMP}
            for kind, truth in said
        ]
        status = {"phase": "Starting", "attempt": 1, "message": told, "conditions": conditions}
        return scripted_decision(status=status, create=(child("Secret", "a-rlrun"),), apply=(Apply(child()),))

    async with serving(api) as client:
        bench = Bench(api, client, brain)
        await bench.go()
    assert "exceeded quota: small" in bench.status["message"]
    assert bench.status["phase"] == "Pending"
    assert "attempt" not in bench.status, "the attempt has not begun: the next pass must do all of it"
    assert STS not in api.objects


async def test_a_run_whose_resumption_admission_refuses_stays_suspended() -> None:
    """Its last attempt has no pods: taken for the one that goes on, it would fail for that."""
    api = FakeApi()
    api.hook = quota("a-trainer")
    resting = {"type": "Suspended", "status": "True", "reason": "Suspended", "message": "no pod is left"}
    resting["lastTransitionTime"] = STAMP
    before = {"phase": "Suspended", "attempt": 1, "launchedAttempt": 1, "conditions": [resting]}

    def brain(observed: Observed) -> Decision:
        told = " ".join(event["message"] for event in observed.events)
        said = [("Suspended", "False", "NotSuspended"), ("Scheduled", "False", "QuotaExceeded")]
        conditions = [
            {"type": kind, "status": truth, "reason": reason, "message": told, "lastTransitionTime": STAMP}
            for kind, truth, reason in said
        ]
        status = {"phase": "Starting", "attempt": 2, "message": told, "conditions": conditions}
        return scripted_decision(status=status, apply=(Apply(child()),))

    async with serving(api) as client:
        bench = Bench(api, client, brain)
        bench.store.put(api._store(RUN, {**api.objects[RUN], "status": before}), bench.time)
        await bench.go()
    assert (bench.status["phase"], bench.status["attempt"]) == ("Suspended", 1)
    (told,) = [c for c in bench.status["conditions"] if c["type"] == "Suspended"]
    assert told["status"] == "True"
    assert "the run stays suspended: " in told["message"]
    assert "exceeded quota: small" in told["message"]


async def test_what_a_policy_keeps_out_is_waited_for_with_longer_and_longer_pauses_and_nothing_is_made() -> None:
    api = FakeApi()
    denied = 'admission webhook "guard.example.com" denied the request: no such team'
    api.hook = lambda verb, path, body: (400, "BadRequest", denied) if verb == "dry-run" else None

    def brain(observed: Observed) -> Decision:
        told = " ".join(event["message"] for event in observed.events)
        return scripted_decision(
            status={"phase": "Starting", "message": told}, dry_run=(child(),), apply=(Apply(child()),)
        )

    async with serving(api) as client:
        bench = Bench(api, client, brain)
        for _ in range(5):
            await bench.go()
        assert "no such team" in bench.status["message"]
        assert STS not in api.objects
        assert bench.again == [10.0, 20.0, 40.0, 60.0, 60.0]
        api.hook = lambda verb, path, body: None
        await bench.go()
        await bench.go()
    assert STS in api.objects
    assert bench.status["message"] == ""


async def test_of_two_refusals_after_each_other_the_present_one_is_told() -> None:
    api = FakeApi()

    def brain(observed: Observed) -> Decision:
        told = " ".join(event["message"] for event in observed.events)
        return scripted_decision(status={"phase": "Starting", "message": told}, dry_run=(child(),))

    async with serving(api) as client:
        bench = Bench(api, client, brain)
        for team in ("first", "second"):
            denied = f'admission webhook "guard" denied the request: {team}'
            api.hook = lambda verb, path, body, denied=denied: (
                (400, "BadRequest", denied) if verb == "dry-run" else None
            )
            await bench.go()
            assert bench.status["message"] == denied


async def test_missing_rights_are_told_and_retried_not_blamed_on_the_run() -> None:
    api = FakeApi()
    forbidden = 'statefulsets.apps "a-trainer" is forbidden: User "sa" cannot patch resource "statefulsets"'
    api.hook = lambda verb, path, body: (403, "Forbidden", forbidden) if path == STS else None

    def brain(observed: Observed) -> Decision:
        told = " ".join(event["message"] for event in observed.events)
        return scripted_decision(status={"phase": "Failed", "attempt": 1, "message": told}, apply=(Apply(child()),))

    async with serving(api) as client:
        bench = Bench(api, client, brain)
        await bench.go()
    assert bench.status == {"phase": "Pending", "message": forbidden, "conditions": []}
    assert bench.again == [10.0]


DENIED = "ValidatingAdmissionPolicy 'fixed-size' with binding 'all' denied request: ask the platform team"


@pytest.mark.parametrize(
    ("verb", "path", "doing"),
    [
        ("patch", "deployments/a-inference", "be scaled to 3"),
        ("patch", "pods/old", "be annotated"),
        ("delete", "pods/old", "be deleted"),
        ("dry-run", "secrets", "be looked for"),
    ],
)
@pytest.mark.parametrize(
    ("status", "text"),
    [
        (422, DENIED),
        (403, 'pods "x" is forbidden: User "sa" cannot patch resource "pods"'),
        (500, "failed calling webhook"),
    ],
)
async def test_a_refused_write_to_what_exists_is_known_to_the_next_decision_and_the_rest_is_done(
    verb: str, path: str, doing: str, status: int, text: str
) -> None:
    api = FakeApi()
    engines = api.seed("/apis/apps/v1/namespaces/ns/deployments/a-inference", child("Deployment", "a-inference"))
    old = api.seed("/api/v1/namespaces/ns/pods/old", child("Pod", "old"))
    refuses = [True]
    api.hook = lambda done, at, body: (
        (status, "Forbidden", text) if refuses and done == verb and at.endswith(path) else None
    )

    def brain(observed: Observed) -> Decision:
        if observed.lost_key:
            return scripted_decision(status={"told": "the key is lost"})
        return scripted_decision(
            status={
                "told": [f"{one.ref.kind} {one.ref.name} cannot {one.doing}: {one.text}" for one in observed.refused]
            },
            ask=child("Secret", "a-key"),
            annotate=(Annotate(Ref("Pod", "old"), old["metadata"]["uid"], {"example.org/cost": "-1"}),),
            scale=(Scale(Ref("Deployment", "a-inference"), engines["metadata"]["uid"], 3),),
            delete=(Delete(Ref("Pod", "old"), old["metadata"]["uid"], grace_seconds=0),),
            repair=(Apply(child("Service", "a-trainer")),),
        )

    api.seed("/api/v1/namespaces/ns/secrets/a-key", child("Secret", "a-key"))
    async with serving(api) as client:
        bench = Bench(api, client, brain)
        await bench.go()
        name = {"deployments/a-inference": "Deployment a-inference", "secrets": "Secret a-key"}.get(path, "Pod old")
        assert bench.status["told"] == [f"{name} cannot {doing}: {text}"]
        assert SERVICE in api.objects, "nothing else is blocked"
        assert bench.again == [10.0]
        refuses.clear()
        await bench.go()
        await bench.go()
    assert bench.status["told"] == []


@pytest.mark.parametrize(
    "text",
    [
        'RoleBinding.rbac.authorization.k8s.io "a-rlrun" is invalid: roleRef: Invalid value: {}: cannot change roleRef',
        'Service "a-rlrun" is invalid: spec.clusterIPs[0]: Invalid value: ["None"]: may not change once set',
        'ConfigMap "a-rlrun" is invalid: data: Forbidden: field is immutable when `immutable` is set',
    ],
)
@pytest.mark.parametrize("how", ["apply", "repair"])
async def test_what_somebody_has_made_with_other_fixed_fields_is_no_mistake_of_the_specification(
    how: str, text: str
) -> None:
    """Nobody but whoever deletes it can help, and trying again finds that: a rejection would stand until the next edit."""
    api, part = FakeApi(), "/api/v1/namespaces/ns/services/a-rlrun"
    api.seed(part, child("Service", "a-rlrun"))
    api.hook = lambda verb, path, body: (422, "Invalid", text) if verb == "patch" and path == part else None

    def brain(observed: Observed) -> Decision:
        given = (Apply(child("Service", "a-rlrun")),)
        told = [f"{one.ref.name} {one.text}" for one in observed.refused]
        return scripted_decision(
            status={"told": told, "rejection": str(observed.rejection)},
            apply=given if how == "apply" else (),
            repair=given if how == "repair" else (),
            scale=(Scale(Ref("Deployment", "a-inference"), engines["metadata"]["uid"], 3),),
        )

    engines = api.seed("/apis/apps/v1/namespaces/ns/deployments/a-inference", child("Deployment", "a-inference"))
    async with serving(api) as client:
        bench = Bench(api, client, brain)
        await bench.go()
        assert bench.seen[-1].rejection is None
        assert [one.text for one in bench.seen[-1].refused] == [text]
        assert api.objects["/apis/apps/v1/namespaces/ns/deployments/a-inference"]["spec"] == {"replicas": 3}
        assert bench.again == [10.0]
        del api.objects[part]
        api.hook = lambda verb, path, body: None
        await bench.go()
    assert part in api.objects


async def test_a_repair_that_met_another_state_is_made_in_the_next_pass_and_not_after_a_pause() -> None:
    """A pause is between two repairs, and this one was none."""
    api = FakeApi()
    found = api.seed(SERVICE, child("Service", "a-trainer"))
    async with serving(api) as client:

        def brain(observed: Observed) -> Decision:
            again = (Apply(child("Service", "a-trainer"), replaces=found["metadata"]["resourceVersion"]),)
            return scripted_decision(status={}, repair=again if len(bench.seen) < 3 else ())

        bench = Bench(api, client, brain)
        api._store(SERVICE, api.objects[SERVICE] | {"spec": {"other": True}})
        await bench.go()
        found = api.objects[SERVICE]
        assert bench.seen[-1].repaired_ago == float("inf")
        bench.seen.clear()
        await bench.go()
        await bench.go()
    assert bench.seen[-1].repaired_ago == 0.0


async def test_a_policy_that_is_applied_is_known_although_another_write_is_refused() -> None:
    """Else it is applied again in every pass until that is let in."""
    api = FakeApi()
    engines = api.seed("/apis/apps/v1/namespaces/ns/deployments/a-inference", child("Deployment", "a-inference"))
    api.hook = lambda verb, path, body: (422, "Invalid", DENIED) if path.endswith("a-inference") else None
    policy = child("NetworkPolicy", Names("a").orchestrator_access)

    def brain(observed: Observed) -> Decision:
        return scripted_decision(
            status={},
            apply=() if observed.access else (Apply(policy),),
            scale=(Scale(Ref("Deployment", "a-inference"), engines["metadata"]["uid"], 3),),
        )

    async with serving(api) as client:
        bench = Bench(api, client, brain)
        for _ in range(3):
            await bench.go()
    assert len([path for verb, path in api.writes() if "networkpolicies" in path]) == 1


@pytest.mark.parametrize("refuses", [True, False])
async def test_slow_webhooks_hold_a_pass_up_for_a_bounded_time_and_it_goes_on_where_it_ended(refuses: bool) -> None:
    """A pass of three minutes is taken for one that hangs, and the operator is started anew."""
    api = FakeApi()
    async with serving(api) as client:

        def hook(verb: str, path: str, body: Any) -> tuple[int, str, str] | None:
            if "configmaps" not in path:
                return None
            bench.time += 10
            return (500, "InternalError", 'failed calling webhook "slow": deadline exceeded') if refuses else None

        def brain(observed: Observed) -> Decision:
            there = {ref.name for ref in observed.parts}
            made = [child("ConfigMap", f"a-{i}", owner=bench.uid, apiVersion="v1") for i in range(12)]
            missing = tuple(Apply(one) for one in made if one["metadata"]["name"] not in there)
            return scripted_decision(
                status={"phase": "Starting", "message": " ".join(one.text for one in observed.refused)}, apply=missing
            )

        bench = Bench(api, client, brain)
        api.hook = hook
        passes, longest = 0, 0.0
        while passes < 12 and len(api.objects) < 13:
            began = bench.time
            with contextlib.suppress(UnavailableError):
                await bench.go()
            passes, longest = passes + 1, max(longest, bench.time - began)
        assert longest <= 2 * ACT_SECONDS
        assert len(api.objects) == (1 if refuses else 13)
        assert refuses == ("failed calling webhook" in str(bench.status))


@pytest.mark.parametrize("status", [404, 409, 422, 500])
async def test_a_status_that_a_webhook_refuses_is_retried_with_pauses_and_the_run_is_not_forgotten(status: int) -> None:
    api = FakeApi()
    denied = 'admission webhook "guard" denied the request: frozen'
    api.hook = lambda verb, path, body: (status, "Reason", denied) if path.endswith("/status") else None
    async with serving(api) as client:
        bench = Bench(api, client, lambda observed: scripted_decision(status={"phase": "Starting"}))
        with pytest.raises(ApiError, match="frozen"):
            await bench.go()
        assert bench.again == [], "the work queue's pauses hold"
        assert bench.store.runs() != []


async def test_what_a_queue_may_not_write_is_among_the_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    api, left = FakeApi(), Refusal(Ref("PodGroup", "rlrun-a"), "no", "be deleted")

    class Volcano:
        async def answer(self, run: Mapping[str, Any]) -> Admission:
            return Admission(False, "NotQueued", "over", refused=(left,))

    async with serving(api) as client:
        bench = Bench(api, client, lambda observed: scripted_decision(status={"phase": "Complete"}))
        monkeypatch.setattr(bench.reconciler, "_queue", Volcano())
        await bench.go()
    assert bench.seen[-1].refused == (left,)


async def test_words_that_differ_each_time_end_a_pass_all_the_same() -> None:
    api = FakeApi()
    numbers = iter(range(100))
    api.hook = lambda verb, path, body: (
        (400, "BadRequest", f'admission webhook "guard" denied the request: {next(numbers)}') if path == STS else None
    )

    def brain(observed: Observed) -> Decision:
        return scripted_decision(
            status={"phase": "Pending", "message": str(len(observed.refused))}, apply=(Apply(child()),)
        )

    async with serving(api) as client:
        bench = Bench(api, client, brain)
        await bench.go()
    assert bench.status["message"] == "1"
    assert bench.again == [10.0]


async def test_what_an_attempt_has_lost_and_may_not_have_again_keeps_neither_its_progress_nor_its_claim_from_the_rest() -> (
    None
):
    api = FakeApi()
    denied = 'admission webhook "guard" denied the request: no'
    api.hook = lambda verb, path, body: (
        (400, "BadRequest", denied) if body and body.get("kind") == "Deployment" else None
    )
    life = {
        "type": "Restarting",
        "status": "False",
        "reason": "NotRestarting",
        "message": "",
        "lastTransitionTime": STAMP,
    }
    before = {"phase": "Running", "attempt": 1, "launchedAttempt": 1, "observedGeneration": 1, "conditions": [life]}

    def brain(observed: Observed) -> Decision:
        return scripted_decision(
            status={**before, "observedGeneration": 2, "progress": {"step": 7}},
            apply=(Apply(child("Deployment", "a-inference")), Apply(child("Service", "a-trainer"))),
        )

    async with serving(api) as client:
        bench = Bench(api, client, brain)
        bench.store.put(api._store(RUN, {**api.objects[RUN], "status": before}), bench.time)
        await bench.go()
    assert SERVICE in api.objects
    assert bench.status["progress"] == {"step": 7}
    assert bench.status["observedGeneration"] == 1, "the edit is not acted on yet: what it asks for is tried again"


async def test_a_run_that_is_gone_is_forgotten_without_a_word() -> None:
    api = FakeApi()
    async with serving(api) as client:
        bench = Bench(
            api, client, lambda observed: scripted_decision(status={"valid": bool(judge_spec(observed.run).spec)})
        )
        del api.objects[RUN]  # deleted; the watch has not told yet
        await bench.go()
        assert KEY in judging._remembered
        await bench.go()
    assert bench.store.runs() == []
    assert KEY not in judging._remembered
    assert len(bench.seen) == 1


async def test_the_first_status_replaces_that_of_a_run_that_nobody_serves() -> None:
    api = FakeApi()
    async with serving(api) as client:
        bench = Bench(api, client, lambda observed: scripted_decision(status={"phase": "Starting"}))
        bench.store.put(api._store(RUN, {**api.objects[RUN], "status": dict(UNSERVED)}), bench.time)
        await bench.go()
        assert "status" not in bench.seen[0].run
        assert bench.status == {"phase": "Starting"}, "nothing of the other one is left"
        await bench.go()
        assert len(api.writes()) == 1


async def test_a_status_is_never_written_to_a_successor_of_the_same_name() -> None:
    api = FakeApi()
    async with serving(api) as client:
        bench = Bench(api, client, lambda observed: scripted_decision(status={"of": observed.run["metadata"]["uid"]}))
        del api.objects[RUN]
        new = api.seed(RUN, {"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "metadata": {}, "spec": {}})
        await bench.go()
        assert bench.status == {}
        await bench.go()
    assert bench.status == {"of": new["metadata"]["uid"]}


async def test_a_run_under_deletion_is_left_to_the_garbage_collector() -> None:
    api = FakeApi()
    async with serving(api) as client:
        bench = Bench(api, client, lambda observed: scripted_decision(status={"phase": "Failed"}))
        bench.seed_run(deletionTimestamp=STAMP)
        await bench.go()
    assert bench.seen == []


@pytest.mark.parametrize(("managed_by", "seen"), [("team-b", 0), ("team-a", 1)])
async def test_a_run_of_another_operator_is_left_alone(managed_by: str, seen: int) -> None:
    api = FakeApi()
    async with serving(api) as client:
        brain = lambda observed: scripted_decision(status={"phase": "Starting"})  # noqa: E731
        bench = Bench(api, client, brain, spec={"managedBy": managed_by})
        await bench.go()
    assert (len(bench.seen), bool(bench.status)) == (seen, bool(seen))


async def test_an_outage_is_left_to_the_queue_and_changes_nothing() -> None:
    api = FakeApi()
    api.hook = lambda verb, path, body: (503, "", "away")
    async with serving(api) as client:
        bench = Bench(
            api, client, lambda observed: scripted_decision(status={"phase": "Starting"}, apply=(Apply(child()),))
        )
        with pytest.raises(UnavailableError):
            await bench.go()
        api.hook = lambda verb, path, body: None
        await bench.go()
    assert bench.status == {"phase": "Starting"}


def test_a_merge_patch_removes_what_is_gone_at_any_depth() -> None:
    old = {"a": 1, "b": {"c": 1, "d": {"e": 1}}, "list": [1, 2]}
    new = {"b": {"d": {"f": 2}}, "list": [3]}
    assert merge_patch(old, new) == {"a": None, "b": {"c": None, "d": {"e": None, "f": 2}}, "list": [3]}
