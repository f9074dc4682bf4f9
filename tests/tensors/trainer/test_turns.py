"""Turns of runs in a shared trainer: a ready run waits at most one step of every other run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlrun.trainer.loop import next_turn

RUNS = ["a", "b", "c", "d"]


def test_ready_runs_train_in_round_robin() -> None:
    assert next_turn(RUNS, None, {"b", "d"}) == "b"
    assert next_turn(RUNS, "b", {"b", "d"}) == "d"
    assert next_turn(RUNS, "d", {"b", "d"}) == "b"
    assert next_turn(RUNS, "b", {"b"}) == "b"
    assert next_turn(RUNS, "b", set()) is None
    assert next_turn(["b", "c"], "gone", {"c", "b"}) == "b"


@given(st.lists(st.sets(st.sampled_from(RUNS)), min_size=1, max_size=40))
def test_ready_run_never_starves(ready: list[set[str]]) -> None:
    last, waited = None, dict.fromkeys(RUNS, 0)
    for now in ready:
        last_before, last = last, next_turn(RUNS, last, now) or last
        if not now:
            assert last == last_before
            continue
        assert last in now
        waited = {run: waited[run] + 1 if run in now and run != last else 0 for run in RUNS}
        assert max(waited.values()) < len(RUNS)
