"""Policy of the installation, as the operator applies it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rlrun.api.run_manifest import read_manifest
from rlrun_operator.restrictions import Installation, RunPolicy, find_refusals
from rlrun_operator.restrictions.allowed_fields import POD_TEMPLATE, Containers, Each, Fields, Rule
from rlrun_operator.settings import RenderSettings, SettingsError, from_environment
from tests.unit.operator.build.examples import ROOT, context, pods
from tests.unit.operator.restrictions.cases import ALLOWED, CASES, DEFAULTS, NAMESPACE, RUN, Case, pod
from tests.unit.operator.restrictions.pod_security import violations

SYSTEM = Installation(DEFAULTS, NAMESPACE, "rlrun-operator")
ROLES = ("trainer", "inference", "orchestrator")


def list_refusals(spec: dict[str, Any], policy: RunPolicy = DEFAULTS) -> list[str]:
    return find_refusals(Installation(policy), NAMESPACE, RUN, spec)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forbidden_field_is_refused_with_value_and_fix(case: Case) -> None:
    found = list_refusals(case.spec, case.policy)
    assert len(found) == len(case.refused), found
    for path, told in zip(sorted(case.refused), sorted(found), strict=True):
        assert told.startswith(path), told
        assert "(" in told
        assert ";" in told


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("field", ["serviceAccountName", "serviceAccount"])
@pytest.mark.parametrize("mode", ["Restricted", "Any"])
def test_operator_service_account_is_always_refused(role: str, field: str, mode: Any) -> None:
    policy = RunPolicy(pod_template=mode, service_accounts=("*",))
    found = find_refusals(Installation(policy, NAMESPACE, "boss"), NAMESPACE, RUN, pod(role, **{field: "boss"}))
    assert any("operator's own account" in told and f"{role}.podTemplate.spec.{field} (boss)" in told for told in found)
    elsewhere = find_refusals(Installation(policy, "other", "boss"), NAMESPACE, RUN, pod(role, **{field: "boss"}))
    assert not any("operator's own" in told for told in elsewhere)


def test_run_name_matching_operator_account_is_refused() -> None:
    (told,) = find_refusals(Installation(DEFAULTS, NAMESPACE, "run-rlrun"), NAMESPACE, RUN, {})
    assert told.startswith("metadata.name (run)")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_default_policy_allows_every_example(path: Any) -> None:
    run = read_manifest(path)
    spec = run.spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    assert find_refusals(SYSTEM, NAMESPACE, run.metadata.name, spec) == []


@pytest.mark.parametrize(
    "case", [case for case in ALLOWED if case.policy.pod_template == "Restricted"], ids=lambda c: c.name
)
def test_allowed_pods_meet_the_restricted_standard(case: Case) -> None:
    for role, rendered in pods(context(case.spec)).items():
        assert violations(rendered["spec"]) == [], role


def names(rule: Rule) -> set[str]:
    """Return all fields of a table, including those of its parts."""
    match rule:
        case Fields():
            return set(rule.fields).union(*(names(inner) for inner in rule.fields.values()))
        case Each() | Containers():
            return names(rule.element)
        case _:
            return set()


WORDS = [*sorted(names(POD_TEMPLATE)), "hostPath", "$patch", "add", "procMount", "hostPort", "trainer", "ALL", "data"]
words = st.sampled_from(WORDS)
leaves = st.none() | st.booleans() | st.integers(-1, 2) | words
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4), max_leaves=20
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(["metadata", "spec", "other"]), values, max_size=3))
def test_any_pod_template_is_judged_without_error(template: Any) -> None:
    for mode in ("Restricted", "Any"):
        list_refusals({"trainer": {"podTemplate": template}}, RunPolicy.model_validate({"podTemplate": mode}))


def draw_matching(rule: Rule) -> st.SearchStrategy[Any]:
    """Draw values in the table's shape with right and wrong leaves."""
    match rule:
        case Fields():
            made = {key: draw_matching(inner) for key, inner in rule.fields.items()}
            return st.fixed_dictionaries({}, optional=made)
        case Each() | Containers():
            return st.lists(draw_matching(rule.element), max_size=2)
        case _:
            return st.sampled_from(
                [True, False, 0, 1000, "ALL", "RuntimeDefault", "Unconfined", "trainer", ["ALL"], ["NET_RAW"], {}]
            )


SECURITY = ("securityContext", "containers", "initContainers", "volumes", "hostNetwork", "hostPID", "hostIPC")
POD = POD_TEMPLATE.fields["spec"]
assert isinstance(POD, Fields)
secure = Fields({key: POD.fields[key] for key in SECURITY})


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(draw_matching(secure))
def test_allowed_pod_templates_render_restricted_pods(spec: Any) -> None:
    blocks = {"trainer": {"podTemplate": {"spec": spec}}}
    if not list_refusals(blocks):
        assert violations(pods(context(blocks))["trainer"]["spec"]) == []


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"podTemplate": "Loose"}, "podTemplate"),
        ({"secrets": ["a*b"]}, "secrets.0"),
        ({"images": ["registry.example.com*"]}, "must end in"),
        ({"secret": []}, "secret"),
        ("x", "RLRUN_POLICY"),
    ],
)
def test_invalid_policy_is_refused_by_field(policy: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        from_environment({"RLRUN_POLICY": json.dumps(policy)})


def test_policy_from_environment_reaches_the_builders() -> None:
    environ = {"RLRUN_POLICY": '{"claims": ["a"]}', "POD_NAMESPACE": "system", "POD_SERVICE_ACCOUNT": "op"}
    assert from_environment(environ).render.installation == Installation(RunPolicy(claims=("a",)), "system", "op")
    assert RenderSettings().installation.policy.pod_template == "Restricted"
    with pytest.raises(ValidationError):
        RunPolicy.model_validate({"images": ["a.example*"]})
