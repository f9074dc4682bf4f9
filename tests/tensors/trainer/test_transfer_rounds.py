"""Grouping of engines that receive a version together."""

from __future__ import annotations

from rlrun.trainer.weights.senders import Round, Rounds

WINDOW = 2.0


def enter(rounds: Rounds, version: int, engine: str, *, now: float, alone: bool = False) -> Round:
    return rounds.enter(version, engine, None, alone=alone, now=now)


def make_rounds(*engines: str) -> Rounds:
    """Return the rounds after these engines have received version 0."""
    rounds = Rounds(WINDOW)
    for engine in engines:
        assert enter(rounds, 0, engine, now=0.0).closed, "nobody else is expected"
    return rounds


def test_round_waits_for_engines_of_the_previous_version() -> None:
    rounds = make_rounds("a", "b", "c")
    first = enter(rounds, 1, "a", now=10.0)
    second = enter(rounds, 1, "b", now=10.5)
    assert first is second
    assert rounds.remaining_seconds(first, 11.0) == 1.0
    assert enter(rounds, 1, "c", now=11.0) is first
    assert (rounds.remaining_seconds(first, 11.0), first.closed, sorted(first.members)) == (0.0, True, ["a", "b", "c"])


def test_round_waits_briefly_and_once_for_missing_engine() -> None:
    rounds = make_rounds("a", "gone")
    one = enter(rounds, 1, "a", now=10.0)
    assert rounds.remaining_seconds(one, 11.9) > 0
    assert rounds.remaining_seconds(one, 12.0) == 0.0
    assert one.closed
    assert enter(rounds, 2, "a", now=20.0).closed


def test_late_engine_gets_its_own_round_and_returns() -> None:
    rounds = make_rounds("a", "late")
    one = enter(rounds, 1, "a", now=10.0)
    assert rounds.remaining_seconds(one, 12.0) == 0.0
    own = enter(rounds, 1, "late", now=13.0)
    assert own is not one
    assert own.closed
    assert not enter(rounds, 2, "a", now=20.0).closed
    assert enter(rounds, 2, "late", now=20.1).closed


def test_engine_outside_groups_joins_no_open_round() -> None:
    rounds = make_rounds("a", "b", "c")
    shared = enter(rounds, 1, "b", now=10.0)
    own = enter(rounds, 1, "a", now=10.1, alone=True)
    assert own.closed
    assert (shared.closed, sorted(shared.members)) == (False, ["b"])


def test_failed_engines_have_own_rounds_until_success() -> None:
    rounds = make_rounds("a", "b")
    rounds.report_failure(["a", "b"])
    assert enter(rounds, 1, "a", now=10.0).members.keys() == {"a"}
    assert enter(rounds, 1, "b", now=10.0, alone=True).closed
    rounds.report_success(1, ["a"])
    assert enter(rounds, 2, "a", now=20.0).closed, "b is not expected"
    rounds.report_success(1, ["b"])
    one = enter(rounds, 3, "a", now=30.0)
    assert not one.closed
    assert enter(rounds, 3, "b", now=30.0) is one
