"""Whether the Secret with a run's API key is there is asked with a dry-run create, before anything else of a decision."""

from __future__ import annotations

import pytest

from rlrun_operator.state import Apply, Decision, Observed
from tests.unit.operator.decisions import scripted_decision
from tests.unit.operator.edge.fake_api import FakeApi, serving
from tests.unit.operator.edge.test_reconcile import KEY, RUN, STS, Bench, child

SECRET = "/api/v1/namespaces/ns/secrets/a-key-1"


def brain(observed: Observed) -> Decision:
    if observed.lost_key is not None:
        return scripted_decision(status={"phase": "Restarting", "message": f"{observed.lost_key} is lost"})
    return scripted_decision(status={"phase": "Starting"}, ask=child("Secret", "a-key-1"), apply=(Apply(child()),))


async def test_one_that_is_there_costs_one_request_and_stays_as_it_is() -> None:
    api = FakeApi()
    before = api.seed(SECRET, child("Secret", "a-key-1"))
    async with serving(api) as client:
        bench = Bench(api, client, brain)
        await bench.go()
    assert [verb for verb, path in api.requests if "/secrets" in path] == ["dry-run"]
    assert api.objects[SECRET] == before
    assert STS in api.objects
    assert len(bench.seen) == 1, "nothing has to be decided again"


async def test_one_that_is_lost_stops_everything_and_is_not_made() -> None:
    api = FakeApi()
    async with serving(api) as client:
        bench = Bench(api, client, brain)
        await bench.go()
        assert bench.status["message"] == "a-key-1 is lost"
        await bench.go()
    assert [verb for verb, path in api.requests if "/secrets" in path] == ["dry-run"], (
        "what is known is not asked again"
    )
    assert SECRET not in api.objects
    assert STS not in api.objects


async def test_that_it_is_lost_is_not_believed_of_a_successor_of_the_run() -> None:
    api = FakeApi()
    async with serving(api) as client:
        bench = Bench(api, client, brain)
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
async def test_where_admission_does_not_let_it_be_asked_the_attempt_begins_as_it_is(
    answer: tuple[int, str, str],
) -> None:
    api = FakeApi()
    api.hook = lambda verb, path, body: answer if verb == "dry-run" else None
    async with serving(api) as client:
        bench = Bench(api, client, brain)
        await bench.go()
    assert STS in api.objects
    assert bench.status["phase"] == "Starting"
