"""Field ownership (managedFields) of objects that the operator has applied."""

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
"""As Kubernetes 1.34 writes it."""


def add_managed_fields(fields: dict[str, Any], uid: str = "u-1", **entry: Any) -> dict[str, Any]:
    fields = copy.deepcopy(fields)
    if "f:ownerReferences" in fields.get("f:metadata", {}):
        fields["f:metadata"]["f:ownerReferences"] = {f'k:{{"uid":"{uid}"}}': {}}
    mine = {"manager": "rlrun-operator", "operation": "Apply", "fieldsV1": fields} | entry
    other = {"manager": "kubectl-edit", "operation": "Update", "fieldsV1": {"f:spec": {"f:type": {}}}}
    return {"metadata": {"managedFields": [other, mine]}}


def remove_field(*path: str) -> dict[str, Any]:
    fields = copy.deepcopy(FIELDS)
    place = fields
    for part in path[:-1]:
        place = place[part]
    del place[path[-1]]
    return fields


def test_untouched_object_is_fully_held() -> None:
    assert unheld_fields(held_fields(add_managed_fields(FIELDS)), SERVICE) == []


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
def test_unheld_field_is_reported_with_its_path(path: tuple[str, ...], told: str) -> None:
    fields = remove_field(*path)
    if path[-1].startswith("k:"):
        fields["f:spec"].pop("f:ports")  # the API server removes the list with its last item
    assert unheld_fields(held_fields(add_managed_fields(fields)), SERVICE) == [told]


def test_replaced_list_item_is_reported() -> None:
    fields = copy.deepcopy(FIELDS)
    fields["f:spec"]["f:ports"] = {'k:{"port":1,"protocol":"TCP"}': {".": {}, "f:name": {}}}
    assert unheld_fields(held_fields(add_managed_fields(fields)), SERVICE) == ["spec.ports[0]"]


def test_set_items_are_compared_by_value() -> None:
    manifest = {"kind": "X", "metadata": {}, "finalizers": ["a", "b"]}
    fields = {"f:finalizers": {'v:"a"': {}}}
    assert unheld_fields(held_fields(add_managed_fields(fields)), manifest) == ["finalizers[1]"]


@pytest.mark.parametrize("entry", [{"manager": "helm"}, {"operation": "Update"}, {"subresource": "status"}])
def test_other_managers_and_status_are_not_held_fields(entry: dict[str, Any]) -> None:
    assert held_fields(add_managed_fields(FIELDS, **entry)) == "null"
    assert "spec" in unheld_fields("null", SERVICE)


def test_held_fields_of_all_runs_share_one_text() -> None:
    assert held_fields(add_managed_fields(FIELDS, uid="u-1")) is held_fields(add_managed_fields(FIELDS, uid="u-2"))


def test_list_item_matches_keys_filled_in_by_api_server() -> None:
    manifest = copy.deepcopy(SERVICE)
    del manifest["spec"]["ports"][0]["protocol"]
    fields = copy.deepcopy(FIELDS)
    del fields["f:spec"]["f:ports"]['k:{"port":29600,"protocol":"TCP"}']["f:protocol"]
    assert unheld_fields(held_fields(add_managed_fields(fields)), manifest) == []


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


def edited_object(**entry: Any) -> dict[str, Any]:
    manifest = add_managed_fields(FIELDS)
    other = {"manager": "kubectl-set", "operation": "Update", "fieldsV1": POD_FIELDS} | entry
    manifest["metadata"]["managedFields"].append(other)
    return manifest | {"spec": {"replicas": 3, "containers": [{"name": "sidecar"}, CONTAINER]}}


def test_foreign_edits_name_manager_and_hide_environment_values() -> None:
    seen = foreign_edits(edited_object())
    assert seen["spec.containers[1].image"] == ("kubectl-set", "evil:1")
    assert seen["spec.replicas"] == ("kubectl-set", "3")
    assert seen["spec.containers[1].env[0].value"] == ("kubectl-set", "")
    assert "secret" not in str(seen)


@pytest.mark.parametrize("entry", [{"manager": "rlrun-operator"}, {"subresource": "status"}])
def test_own_scaling_and_status_are_not_foreign_edits(entry: dict[str, Any]) -> None:
    assert "spec.replicas" not in foreign_edits(edited_object(**entry))


def test_autoscaler_edit_is_found_by_its_subresource() -> None:
    found = foreign_edits(
        edited_object(manager="kube-controller-manager", subresource="scale", fieldsV1={"f:spec": {"f:replicas": {}}})
    )
    assert found["spec.replicas"] == ("kube-controller-manager", "3")


def test_object_of_another_controller_has_no_foreign_edits() -> None:
    manifest = edited_object()
    manifest["metadata"]["managedFields"] = manifest["metadata"]["managedFields"][-1:]
    assert foreign_edits(manifest) == {}
