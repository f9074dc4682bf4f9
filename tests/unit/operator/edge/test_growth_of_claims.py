"""Growth of a claim through an API server: preconditions, refusals and retry delays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlrun_operator.decide.claims import LONGEST_RETRY_SECONDS, RETRY_SECONDS
from rlrun_operator.state import Apply, Decision, Disown, Grow, Observed
from tests.unit.operator.decisions import scripted_decision
from tests.unit.operator.edge.fake_api import FakeApi, serve_api
from tests.unit.operator.edge.test_reconcile import STS, Bench, make_child

CLAIM = "/api/v1/namespaces/ns/persistentvolumeclaims/a-data"
REFUSAL = (
    "only dynamically provisioned pvc can be resized and the storageclass that provisions the pvc must support resize"
)


def make_claim(size: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"labels": {"rlrun.io/run": "a"}},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": size}}},
        "status": {"phase": "Bound", "capacity": {"storage": size}},
    }


def claim_size(api: FakeApi) -> str:
    return str(api.objects[CLAIM]["spec"]["resources"]["requests"]["storage"])


def decide_growth(observed: Observed) -> Decision:
    """Grow the claim to 2Ti and apply the StatefulSet."""
    seen = next(iter(each for each in observed.children.values() if each["kind"] == "PersistentVolumeClaim"), None)
    apply = (Apply(make_child()),)
    if seen is None:
        return scripted_decision(status={"message": "no claim"}, apply=apply)
    meta, size = seen["metadata"], seen["spec"]["resources"]["requests"]["storage"]
    if observed.growth_refusal is not None:
        return scripted_decision(status={"message": observed.growth_refusal.text}, apply=apply)
    if size in ("2Ti", "3Ti"):
        return scripted_decision(status={"message": f"asks for {size}"}, apply=apply)
    grow = Grow("a-data", meta["uid"], meta["resourceVersion"], "2Ti")
    return scripted_decision(status={"message": "grows"}, apply=apply, grow=grow)


def without_applies(decision: Decision) -> Decision:
    return replace(decision, writes=tuple(write for write in decision.writes if not isinstance(write, Apply)))


async def test_growth_patches_only_the_claim_size() -> None:
    api = FakeApi()
    before = api.seed(CLAIM, make_claim("1Ti"))
    async with serve_api(api) as client:
        bench = Bench(api, client, lambda observed: without_applies(decide_growth(observed)))
        bench.store.put(before, 0)
        await bench.go()
        assert claim_size(api) == "2Ti"
        assert api.objects[CLAIM]["metadata"]["uid"] == before["metadata"]["uid"]
        assert api.objects[CLAIM]["spec"]["accessModes"] == ["ReadWriteMany"]
        assert bench.status == {"message": "grows"}
        assert min(bench.requeue) <= 0.2, "no watch event is going to come for the own write"
        await bench.go()
    assert bench.status == {"message": "asks for 2Ti"}, "the store knows the answer"
    known = bench.store.get("PersistentVolumeClaim", "ns", "a-data")
    assert known is not None
    assert known["status"]["capacity"] == {"storage": "1Ti"}, "what it holds is kept, too"
    assert api.requests.count(("patch", CLAIM)) == 1


async def test_refused_growth_is_reported_once_and_retried_less_often() -> None:
    api = FakeApi()
    refuse = lambda verb, path, body: (403, "Forbidden", REFUSAL) if (verb, path) == ("patch", CLAIM) else None  # noqa: E731
    api.hook = refuse
    before = api.seed(CLAIM, make_claim("1Ti"))
    async with serve_api(api) as client:
        bench = Bench(api, client, decide_growth)
        bench.store.put(before, 0)
        pause = RETRY_SECONDS
        for tries in range(1, 7):
            for _ in range(3):
                bench.requeue.clear()
                await bench.go()
            assert api.requests.count(("patch", CLAIM)) == tries, "not in every pass"
            assert pause in bench.requeue, "each pass keeps the appointment"
            bench.time += pause
            pause = min(2 * pause, LONGEST_RETRY_SECONDS)
        assert pause == LONGEST_RETRY_SECONDS
        assert bench.status == {"message": REFUSAL}
        assert api.requests.count(("patch", f"{bench_path()}/status")) == 1, (
            "the status does not move between two tries"
        )
        assert STS in api.objects
        api.hook = lambda verb, path, body: None
        await bench.go()
    assert claim_size(api) == "2Ti"


def bench_path() -> str:
    return "/apis/rlrun.io/v1alpha1/namespaces/ns/rlruns/a"


async def test_claim_enlarged_by_another_client_keeps_its_size() -> None:
    api = FakeApi()
    before = api.seed(CLAIM, make_claim("1Ti"))
    async with serve_api(api) as client:
        bench = Bench(api, client, decide_growth)
        bench.store.put(before, 0)
        api._store(CLAIM, {**make_claim("3Ti"), "metadata": {**api.objects[CLAIM]["metadata"]}})
        await bench.go()
    assert claim_size(api) == "3Ti"
    assert bench.status == {"message": "asks for 3Ti"}, "it is decided anew, about what there is"


@pytest.mark.parametrize("successor", [True, False])
async def test_deleted_or_replaced_claim_is_not_enlarged(successor: bool) -> None:
    api = FakeApi()
    before = api.seed(CLAIM, make_claim("1Ti"))
    async with serve_api(api) as client:
        bench = Bench(api, client, decide_growth)
        bench.store.put(before, 0)
        del api.objects[CLAIM]
        if successor:
            api.seed(CLAIM, {**make_claim("3Ti"), "metadata": {"uid": "another", "labels": {"rlrun.io/run": "a"}}})
        await bench.go()
    assert bench.status == {"message": "asks for 3Ti" if successor else "no claim"}


OWNER = {"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "name": "a", "uid": "uid-of-a"}
OTHER = {"apiVersion": "v1", "kind": "ConfigMap", "name": "backup", "uid": "uid-of-backup"}


def make_disowning_brain(version: str | None = None) -> Any:
    """Return a brain that removes the run from the claim's owners, at the observed version or at `version`."""

    def decide(observed: Observed) -> Decision:
        found = next(each for each in observed.children.values() if each["kind"] == "PersistentVolumeClaim")
        meta = found["metadata"]
        if len(meta["ownerReferences"]) == 1:
            return scripted_decision(status={"message": "kept"})
        disown = Disown("a-data", meta["uid"], version or meta["resourceVersion"], (OTHER,))
        return scripted_decision(status={"message": "disowned"}, disown=disown)

    return decide


async def test_bound_claim_loses_only_the_run_as_owner() -> None:
    api = FakeApi()
    owned = make_claim("1Ti")
    owned["metadata"]["ownerReferences"] = [OWNER, OTHER]
    before = api.seed(CLAIM, owned)
    async with serve_api(api) as client:
        bench = Bench(api, client, make_disowning_brain())
        bench.store.put(before, 0)
        await bench.go()
        assert api.objects[CLAIM]["metadata"]["ownerReferences"] == [OTHER]
        assert api.objects[CLAIM]["metadata"]["uid"] == before["metadata"]["uid"]
        await bench.go()
    assert bench.status == {"message": "kept"}, "the store knows the answer"
    assert api.requests.count(("patch", CLAIM)) == 1


async def test_changed_claim_keeps_its_owners() -> None:
    api = FakeApi()
    owned = make_claim("1Ti")
    owned["metadata"]["ownerReferences"] = [OWNER, OTHER]
    before = api.seed(CLAIM, owned)
    api.hook = lambda verb, path, body: (409, "Conflict", "changed") if (verb, path) == ("patch", CLAIM) else None
    async with serve_api(api) as client:
        bench = Bench(api, client, make_disowning_brain())
        bench.store.put(before, 0)
        await bench.go()
    assert len(api.objects[CLAIM]["metadata"]["ownerReferences"]) == 2
    assert bench.status == {"message": "disowned"}, "all else of the pass is done"
