"""Scopes of quotas: which pods each counts."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun_operator.queue.queue_model import PodSet
from rlrun_operator.queue.quota import Quotas, counts_pod, read_quota, scopes_of
from tests.unit.operator.queue.test_queue_core import run

Json = dict[str, Any]
DEVICE: Json = {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "8"}}}]}
MEMORY: Json = {"containers": [{"resources": {"requests": {"memory": "1Gi"}}}]}
ACROSS: Json = {
    "affinity": {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"podAffinityTerm": {"namespaceSelector": {}}}]
        }
    }
}


def selector(operator: str, *values: str, name: str = "PriorityClass") -> Json:
    one: Json = {"scopeName": name, "operator": operator} | ({"values": list(values)} if values else {})
    return {"scopeSelector": {"matchExpressions": [one]}}


@pytest.mark.parametrize(
    ("spec", "pod", "counted"),
    [
        ({}, {}, True),
        ({"scopes": ["Terminating"]}, {}, False),
        ({"scopes": ["Terminating"]}, {"activeDeadlineSeconds": 60}, True),
        ({"scopes": ["NotTerminating"]}, {}, True),
        ({"scopes": ["BestEffort"]}, DEVICE, True),
        ({"scopes": ["BestEffort"]}, MEMORY, False),
        ({"scopes": ["BestEffort"]}, {"containers": [], "initContainers": MEMORY["containers"]}, False),
        ({"scopes": ["NotBestEffort"]}, MEMORY, True),
        ({"scopes": ["NotBestEffort"]}, {"resources": {"limits": {"cpu": "1"}}}, True),
        ({"scopes": ["NotBestEffort", "Terminating"]}, MEMORY, False),
        ({"scopes": ["CrossNamespacePodAffinity"]}, ACROSS, True),
        ({"scopes": ["CrossNamespacePodAffinity"]}, {"affinity": {"podAffinity": {}}}, False),
        ({"scopes": ["PriorityClass"]}, {"priorityClassName": "high"}, True),
        ({"scopes": ["PriorityClass"]}, {}, False),
        (selector("In", "high", "top"), {"priorityClassName": "high"}, True),
        (selector("In", "high"), {"priorityClassName": "low"}, False),
        (selector("In", "high"), {}, False),
        (selector("NotIn", "high"), {"priorityClassName": "high"}, False),
        (selector("NotIn", "high"), {}, True),
        (selector("DoesNotExist"), {"priorityClassName": "high"}, False),
        (selector("Exists", name="BestEffort"), DEVICE, True),
        (selector("Exists", name="OfALaterRelease"), DEVICE, False),
    ],
)
def test_a_quota_counts_the_pods_of_all_its_scopes(spec: Json, pod: Json, counted: bool) -> None:
    assert counts_pod(scopes_of(spec), pod) is counted


def test_only_the_counted_roles_of_a_run_are_asked_for_charged_and_known() -> None:
    hard = {"pods": "3"}
    quota = read_quota(
        {"metadata": {"name": "high"}, "spec": {"hard": hard, **selector("In", "high")}, "status": {"hard": hard}}
    )
    assert quota is not None
    gang = (PodSet("trainer", 2, {}, {"priorityClassName": "high"}), PodSet("inference", 9, {}, {}))
    one = run("a", *gang)
    quotas = Quotas({one.namespace: [quota]})
    assert quotas.lack(one) == ""
    quotas.charge(one.namespace, gang)
    assert quotas.lack(one) == "quota high: pods: requested 2, used 2 of 3"
    assert quota.used == {}, "what a plan charges is its own"
