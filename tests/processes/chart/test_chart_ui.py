"""Team page in the chart: off by default, least rights, arguments that its command parses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlrun.cli.web_pages import ui_team_parser
from rlrun.ui.team.gate import parse_networks
from rlrun.ui.team.team_server import claims_of
from tests.processes.chart.rendering import RefusedError, Render
from tests.unit.operator.restrictions.scanner_rules import broken

Document = dict[str, Any]
READS = [
    (("rlrun.io",), ("rlruns",), ("get", "list")),
    (("",), ("pods", "events"), ("list",)),
    (("coordination.k8s.io",), ("leases",), ("get",)),
]
REVIEWS = [
    (("authentication.k8s.io",), ("tokenreviews",), ("create",)),
    (("authorization.k8s.io",), ("subjectaccessreviews",), ("create",)),
]
TEAM: Document = {
    "namespace": "team-a",
    "claims": ["data", "more"],
    "audiences": ["rlrun-ui"],
    "trustedProxies": ["10.244.0.0/16", "fd00::1"],
}


_RENDERED: dict[str, list[Document]] = {}
"""Rendered documents by values: Helm is slow."""


def render_all(render: Render, values: Document) -> list[Document]:
    """Return all documents of the chart."""
    key = json.dumps(values)
    if key not in _RENDERED:
        _RENDERED[key] = render(values)
    return _RENDERED[key]


def render_ui(render: Render, more: Document | None = None, **values: Any) -> list[Document]:
    """Return only the documents of the page."""
    every = render_all(render, {**values, "ui": {"enabled": True, **(more or {})}})
    return [each for each in every if each["metadata"]["labels"]["app.kubernetes.io/name"] == "rlrun-ui"]


def of_kind(documents: list[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def get_only(documents: list[Document], kind: str) -> Document:
    (found,) = of_kind(documents, kind)
    return found


def get_container(documents: list[Document]) -> Document:
    (found,) = get_only(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(found)


def get_rules(role: Document) -> list[tuple[tuple[str, ...], ...]]:
    return [tuple(tuple(rule[key]) for key in ("apiGroups", "resources", "verbs")) for rule in role["rules"]]


def test_page_is_off_by_default_and_changes_nothing_else(render: Render) -> None:
    before = render()
    assert not [each for each in before if "ui" in each["metadata"]["name"].split("-")]
    after = render_all(render, {"ui": {"enabled": True}})
    assert [each for each in after if each in before] == before
    assert {each["metadata"]["labels"]["app.kubernetes.io/name"] for each in after if each not in before} == {
        "rlrun-ui"
    }


def test_page_reads_served_namespaces_with_least_rights(render: Render) -> None:
    documents = render_ui(render, watchNamespaces=["a", "b"])
    assert [(role["metadata"]["namespace"], get_rules(role)) for role in of_kind(documents, "Role")] == [
        ("a", READS),
        ("b", READS),
    ]
    assert get_rules(get_only(documents, "ClusterRole")) == REVIEWS
    assert get_container(documents)["args"] == ["--port=8080", "--namespace=a", "--namespace=b"]
    account = get_only(documents, "ServiceAccount")["metadata"]
    assert account["namespace"] == "rlrun-system"
    bindings = of_kind(documents, "RoleBinding") + of_kind(documents, "ClusterRoleBinding")
    roles = [(role["kind"], role["metadata"]["name"]) for role in documents if role["kind"].endswith("Role")]
    assert [(b["roleRef"]["kind"], b["roleRef"]["name"]) for b in bindings] == [*roles[1:], roles[0]]
    for binding in bindings:
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["name"], "namespace": "rlrun-system"}]


def test_cluster_wide_page_reads_all_namespaces(render: Render) -> None:
    documents = render_ui(render, clusterWide=True)
    assert [get_rules(role) for role in of_kind(documents, "ClusterRole")] == [REVIEWS, READS]
    assert (of_kind(documents, "Role"), get_container(documents)["args"]) == ([], ["--port=8080"])


def test_team_page_reads_only_own_namespace_and_claims(render: Render) -> None:
    documents = render_ui(render, TEAM, watchNamespaces=["team-a", "team-b"])
    spaces = {d["metadata"]["namespace"] for d in documents if not d["kind"].startswith("Cluster")}
    assert spaces == {"team-a"}
    own = get_container(documents)
    told = ui_team_parser().parse_args(own["args"])
    assert (told.namespace, told.audience, told.port) == (["team-a"], ["rlrun-ui"], 8080)
    assert [str(one) for one in parse_networks(told.trusted_proxy)] == ["10.244.0.0/16", "fd00::1/128"]
    mounted = {mount["mountPath"]: mount for mount in own["volumeMounts"]}
    for (namespace, claim), folder in claims_of(told.claim).items():
        mount = mounted.pop(str(folder))
        volumes = get_only(documents, "Deployment")["spec"]["template"]["spec"]["volumes"]
        (volume,) = (volume for volume in volumes if volume["name"] == mount["name"])
        assert (namespace, mount["readOnly"]) == ("team-a", True)
        assert volume["persistentVolumeClaim"] == {"claimName": claim, "readOnly": True}
    assert set(mounted) == {"/tmp"}


def test_page_pod_is_restricted_to_api_server(render: Render) -> None:
    documents = render_ui(render, TEAM, watchNamespaces=["team-a", "team-b"])
    # The pod needs the token of its account; a CPU limit would throttle it while CPUs are idle.
    assert set(broken(documents)) == {"C-0034 automatic mapping of the account", "C-0270 cpu limits"}
    policy = get_only(documents, "NetworkPolicy")["spec"]
    assert policy["ingress"] == [{"ports": [{"protocol": "TCP", "port": 8080}]}]
    assert policy["egress"] == [{"ports": [{"protocol": "TCP", "port": 443}, {"protocol": "TCP", "port": 6443}]}]
    peer, out = {"namespaceSelector": {"matchLabels": {"a": "b"}}}, {"to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]}
    given = render_ui(render, {"networkPolicy": {"from": [peer]}}, networkPolicy={"apiServer": [out]})
    policy = get_only(given, "NetworkPolicy")["spec"]
    assert (policy["ingress"][0]["from"], policy["egress"]) == ([peer], [out])


def test_operator_selectors_do_not_match_page(render: Render) -> None:
    every = render_all(render, {"ui": {"enabled": True}})
    page = next(d for d in every if d["kind"] == "Deployment" and d["metadata"]["name"].endswith("-ui"))
    labels = page["spec"]["template"]["metadata"]["labels"]
    for each in every:
        chosen = each["spec"].get("selector") or each["spec"].get("podSelector") if "spec" in each else None
        chosen = (chosen or {}).get("matchLabels", chosen)
        if chosen and each["kind"] in ("Service", "Deployment", "NetworkPolicy"):
            assert (chosen.items() <= labels.items()) == each["metadata"]["name"].endswith("-ui"), each["kind"]


def test_ingress_routes_path_to_page_port(render: Render) -> None:
    assert of_kind(render_ui(render), "Ingress") == []
    tls = [{"hosts": ["runs.example"], "secretName": "tls"}]
    values = {
        "rootPath": "/rlrun",
        "ingress": {"enabled": True, "className": "nginx", "host": "runs.example", "tls": tls},
    }
    documents = render_ui(render, values)
    spec = get_only(documents, "Ingress")["spec"]
    (rule,) = spec["rules"]
    (path,) = rule["http"]["paths"]
    assert (spec["ingressClassName"], spec["tls"], rule["host"], path["path"]) == (
        "nginx",
        tls,
        "runs.example",
        "/rlrun",
    )
    service = get_only(documents, "Service")
    assert path["backend"]["service"] == {"name": service["metadata"]["name"], "port": {"name": "http"}}
    assert service["spec"]["ports"][0]["targetPort"] in [port["name"] for port in get_container(documents)["ports"]]
    assert "--root-path=/rlrun" in get_container(documents)["args"]
    plain = render_ui(render, {"ingress": {"enabled": True}, "networkPolicy": {"enabled": False}})
    assert "host" not in get_only(plain, "Ingress")["spec"]["rules"][0]
    assert of_kind(plain, "NetworkPolicy") == []


def test_two_releases_have_distinct_cluster_role_names(render: Render) -> None:
    def names(every: list[Document]) -> set[tuple[str, str]]:
        return {(d["kind"], d["metadata"]["name"]) for d in every if d["kind"].startswith("Cluster")}

    on: Document = {"ui": {"enabled": True}}
    assert not names(render_all(render, on)) & names(render(on, release="two"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"namespace": "team-b"}, "ui.namespace: the operator does not serve team-b"),
        ({"claims": ["data"]}, r"ui.claims \(data\).*set ui.namespace"),
        ({"namespace": "team-a"}, "ui.audiences is empty.*--audience rlrun-ui"),
        (
            {"rootPath": "/rlrun/", "user": 0, "claims": ["../x"]},
            "(?s)(?=.*/ui/claims/0)(?=.*/ui/rootPath)(?=.*/ui/user)",
        ),
        ({"trustedProxies": ["ingress"]}, "/ui/trustedProxies/0"),
        ({"volumes": []}, "'volumes' not allowed"),
    ],
)
def test_invalid_page_values_are_refused_by_name(render: Render, values: Document, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        render_ui(render, values)
