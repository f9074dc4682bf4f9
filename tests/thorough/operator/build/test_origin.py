"""Manifest fields for refusals of children, with the messages of a real API server (1.34)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrun_operator.render import render_prerequisites, render_workloads
from rlrun_operator.render.field_origin import Cause, explain_refusal, find_origin, refusal_causes
from tests.unit.operator.build.examples import context

ENV = "Invalid value: \"1 A=\": a valid environment variable name must consist only of printable ASCII characters other than '='"
SPEC: dict[str, Any] = {
    "trainer": {
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
        "envFrom": [{"secretRef": {"name": "s"}}],
        "gpusPerReplica": 1,
        "resources": {"limits": {"memory": "1Gi", "example.com/rdma": "500m"}},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "imagePullSecrets": [{"name": "r"}],
        "nodeSelector": {"zone": "a"},
        "priorityClassName": "high",
        "sharedMemory": "1Gi",
        "podTemplate": {
            "metadata": {"labels": {"a": "b"}},
            "spec": {
                "hostNetwork": True,
                "nodeSelectr": {"a": "b"},
                "containers": [
                    {"name": "mine", "image": " "},
                    {"name": "trainer", "foo": 1, "env": [{"name": "C", "value": "3"}]},
                ],
            },
        },
    },
    "orchestrator": {
        "affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "a"}]}}
    },
    "environments": [{"id": "gsm8k"}, {"id": "arithmetic", "image": "sums"}],
    "networkPolicy": {"extraEgress": [{"to": []}, {"to": [{"ipBlock": {"cidr": "10.0.0.0"}}]}]},
    "storage": {"claimTemplate": {"size": "1Gi"}, "subPath": "team-a"},
}


@pytest.fixture(scope="module")
def children() -> dict[str, Any]:
    ctx = context(SPEC)
    needs = render_prerequisites(ctx)
    every = [*render_workloads(ctx).existing, *needs.create, *needs.apply]
    return {child["kind"] if child["kind"] != "NetworkPolicy" else child["metadata"]["name"]: child for child in every}


def container_path(child: dict[str, Any], container: str, variable: str = "") -> str:
    """Return the path of a container of the template, or of one of its variables."""
    spec, start = (
        (child["spec"], "spec") if child["kind"] == "Pod" else (child["spec"]["template"]["spec"], "spec.template.spec")
    )
    for kind in ("containers", "initContainers"):
        for index, found in enumerate(spec[kind]):
            if found["name"] == container:
                names = [each["name"] for each in found.get("env", ())]
                return f"{start}.{kind}[{index}]" + (f".env[{names.index(variable)}]" if variable else "")
    raise AssertionError(f"no container {container}")


@pytest.mark.parametrize(
    ("container", "variable", "rest", "field"),
    [
        ("trainer", "B", ".name", "trainer.env[1].name"),
        ("folder", "", ".resources.limits[example.com/rdma]", "trainer.resources.limits[example.com/rdma]"),
        ("trainer", "A", ".valueFrom.secretKeyRef.key", "trainer.env[0].valueFrom.secretKeyRef.key"),
        ("trainer", "C", ".name", "trainer.podTemplate.spec.containers[1].env[0].name"),
        ("trainer", "RLRUN_ATTEMPT", ".name", None),
        ("trainer", "", ".envFrom[0].secretRef.name", "trainer.envFrom[0].secretRef.name"),
        ("trainer", "", ".envFrom", "trainer.envFrom"),
        ("trainer", "", ".resources.limits[example.com/rdma]", "trainer.resources.limits[example.com/rdma]"),
        ("trainer", "", ".resources.limits[nvidia.com/gpu]", "placement.gpuResource"),
        ("trainer", "", ".resources.requests", "trainer.resources.requests"),
        ("trainer", "", ".volumeMounts[0].mountPath", "storage.mountPath"),
        ("trainer", "", ".volumeMounts[0].subPath", "storage.subPath"),
        ("trainer", "", ".image", None),
        ("mine", "", ".image", "trainer.podTemplate.spec.containers[0].image"),
    ],
)
def test_container_field_maps_to_manifest_field(
    children: dict[str, Any], container: str, variable: str, rest: str, field: str | None
) -> None:
    child = children["StatefulSet"]
    assert find_origin(child, container_path(child, container, variable) + rest, SPEC) == field


@pytest.mark.parametrize(
    ("kind", "path", "field"),
    [
        ("StatefulSet", "spec.replicas", "trainer.replicas"),
        ("StatefulSet", "spec.serviceName", None),
        ("StatefulSet", "spec.template.spec.tolerations[1].key", "trainer.tolerations[0].key"),
        ("StatefulSet", "spec.template.spec.tolerations[0].key", None),
        ("StatefulSet", "spec.template.spec.imagePullSecrets[0].name", "trainer.imagePullSecrets[0].name"),
        ("StatefulSet", "spec.template.spec.nodeSelector", "trainer.nodeSelector"),
        ("StatefulSet", "spec.template.spec.priorityClassName", "trainer.priorityClassName"),
        ("StatefulSet", "spec.template.spec.hostNetwork", "trainer.podTemplate.spec.hostNetwork"),
        ("StatefulSet", "spec.template.metadata.labels", "trainer.podTemplate.metadata.labels"),
        ("StatefulSet", ".spec.template.spec.nodeSelectr", "trainer.podTemplate.spec.nodeSelectr"),
        ("StatefulSet", '.spec.template.spec.containers[name="trainer"].foo', "trainer.podTemplate.spec.containers[1].foo"),
        ("StatefulSet", "spec.template.spec.volumes[0].persistentVolumeClaim.claimName", "storage.claimName"),
        ("StatefulSet", "spec.template.spec.volumes[2].emptyDir.sizeLimit", "trainer.sharedMemory"),
        ("Pod", "spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey",
         "orchestrator.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey"),
        ("Pod", "spec.restartPolicy", None),
        ("PersistentVolumeClaim", "spec.resources.requests.storage", "storage.claimTemplate.size"),
        ("Lease", "spec.leaseDurationSeconds", None),
    ],
)  # fmt: skip
def test_child_field_maps_to_manifest_field(children: dict[str, Any], kind: str, path: str, field: str | None) -> None:
    assert find_origin(children[kind], path, SPEC) == field


def test_environment_image_maps_to_its_environment(children: dict[str, Any]) -> None:
    assert (
        find_origin(children["Pod"], container_path(children["Pod"], "environment-1") + ".image", SPEC)
        == "environments[1].image"
    )


def test_custom_egress_rule_maps_to_extra_egress(children: dict[str, Any]) -> None:
    policy = next(child for name, child in children.items() if name.endswith("-egress"))
    last = len(policy["spec"]["egress"]) - 1
    path = f"spec.egress[{last}].to[0].ipBlock.cidr"
    assert find_origin(policy, path, SPEC) == "networkPolicy.extraEgress[1].to[0].ipBlock.cidr"
    assert find_origin(policy, "spec.egress[0].to[0]", SPEC) is None


def test_refusal_is_reported_in_manifest_fields(children: dict[str, Any]) -> None:
    child = children["StatefulSet"]
    details = {
        "name": "a-trainer",
        "group": "apps",
        "kind": "StatefulSet",
        "causes": [
            {"reason": "FieldValueInvalid", "message": ENV, "field": f"{container_path(child, 'trainer', 'A')}.name"},
            {"reason": "FieldValueInvalid", "message": ENV, "field": f"{container_path(child, 'trainer', 'A')}.name"},
            {"reason": "FieldValueForbidden", "message": "Forbidden: no", "field": "spec.serviceName"},
        ],
    }
    name = child["metadata"]["name"]
    assert explain_refusal(child, refusal_causes("StatefulSet.apps is invalid", details), "unused", SPEC) == [
        f"trainer.env[0].name: {ENV}",
        f"StatefulSet {name}: spec.serviceName: Forbidden: no",
    ]
    assert explain_refusal(child, refusal_causes("no causes", {}), "no causes", SPEC) == [
        f"StatefulSet {name}: no causes"
    ]


def test_schema_refusal_maps_fields_of_its_message(children: dict[str, Any]) -> None:
    several = (
        "failed to create typed patch object (default/a-trainer; apps/v1, Kind=StatefulSet): errors:\n"
        '  .spec.template.spec.containers[name="trainer"].foo: field not declared in schema\n'
        "  .spec.template.spec.nodeSelectr: field not declared in schema"
    )
    assert explain_refusal(children["StatefulSet"], refusal_causes(several, {}), several, SPEC) == [
        "trainer.podTemplate.spec.containers[1].foo: field not declared in schema",
        "trainer.podTemplate.spec.nodeSelectr: field not declared in schema",
    ]
    one = (
        "failed to create typed patch object (default/a-trainer; apps/v1, Kind=StatefulSet): "
        ".spec.template.spec.containers: expected list, got &{trainer}"
    )
    spec = {"trainer": {"podTemplate": {"spec": {"containers": "trainer"}}}}
    child = render_workloads(context(spec)).trainer
    assert child is not None
    assert explain_refusal(child, refusal_causes(one, {}), one, spec) == [
        "trainer.podTemplate.spec.containers: expected list, got &{trainer}"
    ]


ANYTHING = st.recursive(
    st.none() | st.text(max_size=5), lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner)
)


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=80), ANYTHING)
def test_any_refusal_is_explained(field: str, value: Any) -> None:
    spec = {"trainer": {"podTemplate": {"spec": value}}}
    child = render_workloads(context(spec)).trainer
    assert child is not None
    for path in (
        field,
        f"spec.template.spec{field}",
        f"spec.template.spec.containers[{field}].env[0]",
        f"spec.template.{field}",
    ):
        (said,) = explain_refusal(child, [Cause(path, "no")], "no", spec)
        assert said.endswith(": no")
    assert refusal_causes(field, {"causes": value}) is not None
