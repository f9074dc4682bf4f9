"""Requirements of the operator, checked before it starts, and the check of an installation.

The operator needs the API server, the CustomResourceDefinition and its own rights. `rlrun-operator --check`, which `helm test` runs, checks
the installation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from rlrun_operator.kube.client import ApiError, Call, Client
from rlrun_operator.kube.resources import LEASE, PARTS, WATCHED
from rlrun_operator.names import GROUP, PLURAL, VERSION
from rlrun_operator.runtime.leases import LEADER_RENEW_SECONDS
from rlrun_operator.settings import OperatorSettings
from rlrun_operator.state import Manifest

_WATCH = ("get", "list", "watch")
NEEDED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    *((resource.group, resource.plural, _WATCH) for resource in WATCHED),
    (GROUP, f"{PLURAL}/status", ("patch",)),
    (GROUP, f"{PLURAL}/finalizers", ("update",)),
    ("", "pods", ("create", "patch", "delete")),
    ("apps", "statefulsets", ("create", "patch", "delete")),
    ("apps", "deployments", ("create", "patch", "delete")),
    ("", "persistentvolumeclaims", ("create", "patch")),
    ("coordination.k8s.io", "leases", ("create", "patch")),
    *((resource.group, resource.plural, ("create", "patch")) for resource in PARTS),
    ("", "secrets", ("create",)),
    ("", "events", ("list", "create", "patch")),
)
"""Needed rights: API group, resource, verbs in every watched namespace; the chart's Role grants them."""


async def find_problems(client: Client, namespaces: Sequence[str], own_namespace: str) -> list[str]:
    """Return the obstacles to the operator's work, as messages for the log and for /readyz.

    Raises:
        UnavailableError: the API server does not answer.
    """
    try:
        served = await client.request(Call("GET", "get", "apis", f"/apis/{GROUP}/{VERSION}"))
    except ApiError as error:
        if error.status != 404:
            return [str(error)]
        served = {}
    if not any(resource.get("name") == PLURAL for resource in served.get("resources") or ()):
        return [
            f"the cluster has no resource {PLURAL}.{GROUP}/{VERSION}; a cluster administrator installs it once: "
            "helm install rlrun-crds charts/rlrun-crds"
        ]
    found: list[str] = []
    for namespace in namespaces or (own_namespace,):
        review = await client.request(
            Call(
                "POST",
                "create",
                "selfsubjectrulesreviews",
                "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews",
            ),
            body={
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectRulesReview",
                "spec": {"namespace": namespace},
            },
        )
        status = review.get("status") or {}
        if not status.get(
            "incomplete"
        ):  # some authorizers cannot list their rules; then only the requests themselves show it
            found += [
                f"the operator's service account may not {line} in namespace {namespace}; "
                "helm upgrade of charts/rlrun-operator with this namespace in watchNamespaces grants it"
                for line in missing_rights(status.get("resourceRules") or ())
            ]
    return found


def missing_rights(rules: Iterable[Mapping[str, object]]) -> list[str]:
    """Return the needed rights that the rules do not grant, as `verb, verb resource.group`."""
    rules = [rule for rule in rules if not rule.get("resourceNames")]
    missing: dict[str, list[str]] = {}
    for group, resource, verbs in NEEDED:
        for verb in verbs:
            if not any(_grants_right(rule, group, resource, verb) for rule in rules):
                missing.setdefault(f"{resource}.{group}" if group else resource, []).append(verb)
    return [f"{', '.join(dict.fromkeys(verbs))} {resource}" for resource, verbs in missing.items()]


def _grants_right(rule: Manifest, group: str, resource: str, verb: str) -> bool:
    def has(field: str, value: str) -> bool:
        return bool({"*", value} & set(rule.get(field) or ()))

    return has("apiGroups", group) and has("resources", resource) and has("verbs", verb)


Sleep = Callable[[float], Awaitable[None]]


async def find_faults(client: Client, settings: OperatorSettings, *, sleep: Sleep = asyncio.sleep) -> list[str]:
    """Return the faults of the installation: missing resource, missing rights, or no leading operator.

    Raises:
        UnavailableError: the API server does not answer.
    """
    found = await find_problems(client, settings.namespaces, settings.pod_namespace)
    stopped = await _not_leading(client, settings, sleep)
    return [*found, stopped] if stopped else found


async def _not_leading(client: Client, settings: OperatorSettings, sleep: Sleep) -> str:
    """Return a fault if no operator renews the leader Lease, else an empty string. Clocks of other machines are not compared."""
    what = f"Lease {settings.pod_namespace}/{settings.lease_name}"
    fix = f"kubectl -n {settings.pod_namespace} logs deployment/{settings.lease_name}"
    try:
        before = await client.get(LEASE, settings.pod_namespace, settings.lease_name)
        if before is not None:
            await sleep(LEADER_RENEW_SECONDS)
        now = await client.get(LEASE, settings.pod_namespace, settings.lease_name)
    except ApiError as error:
        return f"{what} cannot be read: {error}"
    if before is None or now is None:
        return f"{what} does not exist, so no operator of this release leads; see {fix}"
    if before["spec"].get("renewTime") == now["spec"].get("renewTime"):
        return (
            f"{what} was not renewed within {LEADER_RENEW_SECONDS:g} s, so no operator of this release works; see {fix}"
        )
    return ""
