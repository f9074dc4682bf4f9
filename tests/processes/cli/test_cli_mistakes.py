"""Mistakes at the command line: exit code, place, value and fix in one line, before slow work, and without new files."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import pytest

from tests.processes.cli.mistakes.mistake import Mistake
from tests.processes.cli.mistakes.outcome import Outcome
from tests.processes.cli.mistakes.table import MISTAKES
from tests.support.programs import run_program

SLOW_SECONDS = 5.0
"""CPU time: the import of torch takes longer than everything else here; load on the machine must not fail a test."""


def find_faults(mistake: Mistake, outcome: Outcome) -> list[str]:
    """Return the faults of the answer to a mistake."""
    err = (
        outcome.err
        if not mistake.notice
        else "\n".join(line for line in outcome.out.splitlines() if ": note: " in line)
    )
    lines = err.splitlines()
    printed = outcome.err + outcome.out
    fixes = [new.strip() or "remove" for _, new in mistake.repairs]
    found = {
        f"code {outcome.code}, not {mistake.code}": outcome.code != mistake.code,
        "a traceback": "Traceback" in err,
        f"{len(lines)} lines": len(lines) != 1,
        f"does not name {mistake.place}": mistake.place not in err,
        f"does not show {mistake.value}": mistake.value not in err,
        f"does not say: {mistake.fix}": mistake.fix not in err,
        **{f"does not show the fix {fix}": fix not in err for fix in fixes},
        f"fails again with the fix: {outcome.unrepaired}": outcome.unrepaired is not None,
        f"prints {mistake.hidden}": bool(mistake.hidden) and mistake.hidden in printed,
        f"made {', '.join(outcome.made)}": bool(outcome.made),
        f"took {outcome.seconds} s": outcome.seconds > SLOW_SECONDS,
    }
    return [fault for fault, is_so in found.items() if is_so]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Outcomes of all mistakes; one process makes all, because each start of a process takes longer than ten mistakes."""
    command = [sys.executable, "-m", "tests.processes.cli.mistakes.run", str(tmp_path_factory.mktemp("mistakes"))]
    done = run_program(command)
    assert done.returncode == 0, done.stderr
    made = [Outcome(**json.loads(line)) for line in done.stdout.splitlines()]
    return {outcome.what: outcome for outcome in made}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what)
def test_mistake_is_reported_in_one_line(mistake: Mistake, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[mistake.what]
    assert not find_faults(mistake, outcome), outcome.err


def test_each_mistake_of_table_is_unique_with_fix() -> None:
    names = [mistake.what for mistake in MISTAKES]
    assert len(names) == len(set(names)) >= 400
    assert [mistake.what for mistake in MISTAKES if not mistake.place or not mistake.fix] == []


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome("w", 64, "--steps: got 'x', expected a number\n", [], 0.1), []),
        (Outcome("w", 1, "--steps: got 'x', expected a number\n", [], 0.1), ["code 1, not 64"]),
        (Outcome("w", 64, "--steps: expected a number\n", [], 0.1), ["does not show 'x'"]),
        (Outcome("w", 64, "note\n--steps: got 'x', expected a number\n", [], 0.1), ["2 lines"]),
        (Outcome("w", 64, "--steps: got 'x', expected a number\n", ["runs"], 9.0), ["made runs", "took 9.0 s"]),
    ],
)
def test_faults_lists_missing_parts(outcome: Outcome, expected: Sequence[str]) -> None:
    assert find_faults(Mistake("w", "eval", 64, "--steps", "'x'", "expected a number"), outcome) == expected
