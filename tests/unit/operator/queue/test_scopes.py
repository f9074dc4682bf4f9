"""Scopes of quotas: selection of the counted pods."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun_operator.queue.queue_model import PodSet
from rlrun_operator.queue.quota import Quotas, counts_pod, read_quota, scopes_of
from tests.unit.operator.queue.test_queue_core import make_run

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


def make_selector(operator: str, *values: str, name: str = "PriorityClass") -> Json:
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
        (make_selector("In", "high", "top"), {"priorityClassName": "high"}, True),
        (make_selector("In", "high"), {"priorityClassName": "low"}, False),
        (make_selector("In", "high"), {}, False),
        (make_selector("NotIn", "high"), {"priorityClassName": "high"}, False),
        (make_selector("NotIn", "high"), {}, True),
        (make_selector("DoesNotExist"), {"priorityClassName": "high"}, False),
        (make_selector("Exists", name="BestEffort"), DEVICE, True),
        (make_selector("Exists", name="OfALaterRelease"), DEVICE, False),
    ],
)
def test_quota_counts_pods_that_match_all_its_scopes(spec: Json, pod: Json, counted: bool) -> None:
    assert counts_pod(scopes_of(spec), pod) is counted


def test_quota_charges_only_roles_in_its_scope() -> None:
    hard = {"pods": "3"}
    quota = read_quota(
        {"metadata": {"name": "high"}, "spec": {"hard": hard, **make_selector("In", "high")}, "status": {"hard": hard}}
    )
    assert quota is not None
    gang = (PodSet("trainer", 2, {}, {"priorityClassName": "high"}), PodSet("inference", 9, {}, {}))
    one = make_run("a", *gang)
    quotas = Quotas({one.namespace: [quota]})
    assert quotas.explain_lack(one) == ""
    quotas.charge_gang(one.namespace, gang)
    assert quotas.explain_lack(one) == "quota high: pods: requested 2, used 2 of 3"
    assert quota.used == {}, "what a plan charges is its own"
