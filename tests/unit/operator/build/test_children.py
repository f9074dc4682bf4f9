"""Properties of all children of a run: ownership, security, ports and configuration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlrun.api.resource import RLRunSpec
from rlrun.config.loading.loader import load_file
from rlrun.config.models.roles import InferenceConfig, OrchestratorConfig, TrainerConfig
from rlrun.config.models.run_config import RunConfig
from rlrun.orchestrator.progress.lease import CREDENTIALS, lease_from_environment
from rlrun.pod.container_settings import PodSettings, settings_from_environment
from rlrun_operator.names import ATTEMPT_LABEL, ROLE_LABEL, ROLES, RUN_LABEL, SPEC_HASH_ANNOTATION
from rlrun_operator.render import render_prerequisites, render_workloads, spec_hash
from tests.unit.operator.build.examples import (
    KEY,
    MANIFESTS,
    container,
    context,
    everything,
    example,
    find_child,
    make_spec,
    pods,
    read_environment,
)

every_example = pytest.mark.parametrize("name", MANIFESTS)


@every_example
def test_child_has_labels_owner_and_no_finalizer(name: str) -> None:
    ctx = example(name)
    for child in everything(ctx):
        metadata = child["metadata"]
        assert metadata["labels"][RUN_LABEL] == ctx.name
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "rlrun-operator"
        assert metadata["namespace"] == ctx.namespace
        assert "finalizers" not in metadata
        if child["kind"] == "PersistentVolumeClaim" and ctx.spec.storage.when_deleted == "Retain":
            continue
        (owner,) = metadata["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (ctx.uid, True, True)


def test_child_names_are_unique_and_fit_into_labels() -> None:
    ctx = context(name="r" * 40)
    names = [(child["kind"], child["metadata"]["name"]) for child in everything(ctx)]
    assert len(set(names)) == len(names)
    revision = 11  # a controller revision with its dash, which becomes a pod label
    assert all(len(name) + revision <= 63 for kind, name in names if kind != "Pod")


@pytest.mark.parametrize(("when_deleted", "tracked"), [("Retain", False), ("Delete", True)])
def test_new_claim_is_owned_and_labeled_by_deletion_policy(when_deleted: str, tracked: bool) -> None:
    """`decide.claims` removes the owner of a retained claim once it has a volume."""
    ctx = context({"storage": {"claimTemplate": {"size": "5Gi"}, "whenDeleted": when_deleted}})
    metadata = find_child(ctx, "PersistentVolumeClaim")["metadata"]
    assert [owner["uid"] for owner in metadata["ownerReferences"]] == [ctx.uid]
    assert ("app.kubernetes.io/instance" in metadata["labels"]) == tracked


@every_example
def test_retained_child_has_no_gitops_pruning_labels(name: str) -> None:
    ctx = example(name)
    for child in everything(ctx):
        metadata, stays = child["metadata"], ctx.spec.storage.when_deleted == "Retain"
        if "ownerReferences" not in metadata or (child["kind"] == "PersistentVolumeClaim" and stays):
            assert set(metadata["labels"]) == {"app.kubernetes.io/name", "app.kubernetes.io/managed-by", RUN_LABEL}
            assert "annotations" not in metadata


def test_existing_claim_is_mounted_and_not_created() -> None:
    ctx = context({"storage": {"claimName": "shared"}})
    assert "PersistentVolumeClaim" not in {child["kind"] for child in everything(ctx)}
    for pod in pods(ctx).values():
        assert {"name": "data", "persistentVolumeClaim": {"claimName": "shared"}} in pod["spec"]["volumes"]


@pytest.mark.parametrize("name", ["quickstart", "gpu"])
def test_pod_meets_restricted_standard(name: str) -> None:
    for role, pod in pods(example(name)).items():
        pod_spec = pod["spec"]
        security = pod_spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == security["runAsGroup"] == security["fsGroup"] == 1000
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & set(pod_spec)
        kinds = {source for volume in pod_spec["volumes"] for source in volume if source != "name"}
        assert kinds <= {"persistentVolumeClaim", "configMap", "emptyDir", "projected"}
        for one in [*pod_spec["containers"], *pod_spec.get("initContainers", [])]:
            own = one["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["readOnlyRootFilesystem"] is True
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert "privileged" not in own, role


@every_example
def test_orchestrator_is_the_only_pod_with_a_token(name: str) -> None:
    for role, pod in pods(example(name)).items():
        assert pod["spec"]["automountServiceAccountToken"] is False
        tokens = [
            source
            for volume in pod["spec"]["volumes"]
            for source in volume.get("projected", {}).get("sources", [])
            if "serviceAccountToken" in source
        ]
        assert len(tokens) == (role == "orchestrator")


def test_orchestrator_role_allows_only_its_lease() -> None:
    ctx = example("quickstart")
    rules = find_child(ctx, "Role")["rules"]
    assert rules == [
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "resourceNames": [find_child(ctx, "Lease")["metadata"]["name"]],
            "verbs": ["get", "patch"],
        }
    ]
    account = find_child(ctx, "ServiceAccount")["metadata"]["name"]
    binding = find_child(ctx, "RoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "team-a"}]
    assert find_child(ctx, "Pod")["spec"]["serviceAccountName"] == account


@every_example
def test_api_key_is_only_in_its_secret(name: str) -> None:
    holders = [child["kind"] for child in everything(example(name)) if KEY in json.dumps(child)]
    assert holders == ["Secret"]


@every_example
def test_pod_mounts_match_its_volumes(name: str) -> None:
    for pod in pods(example(name)).values():
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        containers = [*pod["spec"]["containers"], *pod["spec"]["initContainers"]]
        mounted = {mount["name"] for one in containers for mount in one.get("volumeMounts", [])}
        assert mounted == volumes


@pytest.mark.parametrize("name", ["quickstart", "gpu"])
def test_services_probes_and_containers_agree_on_ports(name: str) -> None:
    ctx = example(name)
    for role in ROLES:
        one = container(ctx, role)
        open_ports = {port["containerPort"] for port in one["ports"]}
        probed = {one[probe]["httpGet"]["port"] for probe in one if probe.endswith("Probe")}
        assert probed <= open_ports
        services = [
            child
            for child in everything(ctx)
            if child["kind"] == "Service" and child["spec"]["selector"][ROLE_LABEL] == role
        ]
        assert {port["port"] for service in services for port in service["spec"]["ports"]} <= open_ports


@pytest.mark.parametrize("name", ["quickstart", "gpu"])
def test_configuration_contains_service_addresses(name: str, tmp_path: Path) -> None:
    ctx = example(name)
    text = find_child(ctx, "ConfigMap")["data"]["run.json"]
    run = RunConfig.model_validate_json(text)
    trainer, inference = (find_child(ctx, "Service", f"{ctx.name}-{role}") for role in ("trainer", "inference"))
    host = f"{ctx.name}-trainer-0.{trainer['metadata']['name']}.team-a.svc.cluster.local"
    assert run.orchestrator.trainer_url == f"http://{host}:{run.trainer.port}"
    assert read_environment(ctx, "trainer", f"{ctx.name}-trainer-0")["RLRUN_MASTER_ADDR"] == host
    engines = f"http://{inference['metadata']['name']}.team-a.svc.cluster.local:{run.inference.port}"
    assert run.orchestrator.inference_service == engines
    assert {run.trainer.host, run.inference.host, run.orchestrator.host} == {"0.0.0.0"}
    assert find_child(ctx, "StatefulSet")["spec"]["serviceName"] == trainer["metadata"]["name"]
    for service in (trainer, inference):
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is True
    # Each role loads this text like any other run.json.
    file = tmp_path / "run.json"
    file.write_text(text)
    assert load_file(TrainerConfig, file, section="trainer").uid == ctx.uid
    assert load_file(InferenceConfig, file, section="inference") == run.inference
    assert load_file(OrchestratorConfig, file, section="orchestrator") == run.orchestrator


@every_example
def test_selectors_match_pod_labels(name: str) -> None:
    ctx = example(name)
    found = pods(ctx)
    for role, pod in found.items():
        assert pod["metadata"]["labels"][RUN_LABEL] == ctx.name
        assert pod["metadata"]["labels"][ROLE_LABEL] == role
    trainer, inference, _ = render_workloads(ctx)
    for workload, role in ((trainer, "trainer"), (inference, "inference")):
        assert workload["spec"]["selector"]["matchLabels"].items() <= found[role]["metadata"]["labels"].items()


@pytest.mark.parametrize("name", ["quickstart", "gpu"])
@pytest.mark.parametrize("role", ROLES)
def test_container_environment_is_valid_pod_settings(name: str, role: str) -> None:
    ctx = example(name, attempt=3)
    pod = f"{ctx.name}-trainer-1" if role == "trainer" else f"{ctx.name}-{role}-abc"
    env = read_environment(ctx, role, pod)
    told = settings_from_environment(env)
    assert (told.pod_name, told.api_key, told.pod_ip) == (pod, KEY, "10.0.0.9")
    assert str(told.config) == "/etc/rlrun/run.json"
    mounts = {mount["mountPath"]: mount for mount in container(ctx, role)["volumeMounts"]}
    assert {"/etc/rlrun", "/dev/shm", "/tmp", env["HOME"], str(PodSettings.state)} <= set(mounts)
    assert ctx.folder.startswith(ctx.spec.storage.mount_path)
    assert ctx.spec.storage.mount_path in mounts
    if role == "trainer":
        assert (told.attempt, told.ordinal, told.nodes) == (3, 1, ctx.spec.trainer.replicas)
    if role == "orchestrator":
        cluster = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
        assert env["RLRUN_PROGRESS_LEASE"] == find_child(ctx, "Lease")["metadata"]["name"]
        assert lease_from_environment(env | cluster, attempt=3, look=lambda: None) is not None  # type: ignore[arg-type, return-value]
        assert str(CREDENTIALS) in mounts


@every_example
def test_new_attempt_keeps_engines_and_replaces_orchestrator(name: str) -> None:
    first, second = render_workloads(example(name, attempt=1)), render_workloads(example(name, attempt=2))
    assert first.inference["spec"] == second.inference["spec"]
    assert second.inference["metadata"]["labels"][ATTEMPT_LABEL] == "2"
    for workload in (second.trainer["spec"]["template"], second.orchestrator):
        assert workload["metadata"]["labels"][ATTEMPT_LABEL] == "2"
    assert first.orchestrator["metadata"]["name"] != second.orchestrator["metadata"]["name"]
    assert first.trainer["metadata"]["name"] == second.trainer["metadata"]["name"]
    assert render_prerequisites(example(name, attempt=1)) == render_prerequisites(example(name, attempt=2))


@every_example
def test_workloads_have_spec_hash_annotation(name: str) -> None:
    ctx = example(name)
    hashes = {workload["metadata"]["annotations"][SPEC_HASH_ANNOTATION] for workload in render_workloads(ctx)}
    assert hashes == {ctx.spec_hash}


EDITS: list[tuple[dict[str, Any], bool]] = [
    ({"inference": {"replicas": 3}}, False),
    ({"inference": {"replicas": 3, "minAvailable": 2}}, False),
    ({"failurePolicy": {"maxRestarts": 9}}, False),
    ({"inference": {"replicas": 3, "maxNumSeqs": 7}}, True),
    ({"maxSteps": 5}, True),
    ({"trainer": {"env": [{"name": "A", "value": "b"}]}}, True),
    ({"placement": {"pool": "a"}}, True),
    ({"checkpoint": {"resume": {"policy": "Never"}}}, True),
    ({"networkPolicy": {"mode": "None"}}, True),
]


@pytest.mark.parametrize(("edit", "counts"), EDITS, ids=[str(edit) for edit, _ in EDITS])
def test_spec_hash_changes_only_with_rendered_fields(edit: dict[str, Any], counts: bool) -> None:
    assert (context(edit).spec_hash != context().spec_hash) == counts


def test_spec_hash_ignores_schema_defaults() -> None:
    filled = make_spec().model_dump(mode="json", by_alias=True)
    assert context({**filled}).spec_hash == context().spec_hash
    assert context({"storage": {"claimTemplate": {}}}).spec_hash == context().spec_hash


def test_spec_hash_ignores_new_unset_fields() -> None:
    class LaterSpec(RLRunSpec):
        new_field: int = 3

    later = LaterSpec.model_validate(make_spec().model_dump(by_alias=True, exclude_unset=True))
    assert spec_hash(later) == spec_hash(make_spec())


def test_engine_count_changes_only_replicas_of_workloads() -> None:
    one, three = render_workloads(context()), render_workloads(context({"inference": {"replicas": 3}}))
    assert one.trainer == three.trainer
    assert one.orchestrator == three.orchestrator
    assert one.inference["spec"]["template"] == three.inference["spec"]["template"]
    assert three.inference["spec"]["replicas"] == 3


@pytest.mark.parametrize(
    ("inference", "missing"),
    [
        ({"replicas": 4, "minAvailable": 2}, 2),
        ({"replicas": 8, "minAvailable": 5}, 3),
        ({"replicas": 4, "minAvailable": 4}, 1),
        ({"replicas": 2}, 1),
        ({"replicas": 1}, None),
        ({"replicas": 4, "minAvailable": 0}, None),
    ],
)
def test_disruption_budget_allows_drain_of_spare_engines(inference: dict[str, int], missing: int | None) -> None:
    found = [
        child
        for child in render_prerequisites(context({"inference": inference})).apply
        if child["apiVersion"] == "policy/v1"
    ]
    assert [budget["spec"]["maxUnavailable"] for budget in found] == ([] if missing is None else [missing])
    for budget in found:
        assert budget["spec"]["selector"]["matchLabels"] == {"rlrun.io/run": "run", "rlrun.io/role": "inference"}
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_excluded_node_does_not_change_engines() -> None:
    plain, excluded = render_workloads(context()), render_workloads(replace(context(), excluded=("a",)))
    assert excluded.inference == plain.inference
    for made in (excluded.trainer, excluded.orchestrator):
        assert made is not None
        assert '"NotIn"' in json.dumps(made)
