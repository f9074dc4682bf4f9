"""Scanner rules: the default installation breaks only the rules that docs/security.md justifies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.processes.chart.rendering import Render
from tests.unit.operator.build.examples import context, everything, example
from tests.unit.operator.restrictions.scanner_rules import RULES, broken

PAGE = Path(__file__).parents[3] / "docs" / "security.md"


def read_excused_rules(whose: str) -> set[str]:
    """Return the rules that the page excuses for runs or for the operator."""
    section = PAGE.read_text().split("## Rules of scanners")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in row.strip("| \n").split("|")]
        for row in re.findall(r"^\|.*\|$", section, re.MULTILINE)
    ]
    return {rule.strip() for rules, by, _ in rows[2:] if by in (whose, "both") for rule in rules.split(";")}


def test_excused_rules_exist() -> None:
    assert read_excused_rules("runs") | read_excused_rules("operator") <= set(RULES)


def test_operator_breaks_exactly_excused_rules(render: Render) -> None:
    assert set(broken(render())) == read_excused_rules("operator")


IMAGES: dict[str, Any] = {"environments": [{"id": "arithmetic", "image": "registry.example.com/sums:1"}]}


@pytest.mark.parametrize("name", ["quickstart", "gpu", "sft", "eval", "colocated", "environments"])
def test_run_breaks_only_excused_rules(name: str) -> None:
    ctx = context(IMAGES) if name == "environments" else example(name)
    assert {rule: who for rule, who in broken(everything(ctx)).items() if rule not in read_excused_rules("runs")} == {}


def test_each_excuse_for_runs_is_needed() -> None:
    assert read_excused_rules("runs") == set(broken(everything(example("quickstart"))))
