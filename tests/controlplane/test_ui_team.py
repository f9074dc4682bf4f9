"""The team page against a real API server: users of two teams, tokens by TokenRequest, and the roles of the chart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kubernetes.client import Configuration
from kubernetes.config import load_kube_config

from rlrun.ui.guard import Redactor
from rlrun.ui.team.cluster_api import ApiServer
from rlrun.ui.team.gate import Gate
from rlrun.ui.team.team_server import Settings, make_team_app
from tests.cluster import Cluster
from tests.controlplane.harness import Kube, wait_for
from tests.controlplane.installation import ROOT, fresh_namespace
from tests.controlplane.world import RUNS, run
from tests.support.made_runs import Client, page_files
from tests.support.team_cluster import ENDLESS, place, query, routes

RELEASE, HOME = "page", "rlrun-page"
AUDIENCE = "rlrun-ui"
ROLES = "/apis/rbac.authorization.k8s.io/v1"


@dataclass
class Page:
    """The page for the namespaces of two teams, with the account of the chart."""

    kube: Kube
    gate: Gate
    mine: str
    theirs: str

    def token(self, namespace: str, name: str, audience: str | None = AUDIENCE) -> str:
        """Return a token of a ServiceAccount, as `kubectl create token` does."""
        return token(self.kube, namespace, name, audience)

    def get(self, path: str, bearer: str, **words: object) -> tuple[int, bytes]:
        """Return status and body of a user's request."""
        reply = Client(self.gate).get(path, headers={"authorization": f"Bearer {bearer}"}, **words)
        return reply.status, reply.body

    def user(self, namespace: str, name: str, role: str) -> str:
        """Return the token of a new ServiceAccount that has a built-in role in its namespace."""
        self.kube("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": name}})
        subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
        body = {
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [subject],
        }
        self.kube("POST", f"{ROLES}/namespaces/{namespace}/rolebindings", body)
        made = self.token(namespace, name)
        # Kubernetes adds the CRD's rules to its own roles a moment after they are installed.
        wait_for(lambda: self.get("/api/runs", made)[1].decode(), lambda said: "demo" in said, f"{name} sees a run")
        return made


def token(kube: Kube, namespace: str, name: str, audience: str | None) -> str:
    """Return a token of a ServiceAccount."""
    spec = {"audiences": [audience]} if audience else {}
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
    return str(kube("POST", path, body)["status"]["token"])


@pytest.fixture(scope="module")
def page(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    kube, account = Kube(cluster.kubeconfig), tmp_path_factory.mktemp("account")
    with fresh_namespace(cluster) as mine, fresh_namespace(cluster) as theirs:
        chart = str(ROOT / "charts" / "rlrun-operator")
        told = f"ui.enabled=true,watchNamespaces={{{mine},{theirs}}},replicas=0"
        cluster.helm("upgrade", "--install", RELEASE, chart, "--namespace", HOME, "--create-namespace", "--set", told)
        try:
            configuration = Configuration()
            load_kube_config(config_file=str(cluster.kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
            (account / "token").write_text(token(kube, HOME, f"{RELEASE}-rlrun-operator-ui", None))
            (account / "ca.crt").write_bytes(Path(str(configuration.ssl_ca_cert)).read_bytes())
            for namespace in (mine, theirs):
                kube("POST", f"{RUNS}/namespaces/{namespace}/rlruns", run("demo"))
            settings = Settings(namespaces=(mine, theirs), audiences=(AUDIENCE,), keep_seconds=0.0)
            with page_files(tmp_path_factory.mktemp("page") / "static") as static:
                gate = make_team_app(ApiServer(str(configuration.host), account), settings, static, Redactor({}))
                assert isinstance(gate, Gate)
                yield Page(kube, gate, mine, theirs)
        finally:
            cluster.helm("uninstall", RELEASE, "--namespace", HOME)


def test_user_sees_only_own_runs_on_every_route(page: Page) -> None:
    users = {page.mine: page.user(page.mine, "ann", "edit"), page.theirs: page.user(page.theirs, "bob", "edit")}
    other = {page.mine: page.theirs, page.theirs: page.mine}
    ids = [f"{namespace}.demo" for namespace in users]
    tried = routes(page.gate)
    assert len(tried) >= 13
    for namespace, bearer in users.items():
        not_theirs = other[namespace]
        for route in tried:
            status, body = page.get(place(route, f"{not_theirs}.demo"), bearer, **query(ids))
            about_one = "{run}" in route.path or route.path == "/api/compare"
            assert status == (404 if about_one else 200), (route.path, body)
            assert not_theirs.encode() not in body.replace(f"{not_theirs}.demo".encode(), b""), route.path
        status, body = page.get(f"/api/runs/{namespace}.demo", bearer)
        assert (status, b"ui.claims" in body or b"no volume yet" in body) == (200, True), body
        assert page.get(f"/api/runs/{namespace}.demo/manifest", bearer)[0] == 200
    for route in tried:
        assert Client(page.gate).get(place(route, ids[0]), **query(ids)).status == 401, route.path
    assert Client(page.gate).get(ENDLESS).status == 401


def test_viewer_cannot_read_files(page: Page) -> None:
    bearer = page.user(page.mine, "carol", "view")
    status, body = page.get(f"/api/runs/{page.mine}.demo", bearer)
    assert (status, b"rlruns/files" in body) == (200, True)
    assert page.get(f"/api/runs/{page.mine}.demo/rollouts", bearer, step=1)[0] == 403


def test_foreign_and_forged_tokens_are_refused(page: Page) -> None:
    page.user(page.mine, "dora", "view")
    for bearer in (page.token(page.mine, "dora", None), page.token(page.mine, "dora", "elsewhere"), "forged"):
        assert page.get("/api/me", bearer)[0] == 401


def test_revoked_right_ends_access(page: Page) -> None:
    bearer = page.user(page.mine, "emil", "view")
    path = f"/api/runs/{page.mine}.demo"
    assert page.get(path, bearer)[0] == 200
    page.kube("DELETE", f"{ROLES}/namespaces/{page.mine}/rolebindings/emil")
    wait_for(lambda: page.get(path, bearer)[0], lambda status: status == 404, "the right is gone")
    page.kube("DELETE", f"/api/v1/namespaces/{page.mine}/serviceaccounts/emil")
    wait_for(lambda: page.get("/api/me", bearer)[0], lambda status: status == 401, "the user is gone")
