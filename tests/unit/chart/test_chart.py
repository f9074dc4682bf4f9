"""What `helm install` of the operator makes, and which values it refuses."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlrun_operator.build import api_key_secret, prerequisites, workloads
from rlrun_operator.preflight import lacking
from rlrun_operator.settings import RenderSettings, from_environment
from tests.unit.chart.rendering import CHART, RefusedError, Render
from tests.unit.operator.build.examples import KEY, example

ROLES, BINDINGS = ("Role", "ClusterRole"), ("RoleBinding", "ClusterRoleBinding")
PLURALS = {"NetworkPolicy": "networkpolicies"}


def of_kind(documents: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [document for document in documents if document["kind"] in kinds]


def operator(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (deployment,) = of_kind(documents, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    result: dict[str, Any] = container
    return result


def environment(documents: list[dict[str, Any]]) -> dict[str, str | None]:
    return {variable["name"]: variable.get("value") for variable in operator(documents)["env"]}


def run_roles(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Roles for runs: those that know RLRuns."""
    return [role for role in of_kind(documents, *ROLES) if any("rlruns" in rule["resources"] for rule in role["rules"])]


def verbs(role: dict[str, Any], group: str, resource: str) -> set[str]:
    return {
        verb
        for rule in role["rules"]
        if group in rule["apiGroups"] and resource in rule["resources"] and "resourceNames" not in rule
        for verb in rule["verbs"]
    }


def test_chart_has_no_lint_warnings(helm: Path) -> None:
    answer = subprocess.run([helm, "lint", "--strict", CHART], text=True, capture_output=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_by_default_the_release_namespace_is_served_and_no_cluster_right_is_taken(render: Render) -> None:
    documents = render()
    assert environment(documents)["RLRUN_WATCH_NAMESPACES"] == "rlrun-system"
    assert of_kind(documents, "ClusterRole", "ClusterRoleBinding", "ServiceMonitor") == []
    assert [role["metadata"]["namespace"] for role in run_roles(documents)] == ["rlrun-system"]


def test_each_watched_namespace_gets_a_role_and_the_binding_to_it(render: Render) -> None:
    documents = render({"watchNamespaces": ["a", "b"]})
    assert environment(documents)["RLRUN_WATCH_NAMESPACES"] == "a,b"
    roles = run_roles(documents)
    assert [role["metadata"]["namespace"] for role in roles] == ["a", "b"]
    bindings = [b for b in of_kind(documents, "RoleBinding") if b["metadata"]["namespace"] in ("a", "b")]
    account = of_kind(documents, "ServiceAccount")[0]["metadata"]["name"]
    for role, binding in zip(roles, bindings, strict=True):
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "rlrun-system"}]


def test_cluster_wide_is_one_cluster_role_with_the_same_rights(render: Render) -> None:
    wide, narrow = render({"clusterWide": True}), render()
    assert environment(wide)["RLRUN_WATCH_NAMESPACES"] == ""
    (cluster_role,) = run_roles(wide)
    assert cluster_role["kind"] == "ClusterRole"
    assert cluster_role["rules"] == run_roles(narrow)[0]["rules"]


def test_nodes_are_read_only_if_allowed(render: Render) -> None:
    documents = render({"readNodes": True})
    assert environment(documents)["RLRUN_READ_NODES"] == "true"
    (role,) = of_kind(documents, "ClusterRole")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list"]}]
    assert environment(render())["RLRUN_READ_NODES"] == "false"


def test_two_releases_share_no_name_of_a_role(render: Render) -> None:
    def names(release: str) -> set[tuple[str, str | None, str]]:
        documents = of_kind(render({"watchNamespaces": ["a"], "readNodes": True}, release=release), *ROLES, *BINDINGS)
        return {(d["kind"], d["metadata"].get("namespace"), d["metadata"]["name"]) for d in documents}

    assert not names("one") & names("two")


def test_operator_may_do_what_a_run_needs(render: Render) -> None:
    (role,) = run_roles(render())
    ctx = example("gpu")
    create, apply = prerequisites(ctx)
    needed = [(child, {"create"}) for child in (*create, api_key_secret(ctx, KEY))]
    needed += [(child, {"create", "patch"}) for child in apply]
    needed += [(child, {"get", "list", "watch", "create", "patch", "delete"}) for child in workloads(ctx)]
    for child, wanted in needed:
        group = child["apiVersion"].rpartition("/")[0]
        plural = PLURALS.get(child["kind"], child["kind"].lower() + "s")
        assert wanted <= verbs(role, group, plural), child["kind"]


def test_operators_own_check_of_its_rights_is_content(render: Render) -> None:
    (role,) = run_roles(render())
    assert lacking(role["rules"]) == []
    assert lacking(role["rules"][1:]), "the check sees what is missing"


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"clusterWide": True, "readNodes": True, "logLevel": "debug", "logFormat": "json"},
        {"watchNamespaces": ["a", "b"], "imagePullPolicy": "Always", "clusterDomain": "example.org"},
        {"operatorName": "team-a"},
    ],
)
def test_operator_understands_its_environment(render: Render, values: dict[str, Any]) -> None:
    documents = render(values)
    told = from_environment({name: value or "" for name, value in environment(documents).items()})
    expected = () if "clusterWide" in values else tuple(values.get("watchNamespaces", ["rlrun-system"]))
    assert told.namespaces == expected
    assert (told.name, told.read_nodes) == (values.get("operatorName", ""), values.get("readNodes", False))
    assert (told.log_level, told.log_format) == (values.get("logLevel", "info"), values.get("logFormat", "plain"))
    assert told.render.image_pull_policy == values.get("imagePullPolicy")
    assert told.render.cluster_domain == values.get("clusterDomain", "cluster.local")
    (deployment,) = of_kind(documents, "Deployment")
    assert deployment["spec"]["template"]["spec"]["containers"][0]["ports"][0]["containerPort"] == told.http_port


def test_operator_holds_every_right_that_it_hands_on(render: Render) -> None:
    (role,) = run_roles(render())
    (handed_on,) = of_kind([dict(child) for child in prerequisites(example("quickstart")).apply], "Role")
    for rule in handed_on["rules"]:
        for resource in rule["resources"]:
            assert set(rule["verbs"]) <= verbs(role, rule["apiGroups"][0], resource)


def test_operator_reads_no_secret_writes_no_spec_and_has_no_wildcard(render: Render) -> None:
    documents = render({"readNodes": True})
    (role,) = run_roles(documents)
    assert verbs(role, "", "secrets") == {"create"}
    assert verbs(role, "rlrun.io", "rlruns") == {"get", "list", "watch"}
    assert verbs(role, "rlrun.io", "rlruns/status") == {"patch"}
    rules = [rule for one in of_kind(documents, *ROLES) for rule in one["rules"]]
    assert "*" not in str(rules)


def test_operator_pod_meets_the_restricted_standard(render: Render) -> None:
    documents = render()
    pod = of_kind(documents, "Deployment")[0]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    own = operator(documents)["securityContext"]
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_images_default_to_the_charts_version_and_the_orchestrator_to_the_trainers(render: Render) -> None:
    defaults = environment(render())
    images = RenderSettings().images
    for role in ("trainer", "orchestrator", "inference"):
        assert defaults[f"RLRUN_{role.upper()}_IMAGE"] == images[role]
    own = render({"image": "op:1", "images": {"trainer": "t:1"}, "imagePullPolicy": "Never"})
    assert environment(own)["RLRUN_ORCHESTRATOR_IMAGE"] == "t:1"
    assert environment(own)["RLRUN_IMAGE_PULL_POLICY"] == "Never"
    assert (operator(own)["image"], operator(own)["imagePullPolicy"]) == ("op:1", "Never")
    assert "RLRUN_IMAGE_PULL_POLICY" not in defaults


def test_service_and_monitor_lead_to_the_operators_port(render: Render) -> None:
    documents = render({"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}})
    (service,), (monitor,), (deployment,) = (of_kind(documents, k) for k in ("Service", "ServiceMonitor", "Deployment"))
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert service["spec"]["ports"][0]["targetPort"] in [port["name"] for port in operator(documents)["ports"]]


def test_labels_of_pods_cannot_hide_them_from_their_deployment(render: Render) -> None:
    documents = render({"podLabels": {"team": "a", "app.kubernetes.io/name": "mine"}})
    spec = of_kind(documents, "Deployment")[0]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert labels["team"] == "a"
    assert spec["selector"]["matchLabels"].items() <= labels.items()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"watchNamespaces": "a"}, "/watchNamespaces.*got string, want array"),
    ({"watchNamespaces": ["a", "a"]}, "/watchNamespaces.*equal"),
    ({"watchNamespaces": ["Team_A"]}, 'watchNamespaces: "Team_A" is not a namespace'),
    ({"watchNamespaces": ["a"], "clusterWide": True}, "contradict each other: remove one"),
    ({"image": {"repository": "x"}}, "/image.*got object, want string"),
    ({"images": {"trainer": "a b"}}, 'images.trainer: "a b" holds white space'),
    ({"images": {"trainr": "a"}}, "'trainr' not allowed"),
    ({"imagPullPolicy": "Never"}, "'imagPullPolicy' not allowed"),
    ({"imagePullPolicy": "Sometimes"}, "/imagePullPolicy.*one of '', 'Always'"),
    ({"logLevel": "verbose"}, "/logLevel.*'debug', 'info'"),
    ({"replicas": -1}, "/replicas.*minimum"),
    ({"replicas": "two"}, "/replicas.*got string, want integer"),
    ({"readNodes": "yes"}, "/readNodes.*want boolean"),
    ({"serviceMonitor": {"interval": "soon"}}, "/serviceMonitor/interval"),
    ({"extraEnv": [{"value": "x"}]}, "/extraEnv/0.*name"),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=[str(values) for values, _ in WRONG])
def test_wrong_values_are_refused_by_their_name(render: Render, values: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        render(values)
