"""Pods that the operator renders meet Kubernetes' restricted standard, which docs/install.md requires of namespaces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlrun_operator.render import RunContext, render_workloads
from tests.unit.operator.build.examples import ON_RECORD, context, example
from tests.unit.operator.restrictions.pod_security import violations

LOOSENED = {"pod-template"}
"""Examples whose podTemplate adds a capability and a sidecar; the policy covers these."""


def list_pod_specs(ctx: RunContext) -> list[dict[str, Any]]:
    """Spec of each role's pods."""
    return [
        child["spec"] if child["kind"] == "Pod" else child["spec"]["template"]["spec"]
        for child in render_workloads(ctx).existing
    ]


@pytest.mark.parametrize("name", sorted(ON_RECORD))
def test_rendered_pods_meet_the_restricted_standard(name: str) -> None:
    found = [violation for spec in list_pod_specs(example(name)) for violation in violations(spec)]
    assert bool(found) == (name in LOOSENED), found


def test_environment_containers_meet_restricted_standard() -> None:
    ctx = context({"environments": [{"id": "reverse-text", "image": "registry.example.com/x:1"}]})
    orchestrator = list_pod_specs(ctx)[-1]
    assert [c["name"] for c in orchestrator["initContainers"]] == ["folder", "environment-code", "environment-0"]
    assert violations(orchestrator) == []


@pytest.mark.parametrize("name", sorted(ON_RECORD.keys() - LOOSENED))
def test_pods_set_no_user_in_namespace_with_assigned_users(name: str) -> None:
    """OpenShift's restricted-v2 refuses a user, a group or an fsGroup outside of the namespace's range."""
    ctx = example(name)
    ctx = replace(ctx, settings=replace(ctx.settings, assigned_users=True))
    for spec in list_pod_specs(ctx):
        contexts = [
            spec["securityContext"],
            *(c["securityContext"] for c in (*spec["initContainers"], *spec["containers"])),
        ]
        numbers = {"runAsUser", "runAsGroup", "fsGroup", "supplementalGroups", "fsGroupChangePolicy"}
        assert not any(numbers & found.keys() for found in contexts)
        assert violations(spec) == []


def test_environment_containers_set_no_user_with_assigned_users() -> None:
    ctx = context({"environments": [{"id": "reverse-text", "image": "registry.example.com/x:1"}]})
    ctx = replace(ctx, settings=replace(ctx.settings, assigned_users=True))
    assert "runAsUser" not in str(list_pod_specs(ctx)[-1])
