"""Examination of random documents: one round finds every problem, and valid documents equal pydantic's result."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from rlrun.api.resource import RLRunSpec
from rlrun.config.loading.examine import examine_layer
from rlrun.config.loading.layers import Reader

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
DRAWS = 50
JUNK: list[Any] = [None, "", "x", -1, 0, 1, 3, 10**30, 0.5, float("nan"), True, [], [1], ["x"], {}, {"a": 1}, [{}]]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every container with each of its keys."""
    items = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    return [(value, key) for key, _ in items] + [place for _, inner in items for place in places(inner)]


def mutated(document: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    changed = copy.deepcopy(document)
    for _ in range(dice.randint(1, 6)):
        if options := places(changed):
            container, key = dice.choice(options)
            container[key] = copy.deepcopy(dice.choice(JUNK))
    return changed


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examination_reports_exactly_the_problems(path: Path) -> None:
    dice = random.Random(path.stem)
    spec = yaml.safe_load(path.read_text())["spec"]
    for _ in range(DRAWS):
        document = mutated(spec, dice)
        layer = Reader(RLRunSpec, "f").read(document)
        examined = examine_layer(RLRunSpec, layer)
        try:
            expected = RLRunSpec.model_validate(layer.values, strict=True, by_name=True, by_alias=False)
        except ValidationError:
            assert examined.problems, document
            continue
        assert examined.problems == layer.problems, document
        assert (examined.result, examined.replaced) == (expected, frozenset())


def test_rule_broken_only_by_a_replacement_is_not_reported() -> None:
    document = {
        "model": {"path": "m"},
        "environments": [{"id": "a", "groupSize": 48}, {"id": "b"}],
        "orchestrator": {"batchSize": "48"},
    }
    (problem,) = examine_layer(RLRunSpec, Reader(RLRunSpec, "f").read(document)).problems
    assert problem.path == "orchestrator.batchSize"


def test_partly_valid_document_can_be_examined_further() -> None:
    document = {"model": {"path": "m"}, "environments": [{"id": "a", "ratio": 0}], "seqLen": 1}
    examined = examine_layer(RLRunSpec, Reader(RLRunSpec, "f").read(document))
    assert len(examined.problems) == 2
    assert examined.result is not None
    assert examined.result.environments[0].id == "a"
    assert examined.is_replaced(("seq_len",))
    assert examined.is_replaced(("environments", 0, "ratio"))
    assert not examined.is_replaced(("environments", 0, "id"))
