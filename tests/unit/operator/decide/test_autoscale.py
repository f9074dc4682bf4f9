"""Engine count by load: it converges, follows the load, keeps its bounds and does not oscillate."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrun.protocol.messages.lease_annotations import EngineLoad, parse_load
from rlrun_operator.decide.engine_count import FULL, LEAST_STEPS, Choice, Rules, choose_engines

RULES = Rules(least=1, most=64, target_wait=0.05, stabilization_seconds=60.0)
PARALLEL = 1000.0
"""Continuations in flight of a run, enough for any number of engines."""


def measure_load(engines: int, work: float, *, requests: float = PARALLEL, seconds: float = 120.0) -> EngineLoad:
    """Load of a steady run.

    Args:
        engines: number of engines that take requests.
        work: engine seconds per step, relative to the trainer's time per step.
        requests: total number of continuations in flight.
        seconds: length of the window.
    """
    generates = work / engines
    step = max(1.0, generates)
    return EngineLoad(
        engines=engines,
        seconds=seconds,
        steps=4,
        waited=1 - 1 / step,
        ahead=max(0.0, 1 - generates),
        idle=max(0.0, 1 - generates),
        busy=generates / step,
        requests=requests / engines,
        waiting=0.0,
    )


def simulate_decisions(engines: int, work: float, rules: Rules = RULES, decisions: int = 12) -> list[int]:
    """Successive engine counts, each decision applied before the next."""
    numbers = [engines]
    for _ in range(decisions):
        numbers.append(choose_engines(numbers[-1], measure_load(numbers[-1], work), rules).engines)
    return numbers


works = st.floats(0.05, 60.0)
numbers = st.integers(1, 64)
targets = st.floats(0.01, 0.5)


@settings(deadline=None)
@given(numbers, works, targets)
def test_steady_load_gives_a_stable_engine_count(engines: int, work: float, target: float) -> None:
    rules = Rules(1, 64, target, 60.0)
    found = simulate_decisions(engines, work, rules)
    assert len(set(found[7:])) == 1, found  # at most a doubling or halving per decision: six of them from 1 to 64
    last = measure_load(found[-1], work)
    assert last.waited <= target + 1e-9 or found[-1] == 64
    assert work / max(1, found[-1] - 1) > FULL - 1e-9 or found[-1] == 1, "one fewer would do, with room"


@settings(deadline=None)
@given(numbers, works, targets)
def test_engine_count_moves_in_one_direction_under_steady_load(engines: int, work: float, target: float) -> None:
    found = simulate_decisions(engines, work, Rules(1, 64, target, 60.0))
    moves = [after - before for before, after in itertools.pairwise(found) if after != before]
    assert all(move > 0 for move in moves) or all(move < 0 for move in moves), found


@settings(deadline=None)
@given(st.integers(1, 16), st.floats(0.5, 8.0))
def test_changed_load_is_followed_within_two_decisions(engines: int, work: float) -> None:
    settled = simulate_decisions(engines, work)[-1]
    doubled = simulate_decisions(settled, 2 * work, decisions=2)[-1]
    assert measure_load(doubled, 2 * work).waited <= RULES.target_wait + 1e-9
    halved = simulate_decisions(doubled, work, decisions=2)[-1]
    assert halved <= max(1, math.ceil(work / FULL), math.ceil(doubled / 4))


@settings(deadline=None)
@given(
    st.integers(0, 300),
    st.builds(
        EngineLoad,
        engines=st.integers(1, 300),
        seconds=st.floats(0, 1e6),
        steps=st.integers(1, 1000),
        waited=st.floats(0, 1),
        ahead=st.floats(0, 1),
        idle=st.floats(0, 1),
        busy=st.floats(0, 1),
        requests=st.floats(0, 1e6),
        waiting=st.floats(0, 1e6),
        kv=st.floats(0, 1),
    )
    | st.none(),
    st.integers(1, 50),
    st.integers(0, 50),
)
def test_engine_count_keeps_its_bounds_for_any_report(
    wanted: int, load: EngineLoad | None, least: int, more: int
) -> None:
    rules = Rules(least, least + more, 0.05, 60.0)
    choice = choose_engines(wanted, load, rules)
    assert rules.least <= choice.engines <= rules.most
    within = rules.least <= wanted <= rules.most
    assert bool(choice.why) == (choice.engines != wanted)
    if within and (load is None or load.seconds < 60 or load.steps < LEAST_STEPS):
        assert choice == Choice(wanted)
    if within and load is not None and load.engines > wanted:
        assert choice == Choice(wanted), "those that are to go are still there"
    if within and load is not None and choice.engines > wanted:
        assert load.engines == wanted, "more are on their way"
        assert load.waited > rules.target_wait


def test_engines_without_requests_are_not_added() -> None:
    """With a long answer at the end of each step, another engine would be idle."""
    alone = measure_load(4, 40.0, requests=3.0)
    assert alone.waited > 0.8
    assert choose_engines(4, alone, RULES) == Choice(4)
    assert choose_engines(4, measure_load(4, 40.0, requests=5.0), RULES).engines == 5


def test_idle_engines_are_not_added_while_trainer_waits() -> None:
    """With a slow environment, or alternating engines and trainer, the engines are idle most of the time."""
    turns = measure_load(4, 8.0).model_copy(update={"waited": 0.5, "busy": 0.5})
    assert choose_engines(4, turns, RULES) == Choice(4)
    assert choose_engines(4, turns.model_copy(update={"busy": 0.9}), RULES).engines == 7


def test_full_caches_or_queues_keep_idle_engines() -> None:
    idle = measure_load(8, 2.0)
    assert choose_engines(8, idle, RULES).engines == 4
    assert choose_engines(8, idle.model_copy(update={"kv": 0.8}), RULES) == Choice(8)
    assert choose_engines(8, idle.model_copy(update={"kv": 0.6}), RULES).engines == 6
    assert choose_engines(8, idle.model_copy(update={"waiting": idle.requests}), RULES) == Choice(8)


@pytest.mark.parametrize(("waited", "engines"), [(0.025, 4), (0.03, 8)])
def test_engine_count_falls_only_below_half_target_wait(waited: float, engines: int) -> None:
    assert choose_engines(8, measure_load(8, 2.0).model_copy(update={"waited": waited}), RULES).engines == engines


@pytest.mark.parametrize(("idle", "engines"), [(0.15, 20), (0.2, 19)])
def test_reduced_engines_are_busy_85_percent(idle: float, engines: int) -> None:
    assert choose_engines(
        20, measure_load(20, 20 * (1 - idle)).model_copy(update={"idle": idle, "waited": 0.0}), RULES
    ).engines == (engines)


@pytest.mark.parametrize(("steps", "engines"), [(1, 4), (2, 2)])
def test_engine_count_changes_after_at_least_two_steps(steps: int, engines: int) -> None:
    assert choose_engines(4, measure_load(4, 1.0).model_copy(update={"steps": steps}), RULES).engines == engines


@pytest.mark.parametrize(("engines", "wanted"), [(1, 2), (3, 6)])
def test_engine_count_at_most_doubles(engines: int, wanted: int) -> None:
    assert choose_engines(engines, measure_load(engines, 60.0), RULES).engines == wanted


def test_unschedulable_engines_are_dropped_at_lower_load() -> None:
    assert choose_engines(6, measure_load(4, 12.0), RULES) == Choice(6)
    assert choose_engines(6, measure_load(4, 1.5), RULES).engines == 2


@pytest.mark.parametrize("work", [1.0, 4.0, 40.0])
def test_engine_count_is_kept_during_a_drain(work: float) -> None:
    assert choose_engines(4, measure_load(8, work), RULES) == Choice(4)


def test_choice_reason_contains_the_measured_numbers() -> None:
    assert choose_engines(2, measure_load(2, 4.0), RULES).why == (
        "with 2 engines the trainer waited for rollouts 50% of 120 s (target 5%)"
    )
    assert choose_engines(4, measure_load(4, 1.0), RULES).why == (
        "4 engines had no request for 75% of 120 s, and the trainer waited for rollouts 0%"
    )


def test_load_report_round_trips_and_invalid_report_is_none() -> None:
    load = measure_load(3, 4.0)
    found = parse_load(load.text())
    assert found is not None
    assert (found.engines, found.waited) == (3, 0.25)
    for text in (None, "", "nonsense", "{}", '{"engines": 1e99}', load.text().replace("0.25", "NaN"), "[" * 2000):
        assert parse_load(text) is None


def simulate_run(rules: Rules, seed: int, steps: int = 300) -> tuple[float, float, int]:
    """Simulate a run whose answers take four times as long for a third of its steps, with random variation.

    Engines need 30 s to start and to drain; the trainer needs 10 s per step.

    Returns:
        Share of time that the trainer waited, mean engine count, and number of changes.
    """
    random, now, waited, used, changes = Random(seed), 0.0, 0.0, 0.0, 0
    wanted = engines = rules.least
    until, window = math.inf, list[tuple[float, float, float]]()
    for step in range(steps):
        work = 8.0 * (4 if steps // 3 <= step < 2 * steps // 3 else 1) * random.uniform(0.85, 1.15)
        seconds = max(10.0, work / engines)
        window = [*window, (seconds, seconds - 10.0, max(0.0, seconds - work / engines))][-6:]
        now, waited, used = now + seconds, waited + seconds - 10.0, used + seconds * engines
        if wanted != engines:
            if now >= until:
                engines, window = wanted, []
            continue
        whole = sum(one[0] for one in window)
        idle = sum(one[2] for one in window) / whole
        load = EngineLoad(
            engines=engines,
            seconds=whole,
            steps=len(window),
            waited=sum(one[1] for one in window) / whole,
            ahead=idle,
            idle=idle,
            busy=1 - idle,
            requests=50,
            waiting=0,
        )
        chosen = choose_engines(wanted, load, rules).engines
        if chosen != wanted:
            wanted, until, changes = chosen, now + 30.0, changes + 1
    return waited / now, used / now, changes


@pytest.mark.parametrize("seed", range(5))
def test_variable_load_has_short_waits_with_few_engines(seed: int) -> None:
    few, many = (simulate_run(Rules(n, n, 0.05, 30.0), seed) for n in (1, 4))
    elastic = simulate_run(Rules(1, 6, 0.05, 30.0), seed)
    assert few[0] > 0.4
    assert many[0] < 0.01
    assert elastic[0] < 0.1, "what it takes to see the change, and to start engines, is in it"
    assert elastic[1] < 0.65 * many[1]
    assert elastic[2] <= 8, "it does not swing"
