"""The number of engines by load: it converges, follows the load, keeps its bounds, and does not swing."""

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
"""Continuations in flight of a run: enough for any number of engines."""


def measured(engines: int, work: float, *, requests: float = PARALLEL, seconds: float = 120.0) -> EngineLoad:
    """Load of a steady run.

    Args:
        engines: those that take requests.
        work: seconds of engines for a step, relative to the trainer's time for it.
        requests: continuations in flight, all together.
        seconds: of the window.
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


def course(engines: int, work: float, rules: Rules = RULES, decisions: int = 12) -> list[int]:
    """Numbers of engines, one decision after the other, each carried out before the next."""
    numbers = [engines]
    for _ in range(decisions):
        numbers.append(choose_engines(numbers[-1], measured(numbers[-1], work), rules).engines)
    return numbers


works = st.floats(0.05, 60.0)
numbers = st.integers(1, 64)
targets = st.floats(0.01, 0.5)


@settings(deadline=None)
@given(numbers, works, targets)
def test_a_steady_load_is_met_soon_and_the_number_stays(engines: int, work: float, target: float) -> None:
    rules = Rules(1, 64, target, 60.0)
    found = course(engines, work, rules)
    assert len(set(found[7:])) == 1, found  # at most a doubling or halving each time: six of them from 1 to 64
    last = measured(found[-1], work)
    assert last.waited <= target + 1e-9 or found[-1] == 64
    assert work / max(1, found[-1] - 1) > FULL - 1e-9 or found[-1] == 1, "one fewer would do, with room"


@settings(deadline=None)
@given(numbers, works, targets)
def test_it_never_goes_up_and_then_down_under_a_steady_load(engines: int, work: float, target: float) -> None:
    found = course(engines, work, Rules(1, 64, target, 60.0))
    moves = [after - before for before, after in itertools.pairwise(found) if after != before]
    assert all(move > 0 for move in moves) or all(move < 0 for move in moves), found


@settings(deadline=None)
@given(st.integers(1, 16), st.floats(0.5, 8.0))
def test_twice_the_load_is_followed_within_two_decisions_and_half_of_it_too(engines: int, work: float) -> None:
    settled = course(engines, work)[-1]
    doubled = course(settled, 2 * work, decisions=2)[-1]
    assert measured(doubled, 2 * work).waited <= RULES.target_wait + 1e-9
    halved = course(doubled, work, decisions=2)[-1]
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
def test_whatever_is_reported_the_bounds_hold_and_nothing_but_a_whole_window_moves_it(
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


def test_engines_that_would_have_no_request_are_not_asked_for() -> None:
    """A long answer at the end of each step: another engine would have nothing to do."""
    alone = measured(4, 40.0, requests=3.0)
    assert alone.waited > 0.8
    assert choose_engines(4, alone, RULES) == Choice(4)
    assert choose_engines(4, measured(4, 40.0, requests=5.0), RULES).engines == 5


def test_a_trainer_that_waits_for_something_else_gets_no_more_engines() -> None:
    """A slow environment, or a step whose engines and trainer take turns: most of the time the engines have nothing to do."""
    turns = measured(4, 8.0).model_copy(update={"waited": 0.5, "busy": 0.5})
    assert choose_engines(4, turns, RULES) == Choice(4)
    assert choose_engines(4, turns.model_copy(update={"busy": 0.9}), RULES).engines == 7


def test_full_caches_and_queues_keep_engines_that_have_idle_times() -> None:
    idle = measured(8, 2.0)
    assert choose_engines(8, idle, RULES).engines == 4
    assert choose_engines(8, idle.model_copy(update={"kv": 0.8}), RULES) == Choice(8)
    assert choose_engines(8, idle.model_copy(update={"kv": 0.6}), RULES).engines == 6
    assert choose_engines(8, idle.model_copy(update={"waiting": idle.requests}), RULES) == Choice(8)


@pytest.mark.parametrize(("waited", "engines"), [(0.025, 4), (0.03, 8)])
def test_number_falls_only_while_the_trainer_waits_for_half_of_the_target(waited: float, engines: int) -> None:
    assert choose_engines(8, measured(8, 2.0).model_copy(update={"waited": waited}), RULES).engines == engines


@pytest.mark.parametrize(("idle", "engines"), [(0.15, 20), (0.2, 19)])
def test_fewer_engines_have_work_for_85_percent_of_their_time(idle: float, engines: int) -> None:
    assert choose_engines(
        20, measured(20, 20 * (1 - idle)).model_copy(update={"idle": idle, "waited": 0.0}), RULES
    ).engines == (engines)


@pytest.mark.parametrize(("steps", "engines"), [(1, 4), (2, 2)])
def test_number_changes_after_two_steps_at_least(steps: int, engines: int) -> None:
    assert choose_engines(4, measured(4, 1.0).model_copy(update={"steps": steps}), RULES).engines == engines


@pytest.mark.parametrize(("engines", "wanted"), [(1, 2), (3, 6)])
def test_number_at_most_doubles_at_once(engines: int, wanted: int) -> None:
    assert choose_engines(engines, measured(engines, 60.0), RULES).engines == wanted


def test_engines_that_find_no_node_are_given_up_once_fewer_do() -> None:
    assert choose_engines(6, measured(4, 12.0), RULES) == Choice(6)
    assert choose_engines(6, measured(4, 1.5), RULES).engines == 2


@pytest.mark.parametrize("work", [1.0, 4.0, 40.0])
def test_number_stays_while_engines_are_drained(work: float) -> None:
    assert choose_engines(4, measured(8, work), RULES) == Choice(4)


def test_the_reason_has_the_numbers() -> None:
    assert choose_engines(2, measured(2, 4.0), RULES).why == (
        "with 2 engines the trainer waited for rollouts 50% of 120 s (target 5%)"
    )
    assert choose_engines(4, measured(4, 1.0), RULES).why == (
        "4 engines had no request for 75% of 120 s, and the trainer waited for rollouts 0%"
    )


def test_a_report_is_read_back_and_one_that_anybody_wrote_is_no_report() -> None:
    load = measured(3, 4.0)
    found = parse_load(load.text())
    assert found is not None
    assert (found.engines, found.waited) == (3, 0.25)
    for text in (None, "", "nonsense", "{}", '{"engines": 1e99}', load.text().replace("0.25", "NaN"), "[" * 2000):
        assert parse_load(text) is None


def simulated(rules: Rules, seed: int, steps: int = 300) -> tuple[float, float, int]:
    """A run whose answers become four times as long for a third of its steps, with chance in each of them.

    Engines take half a minute to start, and as long to drain; the trainer takes 10 s a step.

    Returns:
        Share of the time that the trainer waited, engines on average, and changes of their number.
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
def test_a_run_whose_load_changes_waits_little_with_few_engines(seed: int) -> None:
    few, many = (simulated(Rules(n, n, 0.05, 30.0), seed) for n in (1, 4))
    elastic = simulated(Rules(1, 6, 0.05, 30.0), seed)
    assert few[0] > 0.4
    assert many[0] < 0.01
    assert elastic[0] < 0.1, "what it takes to see the change, and to start engines, is in it"
    assert elastic[1] < 0.65 * many[1]
    assert elastic[2] <= 8, "it does not swing"
