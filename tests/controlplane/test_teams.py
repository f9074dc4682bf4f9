"""Isolation of two teams, each with a release that has only Roles: accounts of one team cannot access the other team."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.controlplane.harness import Json, Kube, OperatorProcess, wait_for
from tests.controlplane.installation import ROOT, fake_nodes
from tests.controlplane.test_operator_outages import as_account
from tests.controlplane.world import CORE, LEASES, World
from tests.support.teams import ACTORS, DEEDS, Actor, Deed

CHART = str(ROOT / "charts" / "rlrun-operator")
RELEASE = "rlrun-operator"
"""Name of both releases, as in the documentation; equal names must not matter."""
RUN = "same"
"""Name of both runs; equal names must not matter."""
HERE = {"teams-test": "yes"}
GPUS = {role: {"gpusPerReplica": 1, "nodeSelector": HERE} for role in ("trainer", "inference")}
REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
VERSIONS = {"rlrun.io": "v1alpha1"}
METHODS = {"create": "POST", "patch": "PATCH", "update": "PUT", "delete": "DELETE", "deletecollection": "DELETE"}


@dataclass(frozen=True)
class Team:
    """One team: a namespace for its runs and one for its operator."""

    name: str
    world: World
    system: str

    def identity(self, actor: Actor) -> tuple[str, tuple[str, ...]]:
        """Return user and groups of an account."""
        accounts = {
            "operator": (self.system, RELEASE),
            "orchestrator": (self.world.namespace, f"{RUN}-rlrun"),
            "pod": (self.world.namespace, "default"),
        }
        if actor not in accounts:
            return f"{self.name}-{actor}", ("system:authenticated",)
        namespace, account = accounts[actor]
        groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated")
        return f"system:serviceaccount:{namespace}:{account}", groups

    def place(self, deed: Deed) -> str:
        """Return this team's namespace for a deed, empty for cluster scope."""
        return {"team": self.world.namespace, "system": self.system, "cluster": ""}[deed.place]


class As(Kube):
    """Client with an impersonated account."""

    def __init__(self, kubeconfig: Path, user: str, groups: tuple[str, ...]) -> None:
        super().__init__(kubeconfig)
        self._user, self._groups = user, groups

    def status_of(self, method: str, path: str) -> tuple[int, Json]:
        """Return status code and body."""
        connection = self.connect()
        connection.putrequest(method, path)
        connection.putheader("Impersonate-User", self._user)
        for group in self._groups:
            connection.putheader("Impersonate-Group", group)
        body = b"{}" if method in ("POST", "PUT", "PATCH") else b""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        connection.putheader("Content-Type", kind)
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        response = connection.getresponse()
        try:
            answer: Json = json.loads(response.read() or b"{}")
        except ValueError:
            answer = {}
        connection.close()
        return response.status, answer


@pytest.fixture(scope="module")
def teams(cluster: Cluster) -> Iterator[tuple[Team, Team]]:
    """Two teams, each with a release and a user for each built-in role of Kubernetes."""
    found = []
    for name in ("red", "blue"):
        space, system = f"teams-{name}-{os.getpid()}", f"teams-{name}-system-{os.getpid()}"
        cluster.kubectl("create", "namespace", space)
        values = {"watchNamespaces": [space], "replicas": 0, "queue": {"provider": "own"}}
        cluster.helm(
            "install", RELEASE, CHART, "-n", system, "--create-namespace", "--values", "-", stdin=json.dumps(values)
        )
        for actor, role in (("editor", "edit"), ("viewer", "view")):
            user = f"--user={name}-{actor}"
            cluster.kubectl("create", "rolebinding", actor, "-n", space, f"--clusterrole={role}", user)
        found.append(Team(name, World(cluster, space), system))
    yield found[0], found[1]
    for team in found:
        cluster.helm("uninstall", RELEASE, "-n", team.system)
        cluster.kubectl("delete", "namespace", team.world.namespace, team.system, "--wait=false")


@pytest.fixture(scope="module")
def operators(
    cluster: Cluster, teams: tuple[Team, Team], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[OperatorProcess, OperatorProcess]]:
    """The operator of each team with the account of its chart; both can read free capacity of the nodes."""
    processes = []
    for team in teams:
        folder = tmp_path_factory.mktemp(team.name)
        for kind in (
            "node-reader",
            "pod-reader",
        ):  # rights of readNodes, granted after the first test has checked the rights without them
            verbs, resource = ("get,list", "nodes") if kind == "node-reader" else ("list", "pods")
            name = f"{team.system}-{kind}"
            cluster.kubectl("create", "clusterrole", name, f"--verb={verbs}", f"--resource={resource}")
            account = f"--serviceaccount={team.system}:{RELEASE}"
            cluster.kubectl("create", "clusterrolebinding", name, f"--clusterrole={name}", account)
        kubeconfig = as_account(cluster, team.system, RELEASE, folder)
        environment = {
            "KUBECONFIG": str(kubeconfig),
            "POD_NAMESPACE": team.system,
            "POD_SERVICE_ACCOUNT": RELEASE,
            "RLRUN_LEASE_NAME": RELEASE,
            "RLRUN_WATCH_NAMESPACES": team.world.namespace,
            "RLRUN_QUEUE": json.dumps({"provider": "own"}),
        }
        processes.append(OperatorProcess(cluster, folder, **environment).start(ready=False))
    try:
        for process in processes:
            process.wait_ready()
        yield processes[0], processes[1]
        for process in processes:
            process.check_log()
    finally:
        for process in processes:
            process.kill()
        for team in teams:
            for kind in ("node-reader", "pod-reader"):
                cluster.kubectl("delete", "clusterrole,clusterrolebinding", f"{team.system}-{kind}")


@pytest.fixture(scope="module")
def started(cluster: Cluster, teams: tuple[Team, Team], tmp_path_factory: pytest.TempPathFactory) -> None:
    """The rights of an orchestrator in each team, as the operator creates them."""
    for team in teams:
        world, group = team.world, "/apis/rbac.authorization.k8s.io/v1"
        rule = {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "resourceNames": [f"{RUN}-progress"],
            "verbs": ["get", "patch"],
        }
        world.kube("POST", world.path(group, "roles"), {"metadata": {"name": "as-orchestrator"}, "rules": [rule]})
        subject = {"kind": "ServiceAccount", "name": f"{RUN}-rlrun", "namespace": world.namespace}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "as-orchestrator"}
        binding = {"metadata": {"name": "as-orchestrator"}, "roleRef": role, "subjects": [subject]}
        world.kube("POST", world.path(group, "rolebindings"), binding)


def name_of(deed: Deed, team: Team) -> str:
    """Return the name of a deed's object, if it needs one."""
    if deed.resource == "leases":
        return RELEASE if deed.place == "system" else f"{RUN}-progress"
    return RUN


def attributes(deed: Deed, verb: str, team: Team) -> Json:
    """Return the attributes of a deed for an access review."""
    named = verb not in ("list", "watch", "create", "deletecollection") or deed.subresource
    found = {
        "namespace": team.place(deed),
        "verb": verb,
        "group": deed.group,
        "resource": deed.resource,
        "subresource": deed.subresource,
        "name": name_of(deed, team) if named else "",
    }
    return {key: value for key, value in found.items() if value}


def allowed(kube: Kube, who: Team, actor: Actor, asked: Json) -> bool:
    """Return whether the API server would allow an account's request."""
    user, groups = who.identity(actor)
    spec = {"user": user, "groups": list(groups), "resourceAttributes": asked}
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    return bool(kube("POST", REVIEWS, body)["status"]["allowed"])


def request_of(deed: Deed, verb: str, team: Team) -> tuple[str, str]:
    """Return method and path of a deed's request."""
    version = VERSIONS.get(deed.group, "v1")
    path = f"/apis/{deed.group}/{version}" if deed.group else "/api/v1"
    path += f"/namespaces/{place}" if (place := team.place(deed)) else ""
    path += f"/{deed.resource}"
    if deed.subresource or verb in ("get", "patch", "update", "delete"):
        path += f"/{name_of(deed, team)}"
    path += f"/{deed.subresource}" if deed.subresource else ""
    return METHODS.get(verb, "GET"), path + ("?watch=true&timeoutSeconds=1" if verb == "watch" else "")


@pytest.mark.parametrize("actor", ACTORS)
def test_accounts_of_one_team_cannot_access_other_team(
    teams: tuple[Team, Team], started: None, cluster: Cluster, actor: Actor
) -> None:
    """Each verb is tried by an access review and, if possible, by a request."""
    red, blue = teams
    kube = red.world.kube
    attacker = As(cluster.kubeconfig, *red.identity(actor))
    for deed in DEEDS:
        # The API server applies bindings, and adds the CRD's rules to its own roles, a moment after their creation.
        wait_for(
            lambda deed=deed: [verb for verb in deed.verbs if allowed(kube, red, actor, attributes(deed, verb, red))],  # type: ignore[misc]
            lambda own, deed=deed: bool(own) == (actor in deed.own),  # type: ignore[misc]
            f"{deed} in its own place",
        )
        for verb in deed.verbs:
            asked = attributes(deed, verb, blue)
            assert not allowed(kube, red, actor, asked), (deed, asked)
            if verb == "impersonate":
                continue
            status, answer = attacker.status_of(*request_of(deed, verb, blue))
            assert (status, answer.get("reason")) == (403, "Forbidden"), (deed, verb, status, answer)


def samples(operator: OperatorProcess, namespace: str) -> list[str]:
    """Return metrics of an operator that name a namespace."""
    return [sample for sample in operator.metrics() if f'"{namespace}"' in sample]


@pytest.mark.full
def test_teams_are_isolated_in_queue_and_metrics(
    cluster: Cluster, teams: tuple[Team, Team], operators: tuple[OperatorProcess, OperatorProcess]
) -> None:
    """One node has room for one run. The second team's run waits in its own queue for GPUs that pods of the first team
    use."""
    red, blue = teams
    with fake_nodes(cluster, 1, prefix="teams", gpus=2, labels=HERE):
        red.world.create(RUN, **GPUS)
        red.world.wait_pods_ready(RUN, 2)
        red.world.renew(RUN, 1)
        red.world.wait_phase(RUN, "Running")
        blue.world.create(RUN, **GPUS)
        status = wait_for(
            lambda: blue.world.status(RUN),
            lambda s: s.get("phase") == "Queued" and "0 free" in (s.get("message") or ""),
            "the other team's run waits for what is taken",
        )
        place: Any = status["queue"]
        assert (place["position"], place["waiting"]) == (1, 1), "the other team's run is not counted"
        assert red.world.namespace not in status["message"]
        assert blue.world.pods(RUN) == []

        for operator, mine, other in ((operators[0], red, blue), (operators[1], blue, red)):
            assert samples(operator, mine.world.namespace), "it tells of its own"
            assert samples(operator, other.world.namespace) == []
            assert samples(operator, other.system) == []
            assert operator.metric("rlrun_operator_leader") == 1.0, "both lead, by Leases of one name"
            holder = mine.world.kube("GET", mine.world.path(LEASES, "leases", "rlrun-operator-serves"))["spec"]
            assert holder["holderIdentity"] == f"{mine.system}/{RELEASE}"
            lease = f"{LEASES}/namespaces/{mine.system}/leases/{RELEASE}"
            assert mine.world.kube("GET", lease)["spec"]["holderIdentity"]

        red.world.edit(RUN, {"suspend": True})
        red.world.wait_phase(RUN, "Suspended")
        blue.world.wait_pods_ready(RUN, 2)
        assert {pod["metadata"]["namespace"] for pod in blue.world.pods(RUN)} == {blue.world.namespace}
        assert red.world.kube.items(red.world.path(CORE, "pods")) == []
