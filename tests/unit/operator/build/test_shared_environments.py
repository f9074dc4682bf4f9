"""Shared container for environments without an image: mounts, variables and resources."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun_operator.node_fit import requests_of
from rlrun_operator.render.environments import split_resources
from tests.unit.operator.build.examples import container, context, pods

SOCKET = "/run/rlrun-environments/shared/socket"
APART = {"id": "reverse-text"}
TWENTY = [{"id": "reverse-text", "name": f"e{index}", "isolation": "Container"} for index in range(20)]


def render_orchestrator(blocks: dict[str, Any] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = pods(context({"environments": [APART], **(blocks or {})}))["orchestrator"]["spec"]
    return found


def find_shared_container(spec: dict[str, Any]) -> dict[str, Any]:
    (found,) = (c for c in spec["initContainers"] if c["name"] == "environments")
    assert isinstance(found, dict)
    return found


def test_environments_share_one_container_without_secrets() -> None:
    blocks = {
        "environments": TWENTY,
        "orchestrator": {"image": "mine:1", "env": [{"name": "TEAM_TOKEN", "value": "x"}]},
        "tracking": {"wandb": {"secretRef": {"name": "for-rlrun-wandb"}}},
    }
    found = find_shared_container(render_orchestrator(blocks))
    assert (found["image"], found["restartPolicy"], found["command"][-3:]) == (
        "mine:1",
        "Always",
        ["rlrun-pod", "environments", SOCKET],
    )
    assert "envFrom" not in found
    assert not [v for v in found["env"] if "valueFrom" in v or v["name"].startswith(("RLRUN_", "TEAM_"))]
    assert {m["name"] for m in found["volumeMounts"]} & {"config", "credentials", "tmp", "home", "state"} == set()
    variables = {v["name"]: v.get("value") for v in container(context(blocks), "orchestrator")["env"]}
    assert variables["RLRUN_SHARED_ENVIRONMENTS_SOCKET"] == SOCKET


def test_shared_container_writes_only_data_caches_of_others() -> None:
    spec = render_orchestrator({"storage": {"claimName": "team", "subPath": "exp", "mountPath": "/mnt"}})
    writes = [m for m in find_shared_container(spec)["volumeMounts"] if not m.get("readOnly")]
    assert [m["mountPath"] for m in writes if m["name"] == "data"] == [
        f"/mnt/run/.huggingface/{name}" for name in ("hub", "datasets", "assets", "xet")
    ]
    assert all(m["subPath"].startswith("exp/run/.huggingface/") for m in writes if m["name"] == "data")
    (main,) = spec["containers"]
    read = {m["name"]: m for m in main["volumeMounts"]}
    assert {m["name"] for m in writes} & read.keys() == {"data", "environments"}
    assert read["environments"]["readOnly"]


@pytest.mark.parametrize(
    "environments",
    [
        [{"id": "reverse-text", "isolation": "Process"}],
        [{"id": "reverse-text", "image": "x:1", "isolation": "Container"}],
    ],
)
def test_pod_without_shared_environments_has_no_shared_container(environments: list[dict[str, Any]]) -> None:
    spec = render_orchestrator({"environments": environments})
    assert "environments" not in [c["name"] for c in spec["initContainers"]]
    assert "SHARED_ENVIRONMENTS" not in str(spec)
    assert ".huggingface/hub" not in str(spec)


def test_shared_container_does_not_increase_pod_requests() -> None:
    asked = {"requests": {"cpu": "3", "memory": "5Gi"}, "limits": {"memory": "16Gi", "ephemeral-storage": "1001"}}
    inside = [{"id": "reverse-text", "isolation": "Process"}]
    with_one = requests_of(render_orchestrator({"orchestrator": {"resources": asked}, "environments": inside}))
    with_two = requests_of(render_orchestrator({"orchestrator": {"resources": asked}}))
    assert with_two == with_one | {"ephemeral-storage": 1002.0}  # rounding: half a byte per container


def test_run_without_resources_gets_no_resources() -> None:
    assert "resources" not in find_shared_container(render_orchestrator())
    assert "resources" not in render_orchestrator()["containers"][0]


def test_resources_are_split_between_both_containers() -> None:
    own, theirs = split_resources(
        {
            "requests": {"cpu": "1", "hugepages-2Mi": "4Mi"},
            "limits": {"cpu": 1, "memory": "3e9", "example.com/gpu": 1, "hugepages-2Mi": "4Mi"},
        }
    )
    assert own == {
        "limits": {"cpu": 1, "memory": "3e9", "hugepages-2Mi": "4Mi"},
        "requests": {"cpu": "500m", "memory": "1500000000", "hugepages-2Mi": "4Mi"},
    }
    assert theirs == {
        "limits": {"cpu": 1, "memory": "3e9", "example.com/gpu": 1},
        "requests": {"cpu": "500m", "memory": "1500000000"},
    }


def test_shared_container_reads_template_volumes_except_secrets() -> None:
    volumes = [
        {"name": "rewards", "configMap": {"name": "rewards"}},
        {"name": "netrc", "secret": {"secretName": "for-rlrun-netrc"}},
    ]
    mounts = [{"name": "rewards", "mountPath": "/opt/rewards"}, {"name": "netrc", "mountPath": "/opt/netrc"}]
    template = {"spec": {"volumes": volumes, "containers": [{"name": "orchestrator", "volumeMounts": mounts}]}}
    found = find_shared_container(render_orchestrator({"orchestrator": {"podTemplate": template}}))["volumeMounts"]
    assert {"name": "rewards", "mountPath": "/opt/rewards", "readOnly": True} in found
    assert "netrc" not in str(found)


@pytest.mark.parametrize("template", [{"spec": 3}, {"spec": {"containers": "x", "volumes": [1]}}])
def test_malformed_pod_template_is_passed_to_api_server(template: dict[str, Any]) -> None:
    assert find_shared_container(render_orchestrator({"orchestrator": {"podTemplate": template}}))


def test_cache_for_all_runs_is_mounted_at_its_root() -> None:
    found = find_shared_container(render_orchestrator({"storage": {"claimName": "c", "hubCache": "Volume"}}))[
        "volumeMounts"
    ]
    assert [m["subPath"] for m in found if m["name"] == "data" and not m.get("readOnly")] == [".huggingface"]
