"""What the API server's book of fields says of an object that the operator has applied."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rlrun_operator.managed_fields import foreign_edits, held_fields, unheld_fields

LABELS = {"app.kubernetes.io/name": "rlrun", "rlrun.io/run": "a"}
SERVICE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "a-trainer", "labels": LABELS, "ownerReferences": [{"uid": "u-1", "name": "a"}]},
    "spec": {
        "clusterIP": "None",
        "selector": {"rlrun.io/run": "a"},
        "ports": [{"name": "channel", "port": 29600, "protocol": "TCP"}],
    },
}
FIELDS: dict[str, Any] = {
    "f:metadata": {
        "f:labels": {"f:app.kubernetes.io/name": {}, "f:rlrun.io/run": {}},
        "f:ownerReferences": {'k:{"uid":"u-1"}': {}},
    },
    "f:spec": {
        "f:clusterIP": {},
        "f:selector": {},
        "f:ports": {'k:{"port":29600,"protocol":"TCP"}': {".": {}, "f:name": {}, "f:port": {}, "f:protocol": {}}},
    },
}
"""As the API server of Kubernetes 1.34 writes it."""


def found(fields: dict[str, Any], uid: str = "u-1", **entry: Any) -> dict[str, Any]:
    fields = copy.deepcopy(fields)
    if "f:ownerReferences" in fields.get("f:metadata", {}):
        fields["f:metadata"]["f:ownerReferences"] = {f'k:{{"uid":"{uid}"}}': {}}
    mine = {"manager": "rlrun-operator", "operation": "Apply", "fieldsV1": fields} | entry
    other = {"manager": "kubectl-edit", "operation": "Update", "fieldsV1": {"f:spec": {"f:type": {}}}}
    return {"metadata": {"managedFields": [other, mine]}}


def without(*path: str) -> dict[str, Any]:
    fields = copy.deepcopy(FIELDS)
    place = fields
    for part in path[:-1]:
        place = place[part]
    del place[path[-1]]
    return fields


def test_what_nobody_has_touched_is_held_whatever_others_add() -> None:
    assert unheld_fields(held_fields(found(FIELDS)), SERVICE) == []


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (("f:spec", "f:selector"), "spec.selector"),
        (("f:spec",), "spec"),
        (("f:spec", "f:ports", 'k:{"port":29600,"protocol":"TCP"}'), "spec.ports"),
        (("f:spec", "f:ports", 'k:{"port":29600,"protocol":"TCP"}', "f:name"), "spec.ports[0].name"),
        (("f:metadata", "f:labels", "f:rlrun.io/run"), "metadata.labels.rlrun.io/run"),
        (("f:metadata", "f:ownerReferences"), "metadata.ownerReferences"),
    ],
)
def test_a_field_that_somebody_took_or_removed_is_told_by_its_path(path: tuple[str, ...], told: str) -> None:
    fields = without(*path)
    if path[-1].startswith("k:"):
        fields["f:spec"].pop("f:ports")  # the last item takes the list with it
    assert unheld_fields(held_fields(found(fields)), SERVICE) == [told]


def test_an_item_of_a_list_that_became_another_one_is_told() -> None:
    fields = copy.deepcopy(FIELDS)
    fields["f:spec"]["f:ports"] = {'k:{"port":1,"protocol":"TCP"}': {".": {}, "f:name": {}}}
    assert unheld_fields(held_fields(found(fields)), SERVICE) == ["spec.ports[0]"]


def test_items_of_a_set_are_compared_by_value() -> None:
    manifest = {"kind": "X", "metadata": {}, "finalizers": ["a", "b"]}
    fields = {"f:finalizers": {'v:"a"': {}}}
    assert unheld_fields(held_fields(found(fields)), manifest) == ["finalizers[1]"]


@pytest.mark.parametrize("entry", [{"manager": "helm"}, {"operation": "Update"}, {"subresource": "status"}])
def test_entries_of_others_and_of_the_status_are_none_of_the_operators(entry: dict[str, Any]) -> None:
    assert held_fields(found(FIELDS, **entry)) == "null"
    assert "spec" in unheld_fields("null", SERVICE)


def test_the_objects_of_all_runs_share_one_text() -> None:
    assert held_fields(found(FIELDS, uid="u-1")) is held_fields(found(FIELDS, uid="u-2"))


def test_an_item_is_found_by_keys_that_the_api_server_fills_in() -> None:
    manifest = copy.deepcopy(SERVICE)
    del manifest["spec"]["ports"][0]["protocol"]
    fields = copy.deepcopy(FIELDS)
    del fields["f:spec"]["f:ports"]['k:{"port":29600,"protocol":"TCP"}']["f:protocol"]
    assert unheld_fields(held_fields(found(fields)), manifest) == []


CONTAINER = {"name": "engine", "image": "evil:1", "env": [{"name": "TOKEN", "value": "secret"}]}
POD_FIELDS = {
    "f:spec": {
        "f:replicas": {},
        "f:containers": {
            'k:{"name":"engine"}': {
                "f:image": {},
                "f:env": {'k:{"name":"TOKEN"}': {".": {}, "f:name": {}, "f:value": {}}},
            }
        },
    }
}


def edited(**entry: Any) -> dict[str, Any]:
    manifest = found(FIELDS)
    other = {"manager": "kubectl-set", "operation": "Update", "fieldsV1": POD_FIELDS} | entry
    manifest["metadata"]["managedFields"].append(other)
    return manifest | {"spec": {"replicas": 3, "containers": [{"name": "sidecar"}, CONTAINER]}}


def test_edits_of_others_have_manager_and_value_and_show_no_value_of_the_environment() -> None:
    seen = foreign_edits(edited())
    assert seen["spec.containers[1].image"] == ("kubectl-set", "evil:1")
    assert seen["spec.replicas"] == ("kubectl-set", "3")
    assert seen["spec.containers[1].env[0].value"] == ("kubectl-set", "")
    assert "secret" not in str(seen)


@pytest.mark.parametrize("entry", [{"manager": "rlrun-operator"}, {"subresource": "status"}])
def test_own_scaling_and_the_status_are_no_edits(entry: dict[str, Any]) -> None:
    assert "spec.replicas" not in foreign_edits(edited(**entry))


def test_an_autoscaler_is_seen_by_the_subresource() -> None:
    found = foreign_edits(
        edited(manager="kube-controller-manager", subresource="scale", fieldsV1={"f:spec": {"f:replicas": {}}})
    )
    assert found["spec.replicas"] == ("kube-controller-manager", "3")


def test_an_object_of_another_controller_has_no_edits() -> None:
    manifest = edited()
    manifest["metadata"]["managedFields"] = manifest["metadata"]["managedFields"][-1:]
    assert foreign_edits(manifest) == {}
