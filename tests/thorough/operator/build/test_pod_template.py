"""`podTemplate`: merged last with the semantics of `kubectl patch`, without the fields that the operator needs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlrun_operator.names import RUN_LABEL, RUN_UID_ANNOTATION, SPEC_HASH_ANNOTATION, run_uid_of
from rlrun_operator.render import render_workloads
from rlrun_operator.render.strategic_merge import merge_patch
from tests.unit.operator.build.examples import container, context, everything, example, pods

BASE: dict[str, Any] = {
    "grace": 30,
    "selector": {"a": "1", "b": "2"},
    "containers": [{"name": "x", "image": "i:1", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}],
    "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}],
    "tolerations": [{"key": "gpu"}],
}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("nothing", {}, {}),
    ("scalar", {"grace": 5}, {"grace": 5}),
    ("null removes", {"grace": None}, {"grace": ...}),
    ("null of nothing", {"nope": None}, {}),
    ("map", {"selector": {"b": "3", "c": "4"}}, {"selector": {"a": "1", "b": "3", "c": "4"}}),
    ("map replaced", {"selector": {"$patch": "replace", "c": "4"}}, {"selector": {"c": "4"}}),
    ("map deleted", {"selector": {"$patch": "delete"}}, {"selector": {}}),
    (
        "element by its key",
        {"containers": [{"name": "x", "image": "i:2"}]},
        {"containers": [{**BASE["containers"][0], "image": "i:2"}]},
    ),
    ("new element", {"containers": [{"name": "y"}]}, {"containers": [*BASE["containers"], {"name": "y"}]}),
    ("element deleted", {"containers": [{"name": "x", "$patch": "delete"}]}, {"containers": []}),
    ("deleting nothing", {"containers": [{"name": "z", "$patch": "delete"}]}, {}),
    ("list replaced", {"containers": [{"$patch": "replace"}, {"name": "y"}]}, {"containers": [{"name": "y"}]}),
    (
        "nested list",
        {"containers": [{"name": "x", "env": [{"name": "B", "value": "9"}, {"name": "C", "value": "3"}]}]},
        {
            "containers": [
                {
                    **BASE["containers"][0],
                    "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "9"}, {"name": "C", "value": "3"}],
                }
            ]
        },
    ),
    (
        "another source of a variable",
        {"containers": [{"name": "x", "env": [{"name": "A", "valueFrom": {"fieldRef": {}}}]}]},
        {
            "containers": [
                {
                    **BASE["containers"][0],
                    "env": [{"name": "A", "valueFrom": {"fieldRef": {}}}, {"name": "B", "value": "2"}],
                }
            ]
        },
    ),
    (
        "another kind of volume",
        {"volumes": [{"name": "tmp", "hostPath": {"path": "/x"}}]},
        {"volumes": [{"name": "tmp", "hostPath": {"path": "/x"}}, BASE["volumes"][1]]},
    ),
    (
        "the same kind of volume",
        {"volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "1Gi"}}]},
        {"volumes": [BASE["volumes"][0], {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}]},
    ),
    ("list without a key", {"tolerations": [{"key": "spot"}]}, {"tolerations": [{"key": "spot"}]}),
    ("another type", {"containers": "x"}, {"containers": "x"}),
    ("nulls of new maps", {"new": {"a": None, "b": 1}}, {"new": {"b": 1}}),
]


@pytest.mark.parametrize(("patch", "changes"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_merge_patch_follows_kubectl(patch: dict[str, Any], changes: dict[str, Any]) -> None:
    expected = {key: value for key, value in (BASE | changes).items() if value is not ...}
    before = repr(BASE)
    assert merge_patch(BASE, patch) == expected
    assert repr(BASE) == before, "the generated template itself is not changed"


def test_pod_template_reaches_pod_and_container() -> None:
    ctx = example("pod-template")
    pod = pods(ctx)["trainer"]
    assert pod["metadata"]["labels"]["team"] == "blue"
    assert pod["spec"]["terminationGracePeriodSeconds"] == 120
    assert container(ctx, "trainer")["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert [one["name"] for one in pod["spec"]["containers"]] == ["trainer", "sidecar"]
    assert "livenessProbe" not in container(ctx, "inference")
    assert render_workloads(ctx).orchestrator["spec"]["serviceAccountName"] == "workload-identity"
    assert render_workloads(ctx).orchestrator["metadata"]["annotations"]["note"] == "kept"


def test_pod_template_keeps_labels_owner_hash_and_restart_policy() -> None:
    ctx = example("pod-template")
    pod, orchestrator = pods(ctx)["trainer"], render_workloads(ctx).orchestrator
    assert pod["metadata"]["labels"][RUN_LABEL] == ctx.name
    assert pod["metadata"]["annotations"][RUN_UID_ANNOTATION] == ctx.uid
    assert pod["spec"]["restartPolicy"] == "Always"
    assert orchestrator["metadata"]["annotations"][SPEC_HASH_ANNOTATION] == ctx.spec_hash
    assert orchestrator["metadata"]["ownerReferences"][0]["uid"] == ctx.uid


@pytest.mark.parametrize(
    "containers", [None, [{"$patch": "replace"}, {"name": "mine"}], [{"name": "trainer", "$patch": "delete"}]]
)
def test_pod_template_keeps_the_role_container(containers: Any) -> None:
    ctx = context({"trainer": {"podTemplate": {"spec": {"containers": containers}}}})
    assert container(ctx, "trainer")["command"][-2:] == ["rlrun-pod", "trainer"]


def test_misplaced_template_fields_reach_the_api_server() -> None:
    wrong = {"containers": [{"name": "trainer", "image": "x"}], "apiVersion": "v9"}
    trainer, _, orchestrator = render_workloads(
        context({role: {"podTemplate": wrong} for role in ("trainer", "orchestrator")})
    )
    assert trainer["spec"]["template"]["containers"] == wrong["containers"]
    assert orchestrator["containers"] == wrong["containers"]
    assert orchestrator["apiVersion"] == "v1"


def test_template_spec_of_wrong_type_keeps_its_name() -> None:
    ctx = context({"trainer": {"podTemplate": {"spec": "abc"}}})
    assert pods(ctx)["trainer"]["spec"]["podTemplate.spec"] == "abc"
    assert container(ctx, "trainer")["command"][-2:] == ["rlrun-pod", "trainer"]


WORDS = (
    "metadata spec labels annotations containers name env volumes restartPolicy securityContext "
    "trainer $patch delete replace rlrun.io/run rlrun.io/role rlrun.io/run-uid"
)
names = st.sampled_from(WORDS.split())
values = st.recursive(
    st.none() | st.booleans() | st.integers() | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(names, values, max_size=4))
def test_any_template_keeps_builders_and_pod_labels(template: dict[str, Any]) -> None:
    ctx = context({role: {"podTemplate": template} for role in ("trainer", "inference", "orchestrator")}, attempt=2)
    for child in everything(ctx):
        assert child["metadata"]["labels"][RUN_LABEL] == "run"
        assert child["kind"] != "Pod" or child["apiVersion"] == "v1"
    for role, pod in pods(ctx).items():
        assert pod["metadata"]["labels"]["rlrun.io/role"] == role
        assert run_uid_of(pod["metadata"]) == ctx.uid
        if isinstance(pod["spec"]["containers"], list):
            assert role in [one.get("name") for one in pod["spec"]["containers"] if isinstance(one, dict)]


@pytest.mark.parametrize(
    "env",
    [
        [{"$patch": "replace"}, {"name": "A", "value": "1"}],
        [{"name": "A", "value": "1"}],
    ],
    ids=["replaced", "added"],
)
def test_pod_template_keeps_reserved_variables(env: list[dict[str, Any]]) -> None:
    plain = container(context({}), "trainer")["env"]
    patched = container(
        context({"trainer": {"podTemplate": {"spec": {"containers": [{"name": "trainer", "env": env}]}}}}), "trainer"
    )["env"]
    assert {"name": "A", "value": "1"} in patched
    reserved = [variable for variable in plain if variable["name"].startswith("RLRUN_")]
    assert len(reserved) > 5
    assert [variable for variable in reserved if variable not in patched] == []
    assert len({variable["name"] for variable in patched}) == len(patched)
