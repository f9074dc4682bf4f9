"""Validation rules of the models and of the API server are the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rlrun.api.crd.admission_policy import validating_policy
from rlrun.api.crd.definition import KEYS_KEY, RULES_KEY, spec_schema
from rlrun.api.crd.frozen_fields import TRANSITION_RULES, reading_defaults
from rlrun.api.pod_fields import TrainerBlock
from rlrun.api.resource import IDENTITY_FIELDS, LIVE_FIELDS, RLRun, RLRunSpec
from rlrun.api.run_manifest import parse_manifest
from rlrun.config.base import Rule, compact_cel, quote_cel
from rlrun.config.loading.problems import ConfigError
from rlrun.config.loading.schema import field_shapes, walk_model
from tests.controlplane.corpus import MALFORMED


def models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for shape in field_shapes(model).values():
        inner = shape.parts[0] if shape.kind == "list" else shape
        if inner.model is not None:
            yield from models(inner.model)


RULES: dict[type[BaseModel], tuple[Rule, ...]] = {
    base: base.__dict__["CEL_RULES"]
    for model in models(RLRunSpec)
    for base in model.__mro__
    if base.__dict__.get("CEL_RULES")
}
EVERY_RULE = [
    pytest.param(rule, id=f"{model.__name__}-{i}") for model, rules in RULES.items() for i, rule in enumerate(rules)
]


@cache
def messages() -> str:
    said = []
    for case in MALFORMED:
        try:
            parse_manifest(case.path.read_text(), case.path.name)
        except ConfigError as error:
            said.append(str(error))
    return "\n".join(said)


def test_models_with_validators_have_rules() -> None:
    judging = {model for model in models(RLRunSpec) if model.__pydantic_decorators__.model_validators}
    assert judging == {model for model in models(RLRunSpec) if any(base in RULES for base in model.__mro__)}


@pytest.mark.parametrize("rule", EVERY_RULE)
def test_rule_message_matches_model_message(rule: Rule) -> None:
    fixed = [part.strip("'; ()") for part in re.split(r"\{[^{}]*\}", rule.message)]
    assert [part for part in fixed if part not in messages()] == []


def ruled(schema: dict[str, Any]) -> Iterator[Rule]:
    yield from schema.get(RULES_KEY, ())
    inside = [schema.get(key) for key in ("items", "additionalProperties", KEYS_KEY)]
    for inner in (*schema.get("properties", {}).values(), *inside):
        if isinstance(inner, dict):
            yield from ruled(inner)


def test_validating_policy_contains_all_rules() -> None:
    policy, binding = validating_policy()
    every = [*ruled(spec_schema(ruled=True)), *RLRun.CEL_RULES, *TRANSITION_RULES]
    text = " ".join(variable["expression"] for variable in policy["spec"]["variables"])
    written = {reading_defaults(rule, {"self": model}) for model, rules in RULES.items() for rule in rules}
    assert written <= set(every)
    for rule in set(every):
        there = [f"({compact_cel(rule.holds)})?''" in text, rule.message_cel() in text]
        assert there == [True, True], rule
        assert text.count(f"({compact_cel(rule.holds)})?''") == every.count(rule), f"once in each place: {rule}"
    assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}


def test_policy_validates_only_specification_writes() -> None:
    (policy, _) = validating_policy()
    (resources,) = policy["spec"]["matchConstraints"]["resourceRules"]
    assert resources["resources"] == ["rlruns"], "not rlruns/status"
    (condition,) = policy["spec"]["matchConditions"]
    assert "object.spec != oldObject.spec" in condition["expression"]
    assert policy["spec"]["failurePolicy"] == "Fail"


def test_rule_message_becomes_cel_expression() -> None:
    rule = Rule("self.a < self.b", "a ({self.a}) is 100% 'too' large for {self.b}", ".a")
    assert rule.message_cel() == r"'a (%s) is 100%% \'too\' large for %s'.format([self.a,self.b])"
    assert Rule("self.a", "write a").message_cel() == "'write a'"
    assert compact_cel(r"a in ['x, y', 'it\'s = c'] && b ? -1 : c") == r"a in['x, y','it\'s = c']&&b?-1:c"
    assert quote_cel("it's \\d") == r"'it\'s \\d'"


def compared(rule: Rule) -> set[str]:
    """Return the paths that a rule compares, from its message."""
    found = re.findall(r"\[dyn\('([\w.]+)'\),dyn\(", rule.message)
    assert [path for path in found if f"o.spec.?{path.replace('.', '.?')}" not in rule.holds] == []
    return set(found)


def test_fields_are_live_fixed_or_frozen_until_suspension() -> None:
    paths = {".".join(path) for path, *_ in walk_model(RLRunSpec, "camel")}
    assert {*LIVE_FIELDS, *IDENTITY_FIELDS} <= paths
    while_suspended, fixed, growing, enlarging = TRANSITION_RULES
    told = [rule.holds.partition("||")[0] for rule in TRANSITION_RULES]
    assert told == ["!(self.?status.?attempt.orValue(0)>0)"] * 4
    covered = [compared(while_suspended), compared(fixed), set(LIVE_FIELDS)]
    two_levels = {path for path in paths if path.count(".") < 2 and "[]" not in path}
    for path in two_levels:
        block = path.partition(".")[0]
        owners = [part for part in covered if path in part or block in part]
        inside = [part for part in covered if any(other.startswith(f"{path}.") for other in part)]
        assert len(owners) == 1 or (not owners and inside), path
    assert "self.spec.?maxSteps.orValue(100)>=oldSelf.spec.?maxSteps.orValue(100)" in growing.holds
    assert "quantity" in enlarging.holds
    unstarted, unbound = "self.?status.?unstarted.orValue([]).size()>0", "volumeName.orValue('')==''"
    assert [unstarted in rule.holds for rule in TRANSITION_RULES] == [True, True, False, True]
    assert [unbound in rule.holds for rule in TRANSITION_RULES] == [False, True, False, True]
    assert ".?accessModes" in fixed.holds
    assert "?size" not in fixed.holds, "the claim's size has a rule of its own"
    assert ("Suspended" in while_suspended.holds, "Suspended" in fixed.holds) == (True, False)


def test_documented_live_fields_equal_live_fields() -> None:
    page = (Path(__file__).parents[3] / "docs" / "life.md").read_text()
    rows = [row.split("|")[1:3] for row in page.partition("| fields | when |")[2].splitlines() if row.startswith("|")]
    always = {
        field
        for fields, when in rows
        if when.strip().startswith("always")
        for field in re.findall(r"`([^`]+)`", fields)
    }
    assert always == set(LIVE_FIELDS)


@pytest.mark.parametrize(
    ("holds", "read"),
    [
        ("self.a.b", "self.a.b"),
        ("!has(self.lora) || self.lora.slots == 1", "!has(self.lora) || self.?lora.?slots.orValue(1) == 1"),
        ("has(self.parallelism.dpShard)", "self.?parallelism.?dpShard.hasValue()"),
        ("self.parallelism.dpShard > 1", "self.?parallelism.?dpShard.value() > 1"),
        ("self.attention.startsWith('self.replicas')", "self.?attention.orValue('auto').startsWith('self.replicas')"),
        ("self.env.all(e, e.name != 'x')", "self.?env.orValue([]).all(e, e.name != 'x')"),
    ],
)
def test_rule_reads_default_of_unset_field(holds: str, read: str) -> None:
    assert reading_defaults(Rule(holds, f"got {{{holds}}}"), {"self": TrainerBlock}) == Rule(read, f"got {{{read}}}")
