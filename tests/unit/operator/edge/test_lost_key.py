"""Check for the Secret with a run's API key: a dry-run create before the other writes of a decision."""

from __future__ import annotations

import pytest

from rlrun_operator.state import Apply, Decision, Observed
from tests.unit.operator.decisions import scripted_decision
from tests.unit.operator.edge.fake_api import FakeApi, serve_api
from tests.unit.operator.edge.test_reconcile import KEY, RUN, STS, Bench, make_child

SECRET = "/api/v1/namespaces/ns/secrets/a-key-1"


def decide_start(observed: Observed) -> Decision:
    if observed.lost_key is not None:
        return scripted_decision(status={"phase": "Restarting", "message": f"{observed.lost_key} is lost"})
    return scripted_decision(
        status={"phase": "Starting"}, ask=make_child("Secret", "a-key-1"), apply=(Apply(make_child()),)
    )


async def test_existing_key_costs_one_dry_run() -> None:
    api = FakeApi()
    before = api.seed(SECRET, make_child("Secret", "a-key-1"))
    async with serve_api(api) as client:
        bench = Bench(api, client, decide_start)
        await bench.go()
    assert [verb for verb, path in api.requests if "/secrets" in path] == ["dry-run"]
    assert api.objects[SECRET] == before
    assert STS in api.objects
    assert len(bench.seen) == 1, "nothing has to be decided again"


async def test_lost_key_stops_all_writes_and_is_not_recreated() -> None:
    api = FakeApi()
    async with serve_api(api) as client:
        bench = Bench(api, client, decide_start)
        await bench.go()
        assert bench.status["message"] == "a-key-1 is lost"
        await bench.go()
    assert [verb for verb, path in api.requests if "/secrets" in path] == ["dry-run"], (
        "what is known is not asked again"
    )
    assert SECRET not in api.objects
    assert STS not in api.objects


async def test_lost_key_is_forgotten_for_a_new_run() -> None:
    api = FakeApi()
    async with serve_api(api) as client:
        bench = Bench(api, client, decide_start)
        await bench.go()
        bench.store.remove("RLRun", *KEY, bench.uid)
        api.objects.pop(RUN)
        bench.seed_run(generation=1)
        await bench.reconciler.reconcile(KEY)
    seen = [observed.lost_key for observed in bench.seen]
    assert (seen[1], seen[-2], seen[-1]) == ("a-key-1", None, "a-key-1")


@pytest.mark.parametrize(
    "answer",
    [
        (400, "BadRequest", 'admission webhook "w.example.com" does not support dry run'),
        (403, "Forbidden", 'secrets "a-key-1" is forbidden: no'),
        (422, "Invalid", "Secret is invalid"),
    ],
)
async def test_refused_key_check_does_not_block_the_attempt(
    answer: tuple[int, str, str],
) -> None:
    api = FakeApi()
    api.hook = lambda verb, path, body: answer if verb == "dry-run" else None
    async with serve_api(api) as client:
        bench = Bench(api, client, decide_start)
        await bench.go()
    assert STS in api.objects
    assert bench.status["phase"] == "Starting"
