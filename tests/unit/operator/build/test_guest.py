"""Children of a guest (`trainer.sharedWith`): its own objects and its access to the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlrun.api.resource import RLRunSpec
from rlrun.config.loading.loader import load_file
from rlrun.config.models.run_config import RunConfig
from rlrun_operator.names import ROLE_LABEL, RUN_LABEL
from rlrun_operator.render import Host, RunContext, api_key_secret, render_workloads
from rlrun_operator.render.pod_placement import HOSTNAME
from tests.unit.operator.build.examples import HOST_UID, context, everything, example, find_child, make_spec

SHARED: dict[str, Any] = {"trainer": {"lora": {"slots": 2}}}


def make_guest(hosts: dict[str, Any] | None = None, own: dict[str, Any] | None = None) -> RunContext:
    blocks = {"trainer": {"sharedWith": "host", "lora": {}}} | (own or {})
    host = Host("host", HOST_UID, make_spec(SHARED | (hosts or {})), 3)
    return replace(context(blocks, name="guest"), host=host)


def find_orchestrator(ctx: RunContext) -> dict[str, Any]:
    made = render_workloads(ctx).existing
    assert len(made) == 1
    return dict(made[0])


def list_policies(ctx: RunContext) -> dict[str, dict[str, Any]]:
    return {m["metadata"]["name"]: m["spec"] for m in everything(ctx) if m["kind"] == "NetworkPolicy"}


def test_guest_uses_host_services_with_its_own_key(tmp_path: Any) -> None:
    ctx = make_guest()
    file = tmp_path / "run.json"
    file.write_text(find_child(ctx, "ConfigMap")["data"]["run.json"])
    config = load_file(RunConfig, file)
    assert config.inference is None
    assert config.orchestrator.trainer_url == "http://host-trainer-0.host-trainer.team-a.svc.cluster.local:29600"
    assert config.orchestrator.inference_service == "http://host-inference.team-a.svc.cluster.local:8000"
    assert config.orchestrator.output_dir == config.trainer.output_dir == "/data/guest"
    (main,) = (c for c in find_orchestrator(ctx)["spec"]["containers"] if c["name"] == "orchestrator")
    (key,) = (v["valueFrom"]["secretKeyRef"] for v in main["env"] if v["name"] == "RLRUN_API_KEY")
    assert key["name"] == api_key_secret(ctx, "k" * 32)["metadata"]["name"] == "guest-key-uid-1"


@pytest.mark.parametrize(
    ("storage", "claim", "path"),
    [
        ({}, "host-data", "/data"),
        ({"claimName": "ours", "mountPath": "/mnt/runs", "subPath": "team-a"}, "ours", "/mnt/runs"),
    ],
)
def test_guest_uses_volume_of_its_host(storage: dict[str, Any], claim: str, path: str) -> None:
    ctx = make_guest({"storage": storage} if storage else None)
    pod = find_orchestrator(ctx)["spec"]
    (volume,) = (v for v in pod["volumes"] if v["name"] == "data")
    assert volume["persistentVolumeClaim"]["claimName"] == claim
    whole, own, slots = (m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "data")
    above = f"{storage['subPath']}/" if storage else ""
    assert (whole["mountPath"], whole.get("subPath"), whole["readOnly"]) == (path, storage.get("subPath"), True)
    assert (own["mountPath"], own["subPath"], "readOnly" in own) == (f"{path}/guest", f"{above}guest", False)
    assert (slots["mountPath"], slots["subPath"]) == (f"{path}/host/shared/guest", f"{above}host/shared/guest")
    assert [
        word for word in pod["initContainers"][0]["command"] if word.startswith(path) and ".huggingface" not in word
    ] == [f"{path}/guest", f"{path}/host/shared/guest"]
    assert ctx.folder == f"{path}/guest"
    assert not [m for m in everything(ctx) if m["kind"] == "PersistentVolumeClaim"]


def test_guest_with_single_node_volume_follows_host_trainer() -> None:
    storage = {"claimTemplate": {"accessModes": ["ReadWriteOnce"]}}
    affinity = find_orchestrator(make_guest({"storage": storage}))["spec"]["affinity"]
    (term,) = affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == HOSTNAME
    assert term["labelSelector"]["matchLabels"] == {RUN_LABEL: "host", ROLE_LABEL: "trainer"}
    assert "affinity" not in find_orchestrator(make_guest())["spec"]


def test_guest_policy_opens_host_pods_only_to_its_orchestrator() -> None:
    access = list_policies(make_guest())["guest-host-access"]
    assert access["podSelector"]["matchLabels"] == {RUN_LABEL: "host"}
    assert access["podSelector"]["matchExpressions"][0]["values"] == ["trainer", "inference"]
    (rule,) = access["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": {RUN_LABEL: "guest", ROLE_LABEL: "orchestrator"}}}]
    assert [port["port"] for port in rule["ports"]] == [29600, 8000]
    assert access["policyTypes"] == ["Ingress"]


def test_guest_does_not_add_policy_to_open_host() -> None:
    open_host = {"networkPolicy": {"mode": "None"}}
    assert set(list_policies(make_guest(open_host))) == {"guest-egress"}
    assert set(list_policies(make_guest(own=open_host))) == {"guest-host-access"}


def test_guest_example_needs_only_an_orchestrator() -> None:
    kinds = [manifest["kind"] for manifest in everything(example("shared-guest"))]
    assert kinds.count("Pod") == 1
    assert not {"StatefulSet", "Deployment", "Service", "Secret", "PersistentVolumeClaim"} & set(kinds)


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ({"inference": {"replicas": 3}}, "inference.replicas (3) is set by the host"),
        ({"trainer": {"sharedWith": "h", "lora": {}, "image": "x"}}, "trainer.image (x) is set by the host"),
    ],
)
def test_guest_with_host_fields_is_refused(blocks: dict[str, Any], words: str) -> None:
    document = {"model": {"path": "m"}, "environments": [{"id": "arithmetic"}]}
    document |= {"trainer": {"sharedWith": "h", "lora": {}}} | blocks
    with pytest.raises(ValueError, match=r"trainer\.sharedWith; remove it") as caught:
        RLRunSpec.model_validate(document)
    assert words in str(caught.value)
