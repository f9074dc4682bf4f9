"""Placement of each role's pods: node labels, tolerations and affinity."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun_operator.names import ROLES, Role
from rlrun_operator.render.pod_placement import (
    HOSTNAME,
    node_selector,
    role_affinity,
    role_tolerations,
    topology_spread,
)
from tests.unit.operator.build.examples import make_spec

GPUS = {"trainer": {"gpusPerReplica": 8}, "inference": {"gpusPerReplica": 1}}
PRODUCT, POOL = "nvidia.com/gpu.product", "rlrun.io/pool"
REQUIRED, PREFERRED = (
    "requiredDuringSchedulingIgnoredDuringExecution",
    "preferredDuringSchedulingIgnoredDuringExecution",
)

SELECTORS: list[tuple[dict[str, Any], dict[Role, dict[str, str]]]] = [
    ({}, {"trainer": {}, "inference": {}, "orchestrator": {}}),
    (
        {"placement": {"gpuProduct": "H200", "pool": "a"}} | GPUS,
        {
            "trainer": {PRODUCT: "H200", POOL: "a"},
            "inference": {PRODUCT: "H200", POOL: "a"},
            "orchestrator": {POOL: "a"},
        },
    ),
    (
        {
            "placement": {
                "gpuProduct": "H200",
                "pool": "a",
                "inference": {"gpuProduct": "L4"},
                "orchestrator": {"pool": "b"},
            }
        }
        | GPUS,
        {"trainer": {PRODUCT: "H200", POOL: "a"}, "inference": {PRODUCT: "L4", POOL: "a"}, "orchestrator": {POOL: "b"}},
    ),
    (  # the product selects nodes only for pods with GPUs
        {"placement": {"gpuProduct": "H200"}, "trainer": {"gpusPerReplica": 8}},
        {"trainer": {PRODUCT: "H200"}, "inference": {}, "orchestrator": {}},
    ),
    (  # the block of the role takes precedence
        {"placement": {"pool": "a"}, "trainer": {"nodeSelector": {POOL: "mine", "zone": "z"}}},
        {"trainer": {POOL: "mine", "zone": "z"}, "inference": {POOL: "a"}, "orchestrator": {POOL: "a"}},
    ),
]


@pytest.mark.parametrize(("blocks", "expected"), SELECTORS)
def test_node_selector_combines_placement_and_role_fields(
    blocks: dict[str, Any], expected: dict[Role, dict[str, str]]
) -> None:
    assert {role: node_selector(make_spec(blocks), role) for role in ROLES} == expected


def test_tolerations_include_gpu_taint_only_with_gpus() -> None:
    blocks = make_spec({"trainer": {"gpusPerReplica": 1, "tolerations": [{"key": "t", "operator": "Exists"}]}})
    assert role_tolerations(blocks, "trainer") == [
        {"key": "nvidia.com/gpu", "operator": "Exists"},
        {"key": "t", "operator": "Exists"},
    ]
    assert role_tolerations(blocks, "inference") == []


def list_affinity_terms(blocks: dict[str, Any], strength: str) -> dict[Role, list[Any]]:
    return {
        role: role_affinity(make_spec(blocks), "run", role).get("podAffinity", {}).get(strength, []) for role in ROLES
    }


def test_required_topology_applies_to_trainer_pods() -> None:
    terms = list_affinity_terms({"placement": {"topology": {"required": "rack"}}}, REQUIRED)
    selector = {"matchLabels": {"rlrun.io/run": "run", "rlrun.io/role": "trainer"}}
    assert terms == {
        "trainer": [{"topologyKey": "rack", "labelSelector": selector}],
        "inference": [],
        "orchestrator": [],
    }


def test_preferred_topology_applies_to_trainer_and_engines() -> None:
    terms = list_affinity_terms({"placement": {"topology": {"preferred": "rack", "scope": "Run"}}}, PREFERRED)
    (term,) = terms["trainer"]
    assert term["weight"] == 100
    assert term["podAffinityTerm"]["topologyKey"] == "rack"
    (among,) = term["podAffinityTerm"]["labelSelector"]["matchExpressions"]
    assert among["values"] == ["trainer", "inference"]
    assert terms["inference"] == terms["trainer"]
    assert terms["orchestrator"] == []


def test_user_affinity_is_extended() -> None:
    node = {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [{"key": "fabric", "operator": "Exists"}]}]}}
    own: dict[str, Any] = {
        "podAffinity": {REQUIRED: [{"topologyKey": "zone", "labelSelector": {}}]},
        "nodeAffinity": node,
    }
    blocks = make_spec({"trainer": {"affinity": own}, "placement": {"topology": {"required": "rack"}}})
    found = role_affinity(blocks, "run", "trainer")
    assert found["podAffinity"][REQUIRED][0] == own["podAffinity"][REQUIRED][0]
    assert [term["topologyKey"] for term in found["podAffinity"][REQUIRED]] == ["zone", "rack"]
    assert found["nodeAffinity"] == node


def list_spread_terms(how: str | None) -> tuple[list[Any], list[Any]]:
    blocks = make_spec({"placement": {"spreadInference": how}} if how else {})
    anti = role_affinity(blocks, "run", "inference").get("podAntiAffinity", {}).get(REQUIRED, [])
    return topology_spread(blocks, "run", "inference"), anti


def test_engine_spread_follows_its_setting() -> None:
    soft, hard = list_spread_terms(None)
    assert [constraint["whenUnsatisfiable"] for constraint in soft] == ["ScheduleAnyway"]
    assert hard == []
    soft, hard = list_spread_terms("Required")
    assert soft == []
    assert [term["topologyKey"] for term in hard] == [HOSTNAME]
    assert list_spread_terms("None") == ([], [])
    assert topology_spread(make_spec(), "run", "trainer") == []


def test_single_node_volume_puts_pods_on_trainer_node() -> None:
    storage = {"storage": {"claimTemplate": {"accessModes": ["ReadWriteOnce"]}}}
    terms = list_affinity_terms(storage, REQUIRED)
    assert all(len(found) == 1 and found[0]["topologyKey"] == HOSTNAME for found in terms.values())
    for role in ("inference", "orchestrator"):
        assert terms[role][0]["labelSelector"]["matchLabels"]["rlrun.io/role"] == "trainer"
    # Engines that keep running hold the volume on their node, so the next attempt's trainer follows them.
    assert "inference" in terms["trainer"][0]["labelSelector"]["matchExpressions"][0]["values"]
    assert topology_spread(make_spec(storage), "run", "inference") == []
    assert list_affinity_terms({"storage": {"claimTemplate": {}}}, REQUIRED)["trainer"] == []


def test_excluded_nodes_are_added_to_each_user_term() -> None:
    terms = [{"matchExpressions": [{"key": "fabric", "operator": "Exists"}]}, {"matchFields": [{"key": "x"}]}]
    blocks = make_spec({"trainer": {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}}}})
    away = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in ("a", "b")]
    found = role_affinity(blocks, "run", "trainer", excluded=("a", "b"))["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert found == [
        {"matchExpressions": terms[0]["matchExpressions"], "matchFields": away},
        {"matchFields": [{"key": "x"}, *away]},
    ]
    alone = role_affinity(make_spec(), "run", "orchestrator", excluded=("a",))["nodeAffinity"][REQUIRED][
        "nodeSelectorTerms"
    ]
    assert alone == [{"matchFields": away[:1]}]
