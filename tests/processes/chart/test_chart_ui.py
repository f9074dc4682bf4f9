"""The page of a team as the chart makes it: off by default, with the least rights that work, and as its command understands it."""

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
"""By the values: Helm takes a while."""


def everything(render: Render, values: Document) -> list[Document]:
    """All documents of the chart."""
    key = json.dumps(values)
    if key not in _RENDERED:
        _RENDERED[key] = render(values)
    return _RENDERED[key]


def ui(render: Render, more: Document | None = None, **values: Any) -> list[Document]:
    """Documents of the page alone."""
    every = everything(render, {**values, "ui": {"enabled": True, **(more or {})}})
    return [each for each in every if each["metadata"]["labels"]["app.kubernetes.io/name"] == "rlrun-ui"]


def of_kind(documents: list[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def one(documents: list[Document], kind: str) -> Document:
    (found,) = of_kind(documents, kind)
    return found


def container(documents: list[Document]) -> Document:
    (found,) = one(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(found)


def rules(role: Document) -> list[tuple[tuple[str, ...], ...]]:
    return [tuple(tuple(rule[key]) for key in ("apiGroups", "resources", "verbs")) for rule in role["rules"]]


def test_it_is_off_by_default_and_turning_it_on_changes_nothing_else(render: Render) -> None:
    before = render()
    assert not [each for each in before if "ui" in each["metadata"]["name"].split("-")]
    after = everything(render, {"ui": {"enabled": True}})
    assert [each for each in after if each in before] == before
    assert {each["metadata"]["labels"]["app.kubernetes.io/name"] for each in after if each not in before} == {
        "rlrun-ui"
    }


def test_it_shows_the_served_namespaces_with_the_least_rights(render: Render) -> None:
    documents = ui(render, watchNamespaces=["a", "b"])
    assert [(role["metadata"]["namespace"], rules(role)) for role in of_kind(documents, "Role")] == [
        ("a", READS),
        ("b", READS),
    ]
    assert rules(one(documents, "ClusterRole")) == REVIEWS
    assert container(documents)["args"] == ["--port=8080", "--namespace=a", "--namespace=b"]
    account = one(documents, "ServiceAccount")["metadata"]
    assert account["namespace"] == "rlrun-system"
    bindings = of_kind(documents, "RoleBinding") + of_kind(documents, "ClusterRoleBinding")
    roles = [(role["kind"], role["metadata"]["name"]) for role in documents if role["kind"].endswith("Role")]
    assert [(b["roleRef"]["kind"], b["roleRef"]["name"]) for b in bindings] == [*roles[1:], roles[0]]
    for binding in bindings:
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["name"], "namespace": "rlrun-system"}]


def test_cluster_wide_it_shows_all(render: Render) -> None:
    documents = ui(render, clusterWide=True)
    assert [rules(role) for role in of_kind(documents, "ClusterRole")] == [REVIEWS, READS]
    assert (of_kind(documents, "Role"), container(documents)["args"]) == ([], ["--port=8080"])


def test_in_a_teams_namespace_it_shows_that_alone_and_reads_its_claims(render: Render) -> None:
    documents = ui(render, TEAM, watchNamespaces=["team-a", "team-b"])
    spaces = {d["metadata"]["namespace"] for d in documents if not d["kind"].startswith("Cluster")}
    assert spaces == {"team-a"}
    own = container(documents)
    told = ui_team_parser().parse_args(own["args"])
    assert (told.namespace, told.audience, told.port) == (["team-a"], ["rlrun-ui"], 8080)
    assert [str(one) for one in parse_networks(told.trusted_proxy)] == ["10.244.0.0/16", "fd00::1/128"]
    mounted = {mount["mountPath"]: mount for mount in own["volumeMounts"]}
    for (namespace, claim), folder in claims_of(told.claim).items():
        mount = mounted.pop(str(folder))
        volumes = one(documents, "Deployment")["spec"]["template"]["spec"]["volumes"]
        (volume,) = (volume for volume in volumes if volume["name"] == mount["name"])
        assert (namespace, mount["readOnly"]) == ("team-a", True)
        assert volume["persistentVolumeClaim"] == {"claimName": claim, "readOnly": True}
    assert set(mounted) == {"/tmp"}


def test_its_pod_is_restricted_and_talks_to_the_api_server_alone(render: Render) -> None:
    documents = ui(render, TEAM, watchNamespaces=["team-a", "team-b"])
    # It works with its account's token; a limit of processors would slow it down while they are idle.
    assert set(broken(documents)) == {"C-0034 automatic mapping of the account", "C-0270 cpu limits"}
    policy = one(documents, "NetworkPolicy")["spec"]
    assert policy["ingress"] == [{"ports": [{"protocol": "TCP", "port": 8080}]}]
    assert policy["egress"] == [{"ports": [{"protocol": "TCP", "port": 443}, {"protocol": "TCP", "port": 6443}]}]
    peer, out = {"namespaceSelector": {"matchLabels": {"a": "b"}}}, {"to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]}
    given = ui(render, {"networkPolicy": {"from": [peer]}}, networkPolicy={"apiServer": [out]})
    policy = one(given, "NetworkPolicy")["spec"]
    assert (policy["ingress"][0]["from"], policy["egress"]) == ([peer], [out])


def test_nothing_that_selects_the_operator_selects_it(render: Render) -> None:
    every = everything(render, {"ui": {"enabled": True}})
    page = next(d for d in every if d["kind"] == "Deployment" and d["metadata"]["name"].endswith("-ui"))
    labels = page["spec"]["template"]["metadata"]["labels"]
    for each in every:
        chosen = each["spec"].get("selector") or each["spec"].get("podSelector") if "spec" in each else None
        chosen = (chosen or {}).get("matchLabels", chosen)
        if chosen and each["kind"] in ("Service", "Deployment", "NetworkPolicy"):
            assert (chosen.items() <= labels.items()) == each["metadata"]["name"].endswith("-ui"), each["kind"]


def test_an_ingress_leads_to_its_port_under_its_path(render: Render) -> None:
    assert of_kind(ui(render), "Ingress") == []
    tls = [{"hosts": ["runs.example"], "secretName": "tls"}]
    values = {
        "rootPath": "/rlrun",
        "ingress": {"enabled": True, "className": "nginx", "host": "runs.example", "tls": tls},
    }
    documents = ui(render, values)
    spec = one(documents, "Ingress")["spec"]
    (rule,) = spec["rules"]
    (path,) = rule["http"]["paths"]
    assert (spec["ingressClassName"], spec["tls"], rule["host"], path["path"]) == (
        "nginx",
        tls,
        "runs.example",
        "/rlrun",
    )
    service = one(documents, "Service")
    assert path["backend"]["service"] == {"name": service["metadata"]["name"], "port": {"name": "http"}}
    assert service["spec"]["ports"][0]["targetPort"] in [port["name"] for port in container(documents)["ports"]]
    assert "--root-path=/rlrun" in container(documents)["args"]
    plain = ui(render, {"ingress": {"enabled": True}, "networkPolicy": {"enabled": False}})
    assert "host" not in one(plain, "Ingress")["spec"]["rules"][0]
    assert of_kind(plain, "NetworkPolicy") == []


def test_two_releases_share_no_name_of_a_cluster_role(render: Render) -> None:
    def names(every: list[Document]) -> set[tuple[str, str]]:
        return {(d["kind"], d["metadata"]["name"]) for d in every if d["kind"].startswith("Cluster")}

    on: Document = {"ui": {"enabled": True}}
    assert not names(everything(render, on)) & names(render(on, release="two"))


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
def test_wrong_values_are_refused_by_their_name(render: Render, values: Document, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        ui(render, values)
