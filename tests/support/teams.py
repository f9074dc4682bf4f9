"""Deeds of one team's accounts against another team's namespaces, and the table of docs/teams.md made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Actor = Literal["operator", "orchestrator", "pod", "editor", "viewer"]
Place = Literal["team", "system", "cluster"]
"""Namespace of the runs, namespace of the operator, or no namespace."""
ACTORS: dict[Actor, str] = {
    "operator": "the team's operator",
    "orchestrator": "a run's orchestrator",
    "pod": "trainer and engine",
    "editor": "user with `edit`",
    "viewer": "user with `view`",
}
"""Accounts of a team, as the table names them."""
_READ, _WRITE = ("get", "list", "watch"), ("create", "patch", "update", "delete", "deletecollection")
CORE, APPS, RBAC = "", "apps", "rbac.authorization.k8s.io"


@dataclass(frozen=True)
class Deed:
    """Verbs on a resource."""

    words: str
    verbs: tuple[str, ...]
    group: str
    resource: str
    own: frozenset[Actor] = frozenset()
    """Accounts that may do at least one of the verbs in the place of their own team."""
    subresource: str = ""
    place: Place = "team"


def _deed(words: str, verbs: tuple[str, ...], resource: str, own: str = "", *, place: Place = "team") -> Deed:
    """Return a deed; `resource`: `GROUP/NAME[/SUBRESOURCE]`, `own`: initials of `ACTORS` (o, c for orchestrator, p, e,
    v)."""
    initials: dict[str, Actor] = {"o": "operator", "c": "orchestrator", "p": "pod", "e": "editor", "v": "viewer"}
    group, name, *rest = resource.split("/")
    return Deed(words, verbs, group, name, frozenset(initials[each] for each in own), "".join(rest), place)


DEEDS: tuple[Deed, ...] = (
    _deed("read runs", _READ, "rlrun.io/rlruns", "oev"),
    _deed("create, change, delete runs", _WRITE, "rlrun.io/rlruns", "e"),
    _deed("write a run's status", ("patch", "update"), "rlrun.io/rlruns/status", "o"),
    _deed("change a run's finalizers", ("update",), "rlrun.io/rlruns/finalizers", "o"),
    _deed("scale a run", ("patch", "update"), "rlrun.io/rlruns/scale", "e"),
    _deed("read pods", _READ, "/pods", "oev"),
    _deed("create, change, delete pods", _WRITE, "/pods", "oe"),
    _deed("run commands in a pod", ("create",), "/pods/exec", "e"),
    _deed("read a pod's log", ("get",), "/pods/log", "ev"),
    _deed("forward a pod's port", ("create",), "/pods/portforward", "e"),
    _deed("evict a pod", ("create",), "/pods/eviction", "e"),
    _deed("read StatefulSets", _READ, "apps/statefulsets", "oev"),
    _deed("create, change, delete StatefulSets", _WRITE, "apps/statefulsets", "oe"),
    _deed("read Deployments", _READ, "apps/deployments", "oev"),
    _deed("create, change, delete Deployments", _WRITE, "apps/deployments", "oe"),
    _deed("read Secrets", _READ, "/secrets", "e"),
    _deed("create, change, delete Secrets", _WRITE, "/secrets", "oe"),
    _deed("read ConfigMaps", _READ, "/configmaps", "oev"),
    _deed("create, change, delete ConfigMaps", _WRITE, "/configmaps", "oe"),
    _deed("read claims", _READ, "/persistentvolumeclaims", "oev"),
    _deed("create, change, delete claims", _WRITE, "/persistentvolumeclaims", "oe"),
    _deed("read a run's Lease", ("get",), "coordination.k8s.io/leases", "oce"),
    _deed("renew a run's Lease", ("patch",), "coordination.k8s.io/leases", "oce"),
    _deed("read Services", _READ, "/services", "oev"),
    _deed("create, change, delete Services", _WRITE, "/services", "oe"),
    _deed("read network policies", _READ, "networking.k8s.io/networkpolicies", "oev"),
    _deed("create, change, delete network policies", _WRITE, "networking.k8s.io/networkpolicies", "oe"),
    _deed("read quotas", _READ, "/resourcequotas", "oev"),
    _deed("create, change, delete quotas", _WRITE, "/resourcequotas"),
    _deed("read events", ("list",), "/events", "oev"),
    _deed("write events", ("create", "patch"), "/events", "oe"),
    _deed("create Roles and bind them", ("create",), f"{RBAC}/rolebindings", "o"),
    _deed("act as its accounts", ("impersonate",), "/serviceaccounts", "e"),
    _deed("get a token of its accounts", ("create",), "/serviceaccounts/token", "e"),
    _deed("read the operator's Deployment", _READ, "apps/deployments", place="system"),
    _deed("change the operator's Deployment", _WRITE, "apps/deployments", place="system"),
    _deed("take the operator's Lease", ("patch",), "coordination.k8s.io/leases", "o", place="system"),
    _deed("read Secrets beside the operator", _READ, "/secrets", place="system"),
    _deed("read ConfigMaps beside the operator", _READ, "/configmaps", place="system"),
    _deed("create pods beside the operator", _WRITE, "/pods", place="system"),
    _deed("read runs of all namespaces", ("list",), "rlrun.io/rlruns", place="cluster"),
    _deed("read pods of all namespaces", ("list",), "/pods", place="cluster"),
    _deed("read nodes", ("get", "list"), "/nodes", place="cluster"),
    _deed("list namespaces", ("list",), "/namespaces", place="cluster"),
    _deed("change the resource RLRun", _WRITE, "apiextensions.k8s.io/customresourcedefinitions", place="cluster"),
    _deed(
        "change admission policies",
        _WRITE,
        "admissionregistration.k8s.io/validatingadmissionpolicies",
        place="cluster",
    ),
    _deed("create ClusterRoles", ("create",), f"{RBAC}/clusterroles", place="cluster"),
    _deed("act as another user", ("impersonate",), "/users", place="cluster"),
)
"""All tested deeds, with releases that have only Roles (neither `clusterWide` nor `readNodes`)."""

_WHERE: dict[Place, str] = {
    "team": "its runs' namespace",
    "system": "its operator's namespace",
    "cluster": "no namespace",
}


def table() -> str:
    """Return the deeds as a Markdown table."""
    heads = " | ".join(ACTORS.values())
    lines = [f"| deed | in | {heads} | the other team's |", f"|---|---|{'---|' * len(ACTORS)}---|"]
    for deed in DEEDS:
        cells = " | ".join("yes" if actor in deed.own else "no" for actor in ACTORS)
        other = "refused to all" if deed.place != "cluster" else "–"
        lines.append(f"| {deed.words} | {_WHERE[deed.place]} | {cells} | {other} |")
    return "\n".join(lines) + "\n"
