"""Every pod that the operator renders meets Kubernetes' restricted standard: docs/install.md has namespaces labelled with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlrun_operator.render import RunContext, render_workloads
from tests.unit.operator.build.examples import ON_RECORD, context, example
from tests.unit.operator.restrictions.pod_security import violations

LOOSENED = {"pod-template"}
"""Its podTemplate adds a capability and a sidecar of its own: what the policy is for."""


def specs(ctx: RunContext) -> list[dict[str, Any]]:
    """The spec of each role's pods."""
    return [
        child["spec"] if child["kind"] == "Pod" else child["spec"]["template"]["spec"]
        for child in render_workloads(ctx).existing
    ]


@pytest.mark.parametrize("name", sorted(ON_RECORD))
def test_rendered_pods_meet_the_restricted_standard(name: str) -> None:
    found = [violation for spec in specs(example(name)) for violation in violations(spec)]
    assert bool(found) == (name in LOOSENED), found


def test_containers_of_environments_meet_it_too() -> None:
    ctx = context({"environments": [{"id": "reverse-text", "image": "registry.example.com/x:1"}]})
    orchestrator = specs(ctx)[-1]
    assert [c["name"] for c in orchestrator["initContainers"]] == ["folder", "environment-code", "environment-0"]
    assert violations(orchestrator) == []


@pytest.mark.parametrize("name", sorted(ON_RECORD.keys() - LOOSENED))
def test_a_namespace_that_assigns_users_is_asked_for_none(name: str) -> None:
    """OpenShift's restricted-v2 refuses a user, a group or an fsGroup outside of the namespace's range."""
    ctx = example(name)
    ctx = replace(ctx, settings=replace(ctx.settings, assigned_users=True))
    for spec in specs(ctx):
        contexts = [
            spec["securityContext"],
            *(c["securityContext"] for c in (*spec["initContainers"], *spec["containers"])),
        ]
        numbers = {"runAsUser", "runAsGroup", "fsGroup", "supplementalGroups", "fsGroupChangePolicy"}
        assert not any(numbers & found.keys() for found in contexts)
        assert violations(spec) == []


def test_containers_of_environments_have_the_pods_user_there() -> None:
    ctx = context({"environments": [{"id": "reverse-text", "image": "registry.example.com/x:1"}]})
    ctx = replace(ctx, settings=replace(ctx.settings, assigned_users=True))
    assert "runAsUser" not in str(specs(ctx)[-1])
