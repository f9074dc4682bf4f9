"""One pass over one run with an API server: order, preconditions, refusals, throttled status and events."""

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
from tests.unit.operator.edge.fake_api import STAMP, FakeApi, serve_api

RUN = "/apis/rlrun.io/v1alpha1/namespaces/ns/rlruns/a"
SERVICE = "/api/v1/namespaces/ns/services/a-trainer"
STS = "/apis/apps/v1/namespaces/ns/statefulsets/a-trainer"
POD = "/api/v1/namespaces/ns/pods/a-orchestrator-1"
PROGRESS = "/apis/coordination.k8s.io/v1/namespaces/ns/leases/a-progress"
KEY: Key = ("ns", "a")


def make_child(
    kind: str = "StatefulSet", name: str = "a-trainer", owner: str | None = None, **more: Any
) -> dict[str, Any]:
    version = {"Pod": "v1", "Secret": "v1"}.get(kind, "apps/v1")
    owners = [{"kind": "RLRun", "name": "a", "uid": owner}] if owner else []
    metadata = {"name": name, "namespace": "ns", "labels": {"rlrun.io/run": "a"}, "ownerReferences": owners}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **more}


class Bench:
    """Reconciler with a scripted brain and an API server."""

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
        self.requeue: list[float] = []
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
            requeue=self._again,
            now=clock,
            clock=clock,
            random=Random(0),
        )
        self.uid = self.seed_run()

    def _again(self, key: Key, seconds: float) -> None:
        self.requeue.append(seconds)
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


async def test_writes_follow_the_documented_order_and_update_the_store() -> None:
    api = FakeApi()
    engines = api.seed("/apis/apps/v1/namespaces/ns/deployments/a-inference", make_child("Deployment", "a-inference"))
    old = api.seed("/api/v1/namespaces/ns/pods/old", make_child("Pod", "old"))

    def brain(observed: Observed) -> Decision:
        return scripted_decision(
            status={"phase": "Starting"},
            dry_run=(make_child(),),
            create=(make_child("Secret", "a-rlrun"),),
            apply=(Apply(make_child()),),
            annotate=(
                Annotate(Ref("Pod", "old"), old["metadata"]["uid"], {"example.org/cost": "-1"}),
                Annotate(Ref("Pod", "gone"), "uid-gone", {"example.org/cost": "-1"}),
                Annotate(Ref("Deployment", "a-inference"), "uid-of-another", {"example.org/cost": "-1"}),
            ),
            scale=(Scale(Ref("Deployment", "a-inference"), engines["metadata"]["uid"], 3),),
            delete=(Delete(Ref("Pod", "old"), old["metadata"]["uid"], grace_seconds=0),),
            repair=(Apply(make_child("Service", "a-trainer")),),
            events=(EventRecord("Normal", "Started", "go"),),
        )

    async with serve_api(api) as client:
        bench = Bench(api, client, brain)
        await bench.go()
    assert [(verb, path.split("/")[-2]) for verb, path in api.requests] == [
        ("dry-run", "statefulsets"),
        ("create", "ns"),
        ("patch", "statefulsets"),
        ("patch", "pods"),
        ("patch", "pods"),
        ("patch", "deployments"),
        ("get", "deployments"),  # another UID: refused, or another object?
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


async def test_next_pass_sees_own_writes_before_the_watch() -> None:
    api = FakeApi()
    async with serve_api(api) as client:
        bench = Bench(
            api, client, lambda observed: scripted_decision(status={"phase": "Starting"}, apply=(Apply(make_child()),))
        )
        await bench.go()
        await bench.go()
    assert bench.seen[1].run["status"] == {"phase": "Starting"}
    assert Ref("StatefulSet", "a-trainer") in bench.seen[1].children
    assert min(bench.requeue) <= 0.2, "own writes bring no watch event: the pass comes again by itself"


async def test_status_change_wakes_guests_of_the_trainer() -> None:
    api = FakeApi()
    async with serve_api(api) as client:
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
async def test_silent_lease_is_read_before_it_counts(phase: str, silent: float, reads: int) -> None:
    api = FakeApi()
    async with serve_api(api) as client:
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


async def test_unreadable_lease_is_read_again_before_a_decision() -> None:
    api = FakeApi()
    async with serve_api(api) as client:
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


async def test_unchanged_status_is_not_written_and_old_fields_disappear() -> None:
    api, statuses = FakeApi(), [{"phase": "Starting", "progress": {"step": 1, "reward": 0.5}}]
    async with serve_api(api) as client:
        bench = Bench(api, client, lambda observed: scripted_decision(status=statuses[0]))
        await bench.go()
        await bench.go()
        assert len(api.writes()) == 1
        statuses[0] = {"phase": "Starting", "progress": {"step": 2}}
        await bench.go()
    assert bench.status == statuses[0]


async def test_direction_controls_are_escaped_in_status() -> None:
    api = FakeApi()
    async with serve_api(api) as client:
        bench = Bench(
            api,
            client,
            lambda observed: scripted_decision(status={"phase": "Failed", "message": "pod said \u202eolleh"}),
        )
        await bench.go()
        await bench.go()
    assert bench.status["message"] == "pod said \\u202eolleh"
    assert len(api.writes()) == 1


async def test_status_field_dropped_by_crd_is_not_written_repeatedly() -> None:
    api, status = FakeApi(), {"phase": "Starting", "future": 1}
    original = api._patch

    def pruning(request: Any, path: str, body: dict[str, Any]) -> Any:
        body.get("status", {}).pop("future", None)
        return original(request, path, body)

    api._patch = pruning  # type: ignore[method-assign]
    async with serve_api(api) as client:
        bench = Bench(api, client, lambda observed: scripted_decision(status=dict(status)))
        for _ in range(5):
            await bench.go()
        assert len(api.writes()) == 1
        status["phase"] = "Running"
        await bench.go()
    assert bench.status == {"phase": "Running"}


@pytest.mark.parametrize(("urgency", "patience"), [("now", 0.0), ("soon", 2.0), ("progress", 15.0)])
async def test_low_priority_status_updates_are_written_together(urgency: Any, patience: float) -> None:
    api, step = FakeApi(), 0
    async with serve_api(api) as client:
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
            assert bench.requeue[-1] == pytest.approx(patience - 1.0)
            assert not any("S4" in str(o) for o in api.objects.values()), "an event comes after its status, not before"
        bench.time += patience
        await bench.go()
    assert bench.status == {"step": 4}
    assert len([w for w in api.writes() if w[1].endswith("/status")]) == (5 if not patience else 2)
    assert any("S4" in str(o) for o in api.objects.values())


def test_progress_interval_grows_with_age_and_run_count() -> None:
    assert progress_seconds(age=0.0, runs=1) == progress_seconds(age=299.0, runs=50) == 15.0
    assert progress_seconds(age=600.0, runs=1) == progress_seconds(age=0.0, runs=100) == 30.0
    assert progress_seconds(age=86400.0, runs=1) == progress_seconds(age=0.0, runs=1000) == 60.0


async def test_existing_child_survives_apply_that_expects_none() -> None:
    api = FakeApi()

    def brain(observed: Observed) -> Decision:
        if observed.children:
            return scripted_decision(status={"phase": "Running"})
        return scripted_decision(status={"phase": "Starting"}, apply=(Apply(make_child(), expect_absent=True),))

    async with serve_api(api) as client:
        bench = Bench(api, client, brain)
        api.seed(STS, make_child(spec={"replicas": 2}))  # the watch has not reported it yet
        await bench.go()
    assert api.objects[STS]["spec"] == {"replicas": 2}
    assert bench.status == {"phase": "Running"}
    assert [path for verb, path in api.writes()] == [STS, f"{RUN}/status"], (
        "the first one was refused by its precondition"
    )


async def test_foreign_object_created_before_apply_is_not_overwritten() -> None:
    api = FakeApi()
    foreign = {"kind": "StatefulSet", "metadata": {"name": "a-trainer"}, "spec": {"replicas": 9}}

    def appear(verb: str, path: str, body: dict[str, Any]) -> tuple[int, str, str] | None:
        if (verb, path) == ("patch", STS):
            api.hook = lambda verb, path, body: None
            api.seed(STS, foreign)
        return None

    api.hook = appear
    async with serve_api(api) as client:
        bench = Bench(
            api,
            client,
            lambda observed: scripted_decision(
                status={"taken": observed.taken}, apply=() if observed.taken else (Apply(make_child()),)
            ),
        )
        await bench.go()
    assert api.objects[STS]["spec"] == {"replicas": 9}
    assert bench.status == {"taken": "StatefulSet a-trainer"}


async def test_new_child_is_looked_up_before_apply() -> None:
    api = FakeApi()
    first = scripted_decision(status={}, apply=(Apply(make_child(spec={"replicas": 1})),))
    async with serve_api(api) as client:
        bench = Bench(api, client, lambda observed: first)
        await bench.go()
        assert [verb for verb, _ in api.requests] == ["patch"]
        await bench.go()
        assert [verb for verb, _ in api.requests] == ["patch", "patch", "get", "patch"]
        known = api.objects[STS]["metadata"]["resourceVersion"]
        again = scripted_decision(status={}, apply=(Apply(make_child(spec={"replicas": 1}), known=known),))
        await Bench(api, client, lambda observed: again).go()
    assert [verb for verb, _ in api.requests][4:] == ["patch"], "one that the cache knows needs no look"


async def test_absent_child_is_created() -> None:
    api = FakeApi()
    async with serve_api(api) as client:
        bench = Bench(
            api, client, lambda observed: scripted_decision(status={}, apply=(Apply(make_child(), expect_absent=True),))
        )
        await bench.go()
    assert STS in api.objects
    assert [verb for verb, _ in api.requests] == ["patch"]


async def test_recreated_workload_is_not_scaled() -> None:
    api, seen = FakeApi(), []

    def brain(observed: Observed) -> Decision:
        known = observed.children[Ref("StatefulSet", "a-trainer")]
        seen.append(known["metadata"]["uid"])
        mine = known["metadata"]["uid"] == "before"
        return scripted_decision(
            status={}, scale=(Scale(Ref("StatefulSet", "a-trainer"), "before", 0),) if mine else ()
        )

    async with serve_api(api) as client:
        bench = Bench(api, client, brain)
        before = make_child(spec={"replicas": 2})
        before["metadata"] |= {"uid": "before", "resourceVersion": "1"}
        bench.store.put(before, bench.time)
        after = api.seed("/apis/apps/v1/namespaces/ns/statefulsets/a-trainer", make_child(spec={"replicas": 2}))
        await bench.go()
    assert seen == ["before", after["metadata"]["uid"]], "it is decided anew, about what there is"
    assert api.objects["/apis/apps/v1/namespaces/ns/statefulsets/a-trainer"]["spec"] == {"replicas": 2}


async def test_refusal_reaches_next_decision_until_spec_changes() -> None:
    api = FakeApi()
    message = "StatefulSet.apps is invalid: spec.template.spec.containers[0].image: Required value"
    api.hook = lambda verb, path, body: (422, "Invalid", message) if verb == "dry-run" else None

    def brain(observed: Observed) -> Decision:
        if observed.rejection:
            return scripted_decision(status={"phase": "Failed", "message": observed.rejection})
        return scripted_decision(status={"phase": "Pending"}, dry_run=(make_child(),), apply=(Apply(make_child()),))

    async with serve_api(api) as client:
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


def make_labelled_child(kind: str, name: str, run: str | None) -> dict[str, Any]:
    found = make_child(kind, name)
    found["metadata"]["labels"] = {} if run is None else {"rlrun.io/run": run}
    return found


@pytest.mark.parametrize("step", ["apply", "create"])
@pytest.mark.parametrize(("made_for", "is_own"), [("a", True), ("b", False), (None, False)])
async def test_foreign_object_is_kept_and_reported_until_deleted(step: str, made_for: str | None, is_own: bool) -> None:
    """A forced apply would overwrite the object and delete it with the run; an existing claim would be used."""
    api, kind, plural = (
        FakeApi(),
        *(("Service", "services") if step == "apply" else ("PersistentVolumeClaim", "persistentvolumeclaims")),
    )
    path, wanted = f"/api/v1/namespaces/ns/{plural}/a-x", {"apiVersion": "v1"} | make_labelled_child(kind, "a-x", "a")
    before = api.seed(path, make_labelled_child(kind, "a-x", made_for) | {"spec": {"of": "somebody"}})

    def brain(observed: Observed) -> Decision:
        if observed.taken is not None:
            return scripted_decision(status={"message": f"{observed.taken} is taken"})
        if step == "apply":
            return scripted_decision(status={"message": "begun"}, apply=(Apply(wanted), Apply(make_child())))
        return scripted_decision(status={"message": "begun"}, create=(wanted,), apply=(Apply(make_child()),))

    async with serve_api(api) as client:
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


def refuse_by_quota(name: str) -> Callable[[str, str, Any], tuple[int, str, str] | None]:
    def hook(verb: str, path: str, body: Any) -> tuple[int, str, str] | None:
        full = name in (path.rsplit("/", 1)[1], body.get("metadata", {}).get("name"))
        return (403, "Forbidden", f'"{name}" is forbidden: exceeded quota: small') if full and verb != "get" else None

    return hook


async def test_quota_refusal_of_pod_does_not_block_other_writes() -> None:
    api = FakeApi()
    api.hook = refuse_by_quota("a-orchestrator-1")

    def brain(observed: Observed) -> Decision:
        told = " ".join(event["message"] for event in observed.events)
        pod = make_child("Pod", "a-orchestrator-1", spec={})
        status = {"phase": "Starting", "attempt": 1, "message": told}
        repair = (Apply(make_child("Service", "a-trainer")),)
        return scripted_decision(status=status, dry_run=(pod,), apply=(Apply(pod), Apply(make_child())), repair=repair)

    async with serve_api(api) as client:
        bench = Bench(api, client, brain)
        await bench.go()
        assert "exceeded quota: small" in bench.status["message"]
        assert bench.status["attempt"] == 1
        assert STS in api.objects
        assert SERVICE in api.objects
        assert bench.requeue == [10.0]
        api.hook = lambda verb, path, body: None
        await bench.go()
        await bench.go()
    assert POD in api.objects
    assert bench.status["message"] == ""


async def test_refused_repair_does_not_block_others_and_is_retried() -> None:
    api = FakeApi()
    api.hook = refuse_by_quota("a-inference")

    def brain(observed: Observed) -> Decision:
        repair = (Apply(make_child("Service", "a-inference")), Apply(make_child("Service", "a-trainer")))
        told = " ".join(event["message"] for event in observed.events)
        return scripted_decision(status={"phase": "Running", "message": told}, repair=repair)

    async with serve_api(api) as client:
        bench = Bench(api, client, brain)
        await bench.go()
    assert SERVICE in api.objects
    assert "exceeded quota: small" in bench.status["message"]
    assert bench.requeue == [10.0]


async def test_quota_refusal_of_claim_stops_the_attempt() -> None:
    api = FakeApi()
    api.hook = refuse_by_quota("a-rlrun")

    def brain(observed: Observed) -> Decision:
        told = " ".join(event["message"] for event in observed.events)
        said = [("Scheduled", "False"), ("Reconciling", "True")]
        conditions = [
            {"type": kind, "status": truth, "reason": "Waiting", "message": told, "lastTransitionTime": STAMP}
            for kind, truth in said
        ]
        status = {"phase": "Starting", "attempt": 1, "message": told, "conditions": conditions}
        return scripted_decision(status=status, create=(make_child("Secret", "a-rlrun"),), apply=(Apply(make_child()),))

    async with serve_api(api) as client:
        bench = Bench(api, client, brain)
        await bench.go()
    assert "exceeded quota: small" in bench.status["message"]
    assert bench.status["phase"] == "Pending"
    assert "attempt" not in bench.status, "the attempt has not begun: the next pass must do all of it"
    assert STS not in api.objects


async def test_run_with_refused_resumption_stays_suspended() -> None:
    """Its last attempt has no pods and would fail if it counted as running."""
    api = FakeApi()
    api.hook = refuse_by_quota("a-trainer")
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
        return scripted_decision(status=status, apply=(Apply(make_child()),))

    async with serve_api(api) as client:
        bench = Bench(api, client, brain)
        bench.store.put(api._store(RUN, {**api.objects[RUN], "status": before}), bench.time)
        await bench.go()
    assert (bench.status["phase"], bench.status["attempt"]) == ("Suspended", 1)
    (told,) = [c for c in bench.status["conditions"] if c["type"] == "Suspended"]
    assert told["status"] == "True"
    assert "the run stays suspended: " in told["message"]
    assert "exceeded quota: small" in told["message"]


async def test_policy_refusal_is_retried_with_growing_delays() -> None:
    api = FakeApi()
    denied = 'admission webhook "guard.example.com" denied the request: no such team'
    api.hook = lambda verb, path, body: (400, "BadRequest", denied) if verb == "dry-run" else None

    def brain(observed: Observed) -> Decision:
        told = " ".join(event["message"] for event in observed.events)
        return scripted_decision(
            status={"phase": "Starting", "message": told}, dry_run=(make_child(),), apply=(Apply(make_child()),)
        )

    async with serve_api(api) as client:
        bench = Bench(api, client, brain)
        for _ in range(5):
            await bench.go()
        assert "no such team" in bench.status["message"]
        assert STS not in api.objects
        assert bench.requeue == [10.0, 20.0, 40.0, 60.0, 60.0]
        api.hook = lambda verb, path, body: None
        await bench.go()
        await bench.go()
    assert STS in api.objects
    assert bench.status["message"] == ""


async def test_latest_refusal_is_reported() -> None:
    api = FakeApi()

    def brain(observed: Observed) -> Decision:
        told = " ".join(event["message"] for event in observed.events)
        return scripted_decision(status={"phase": "Starting", "message": told}, dry_run=(make_child(),))

    async with serve_api(api) as client:
        bench = Bench(api, client, brain)
        for team in ("first", "second"):
            denied = f'admission webhook "guard" denied the request: {team}'
            api.hook = lambda verb, path, body, denied=denied: (
                (400, "BadRequest", denied) if verb == "dry-run" else None
            )
            await bench.go()
            assert bench.status["message"] == denied


async def test_missing_rights_are_reported_and_retried() -> None:
    api = FakeApi()
    forbidden = 'statefulsets.apps "a-trainer" is forbidden: User "sa" cannot patch resource "statefulsets"'
    api.hook = lambda verb, path, body: (403, "Forbidden", forbidden) if path == STS else None

    def brain(observed: Observed) -> Decision:
        told = " ".join(event["message"] for event in observed.events)
        return scripted_decision(
            status={"phase": "Failed", "attempt": 1, "message": told}, apply=(Apply(make_child()),)
        )

    async with serve_api(api) as client:
        bench = Bench(api, client, brain)
        await bench.go()
    assert bench.status == {"phase": "Pending", "message": forbidden, "conditions": []}
    assert bench.requeue == [10.0]


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
async def test_refused_change_is_reported_and_other_writes_continue(
    verb: str, path: str, doing: str, status: int, text: str
) -> None:
    api = FakeApi()
    engines = api.seed("/apis/apps/v1/namespaces/ns/deployments/a-inference", make_child("Deployment", "a-inference"))
    old = api.seed("/api/v1/namespaces/ns/pods/old", make_child("Pod", "old"))
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
            ask=make_child("Secret", "a-key"),
            annotate=(Annotate(Ref("Pod", "old"), old["metadata"]["uid"], {"example.org/cost": "-1"}),),
            scale=(Scale(Ref("Deployment", "a-inference"), engines["metadata"]["uid"], 3),),
            delete=(Delete(Ref("Pod", "old"), old["metadata"]["uid"], grace_seconds=0),),
            repair=(Apply(make_child("Service", "a-trainer")),),
        )

    api.seed("/api/v1/namespaces/ns/secrets/a-key", make_child("Secret", "a-key"))
    async with serve_api(api) as client:
        bench = Bench(api, client, brain)
        await bench.go()
        name = {"deployments/a-inference": "Deployment a-inference", "secrets": "Secret a-key"}.get(path, "Pod old")
        assert bench.status["told"] == [f"{name} cannot {doing}: {text}"]
        assert SERVICE in api.objects, "nothing else is blocked"
        assert bench.requeue == [10.0]
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
async def test_immutable_field_conflict_is_not_a_spec_error(how: str, text: str) -> None:
    """Only the deletion of the other object helps, and only a retry notices it; a spec rejection would persist until the next edit."""
    api, part = FakeApi(), "/api/v1/namespaces/ns/services/a-rlrun"
    api.seed(part, make_child("Service", "a-rlrun"))
    api.hook = lambda verb, path, body: (422, "Invalid", text) if verb == "patch" and path == part else None

    def brain(observed: Observed) -> Decision:
        given = (Apply(make_child("Service", "a-rlrun")),)
        told = [f"{one.ref.name} {one.text}" for one in observed.refused]
        return scripted_decision(
            status={"told": told, "rejection": str(observed.rejection)},
            apply=given if how == "apply" else (),
            repair=given if how == "repair" else (),
            scale=(Scale(Ref("Deployment", "a-inference"), engines["metadata"]["uid"], 3),),
        )

    engines = api.seed("/apis/apps/v1/namespaces/ns/deployments/a-inference", make_child("Deployment", "a-inference"))
    async with serve_api(api) as client:
        bench = Bench(api, client, brain)
        await bench.go()
        assert bench.seen[-1].rejection is None
        assert [one.text for one in bench.seen[-1].refused] == [text]
        assert api.objects["/apis/apps/v1/namespaces/ns/deployments/a-inference"]["spec"] == {"replicas": 3}
        assert bench.requeue == [10.0]
        del api.objects[part]
        api.hook = lambda verb, path, body: None
        await bench.go()
    assert part in api.objects


async def test_repair_with_conflict_is_retried_in_next_pass() -> None:
    """The pause applies only after a completed repair."""
    api = FakeApi()
    found = api.seed(SERVICE, make_child("Service", "a-trainer"))
    async with serve_api(api) as client:

        def brain(observed: Observed) -> Decision:
            again = (Apply(make_child("Service", "a-trainer"), replaces=found["metadata"]["resourceVersion"]),)
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


async def test_applied_policy_is_recorded_despite_another_refusal() -> None:
    """Otherwise each pass applies the policy again until the other write is admitted."""
    api = FakeApi()
    engines = api.seed("/apis/apps/v1/namespaces/ns/deployments/a-inference", make_child("Deployment", "a-inference"))
    api.hook = lambda verb, path, body: (422, "Invalid", DENIED) if path.endswith("a-inference") else None
    policy = make_child("NetworkPolicy", Names("a").orchestrator_access)

    def brain(observed: Observed) -> Decision:
        return scripted_decision(
            status={},
            apply=() if observed.access else (Apply(policy),),
            scale=(Scale(Ref("Deployment", "a-inference"), engines["metadata"]["uid"], 3),),
        )

    async with serve_api(api) as client:
        bench = Bench(api, client, brain)
        for _ in range(3):
            await bench.go()
    assert len([path for verb, path in api.writes() if "networkpolicies" in path]) == 1


@pytest.mark.parametrize("refuses", [True, False])
async def test_slow_webhooks_bound_a_pass_that_resumes_later(refuses: bool) -> None:
    """The health check restarts the operator after a pass of three minutes."""
    api = FakeApi()
    async with serve_api(api) as client:

        def hook(verb: str, path: str, body: Any) -> tuple[int, str, str] | None:
            if "configmaps" not in path:
                return None
            bench.time += 10
            return (500, "InternalError", 'failed calling webhook "slow": deadline exceeded') if refuses else None

        def brain(observed: Observed) -> Decision:
            there = {ref.name for ref in observed.parts}
            made = [make_child("ConfigMap", f"a-{i}", owner=bench.uid, apiVersion="v1") for i in range(12)]
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
async def test_refused_status_is_retried_and_the_run_kept(status: int) -> None:
    api = FakeApi()
    denied = 'admission webhook "guard" denied the request: frozen'
    api.hook = lambda verb, path, body: (status, "Reason", denied) if path.endswith("/status") else None
    async with serve_api(api) as client:
        bench = Bench(api, client, lambda observed: scripted_decision(status={"phase": "Starting"}))
        with pytest.raises(ApiError, match="frozen"):
            await bench.go()
        assert bench.requeue == [], "the work queue's pauses hold"
        assert bench.store.runs() != []


async def test_queue_refusal_is_among_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    api, left = FakeApi(), Refusal(Ref("PodGroup", "rlrun-a"), "no", "be deleted")

    class Volcano:
        async def answer(self, run: Mapping[str, Any]) -> Admission:
            return Admission(False, "NotQueued", "over", refused=(left,))

    async with serve_api(api) as client:
        bench = Bench(api, client, lambda observed: scripted_decision(status={"phase": "Complete"}))
        monkeypatch.setattr(bench.reconciler, "_queue", Volcano())
        await bench.go()
    assert bench.seen[-1].refused == (left,)


async def test_changing_refusal_messages_do_not_extend_a_pass() -> None:
    api = FakeApi()
    numbers = iter(range(100))
    api.hook = lambda verb, path, body: (
        (400, "BadRequest", f'admission webhook "guard" denied the request: {next(numbers)}') if path == STS else None
    )

    def brain(observed: Observed) -> Decision:
        return scripted_decision(
            status={"phase": "Pending", "message": str(len(observed.refused))}, apply=(Apply(make_child()),)
        )

    async with serve_api(api) as client:
        bench = Bench(api, client, brain)
        await bench.go()
    assert bench.status["message"] == "1"
    assert bench.requeue == [10.0]


async def test_refused_repair_does_not_block_progress_and_other_repairs() -> None:
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
            apply=(Apply(make_child("Deployment", "a-inference")), Apply(make_child("Service", "a-trainer"))),
        )

    async with serve_api(api) as client:
        bench = Bench(api, client, brain)
        bench.store.put(api._store(RUN, {**api.objects[RUN], "status": before}), bench.time)
        await bench.go()
    assert SERVICE in api.objects
    assert bench.status["progress"] == {"step": 7}
    assert bench.status["observedGeneration"] == 1, "the edit is not acted on yet: what it asks for is tried again"


async def test_deleted_run_is_removed_from_the_caches() -> None:
    api = FakeApi()
    async with serve_api(api) as client:
        bench = Bench(
            api, client, lambda observed: scripted_decision(status={"valid": bool(judge_spec(observed.run).spec)})
        )
        del api.objects[RUN]  # deleted, but the watch has not reported it yet
        await bench.go()
        assert KEY in judging._remembered
        await bench.go()
    assert bench.store.runs() == []
    assert KEY not in judging._remembered
    assert len(bench.seen) == 1


async def test_first_status_replaces_the_unserved_status() -> None:
    api = FakeApi()
    async with serve_api(api) as client:
        bench = Bench(api, client, lambda observed: scripted_decision(status={"phase": "Starting"}))
        bench.store.put(api._store(RUN, {**api.objects[RUN], "status": dict(UNSERVED)}), bench.time)
        await bench.go()
        assert "status" not in bench.seen[0].run
        assert bench.status == {"phase": "Starting"}, "nothing of the other one is left"
        await bench.go()
        assert len(api.writes()) == 1


async def test_status_is_never_written_to_a_successor() -> None:
    api = FakeApi()
    async with serve_api(api) as client:
        bench = Bench(api, client, lambda observed: scripted_decision(status={"of": observed.run["metadata"]["uid"]}))
        del api.objects[RUN]
        new = api.seed(RUN, {"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "metadata": {}, "spec": {}})
        await bench.go()
        assert bench.status == {}
        await bench.go()
    assert bench.status == {"of": new["metadata"]["uid"]}


async def test_run_under_deletion_is_skipped() -> None:
    api = FakeApi()
    async with serve_api(api) as client:
        bench = Bench(api, client, lambda observed: scripted_decision(status={"phase": "Failed"}))
        bench.seed_run(deletionTimestamp=STAMP)
        await bench.go()
    assert bench.seen == []


@pytest.mark.parametrize(("managed_by", "seen"), [("team-b", 0), ("team-a", 1)])
async def test_run_of_another_operator_is_skipped(managed_by: str, seen: int) -> None:
    api = FakeApi()
    async with serve_api(api) as client:
        brain = lambda observed: scripted_decision(status={"phase": "Starting"})  # noqa: E731
        bench = Bench(api, client, brain, spec={"managedBy": managed_by})
        await bench.go()
    assert (len(bench.seen), bool(bench.status)) == (seen, bool(seen))


async def test_outage_fails_the_pass_without_changes() -> None:
    api = FakeApi()
    api.hook = lambda verb, path, body: (503, "", "away")
    async with serve_api(api) as client:
        bench = Bench(
            api, client, lambda observed: scripted_decision(status={"phase": "Starting"}, apply=(Apply(make_child()),))
        )
        with pytest.raises(UnavailableError):
            await bench.go()
        api.hook = lambda verb, path, body: None
        await bench.go()
    assert bench.status == {"phase": "Starting"}


def test_merge_patch_removes_missing_keys_at_any_depth() -> None:
    old = {"a": 1, "b": {"c": 1, "d": {"e": 1}}, "list": [1, 2]}
    new = {"b": {"d": {"f": 2}}, "list": [3]}
    assert merge_patch(old, new) == {"a": None, "b": {"c": None, "d": {"e": None, "f": 2}}, "list": [3]}
