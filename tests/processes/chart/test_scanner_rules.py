"""Rules of the usual scanners: the default installation breaks those that docs/security.md gives a reason for, and no others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.processes.chart.rendering import Render
from tests.unit.operator.build.examples import context, everything, example
from tests.unit.operator.restrictions.scanner_rules import RULES, broken

PAGE = Path(__file__).parents[3] / "docs" / "security.md"


def excused(whose: str) -> set[str]:
    """Rules that the page's table excuses for runs, or for the operator."""
    section = PAGE.read_text().split("## Rules of scanners")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in row.strip("| \n").split("|")]
        for row in re.findall(r"^\|.*\|$", section, re.MULTILINE)
    ]
    return {rule.strip() for rules, by, _ in rows[2:] if by in (whose, "both") for rule in rules.split(";")}


def test_the_page_excuses_rules_that_there_are() -> None:
    assert excused("runs") | excused("operator") <= set(RULES)


def test_the_operator_breaks_what_the_page_excuses_and_nothing_else(render: Render) -> None:
    assert set(broken(render())) == excused("operator")


IMAGES: dict[str, Any] = {"environments": [{"id": "arithmetic", "image": "registry.example.com/sums:1"}]}


@pytest.mark.parametrize("name", ["quickstart", "gpu", "sft", "eval", "colocated", "environments"])
def test_a_run_breaks_nothing_that_the_page_does_not_excuse(name: str) -> None:
    ctx = context(IMAGES) if name == "environments" else example(name)
    assert {rule: who for rule, who in broken(everything(ctx)).items() if rule not in excused("runs")} == {}


def test_every_excuse_for_runs_is_needed() -> None:
    assert excused("runs") == set(broken(everything(example("quickstart"))))
