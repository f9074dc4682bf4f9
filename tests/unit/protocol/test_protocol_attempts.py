"""Lineage: ownership of the artifacts of all attempts, with exactly one artifact per step."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlrun.protocol.files.attempts import Attempt, first_attempt, next_attempt, next_number, read_attempt, write_attempt
from rlrun.protocol.files.paths import Artifact, RunPaths


def first() -> Attempt:
    return first_attempt(world_size=1, config_hash="h")


def then(base: Attempt, step: int, attempt: int) -> Attempt:
    return next_attempt(base, step, attempt=attempt, world_size=1, config_hash="h")


def history() -> Attempt:
    """Attempt 1 trains steps 1 to 10 and stays alive, 2 starts at 10 without a checkpoint, 3 starts at 10, and 4 at step 20 of 3."""
    one = first()
    two = then(one, 10, 2)
    assert two.base_attempt == 1
    three = then(one, 10, 3)
    return then(three, 20, 4)


@pytest.mark.parametrize(
    ("step", "attempt", "owned"),
    [
        (0, 1, True), (1, 1, True), (10, 1, True), (11, 1, False), (20, 1, False),
        (10, 2, False), (11, 2, False), (15, 2, False),
        (9, 3, False), (10, 3, True), (11, 3, True), (20, 3, True), (21, 3, False),
        (19, 4, False), (20, 4, True), (21, 4, True), (10_000, 4, True),
        (21, 5, False), (0, 0, False),
    ],
)  # fmt: skip
def test_lineage_owns_artifacts_of_its_branch(step: int, attempt: int, owned: bool) -> None:
    assert history().owns(step, attempt) is owned


def test_falling_back_behind_an_ancestor_leaves_it_out() -> None:
    late = then(then(first(), 10, 2), 4, 3)
    assert (late.base_step, late.base_attempt) == (4, 1)
    assert late.owns(4, 1)
    assert not late.owns(5, 1)
    assert not late.owns(11, 2)


def test_restart_from_model_inherits_no_artifacts() -> None:
    fresh = then(then(first(), 10, 2), 0, 3)
    assert (fresh.base_step, fresh.base_attempt, len(fresh.lineage)) == (0, None, 1)
    assert not fresh.owns(0, 1)


def test_owned_keeps_the_order() -> None:
    found = [Artifact(10, 1, Path("a")), Artifact(11, 1, Path("b")), Artifact(11, 3, Path("c"))]
    assert [a.path.name for a in history().owned(found)] == ["a", "c"]


@given(st.integers(1, 8), st.data())
def test_zombie_attempt_is_never_owned(count: int, data: st.DataObject) -> None:
    attempts = [first()]
    writers = {1: dict.fromkeys(range(1, 31), 1)}  # for each attempt: the writers of its base steps
    for number in range(2, count + 2):
        base = data.draw(st.sampled_from(attempts))
        step = data.draw(st.integers(0, max(writers[base.attempt])))
        attempts.append(then(base, step, number))
        inherited = {s: writer for s, writer in writers[base.attempt].items() if s <= step}
        writers[number] = inherited | dict.fromkeys(range(step + 1, step + 31), number)
    current, truth = attempts[-1], writers[count + 1]
    for step in range(1, max(truth) + 1):
        for attempt in attempts:
            published_again = step == attempt.base_step and attempt.attempt in truth.values()
            assert current.owns(step, attempt.attempt) == (truth[step] == attempt.attempt or published_again)


def test_attempt_file_round_trip(tmp_path: Path) -> None:
    paths, attempt = RunPaths(tmp_path), history()
    write_attempt(paths, attempt)
    assert read_attempt(paths.attempt_file(4)) == attempt


def test_attempt_file_is_created_only_once(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    write_attempt(paths, first())
    with pytest.raises(FileExistsError):
        write_attempt(paths, first())
    assert [path.name for path in paths.attempts.iterdir()] == ["0001.json"]


def test_next_attempt_number_exceeds_all_on_disk(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert next_number(paths) == 1
    write_attempt(paths, then(first(), 3, 7))
    assert next_number(paths) == 8
    assert next_number(paths, at_least=12) == 12
