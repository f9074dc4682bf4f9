"""ResourceQuotas of a namespace: the pods that each quota counts, and the amounts that are free for gangs.

A quota with scopes counts only matching pods, by the rules of the API server's pod evaluator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlrun_operator.node_fit import parse_quantity, show_amount
from rlrun_operator.queue.queue_model import Amounts, Applicant, PodSet
from rlrun_operator.state import Manifest

_QOS_RESOURCES = ("cpu", "memory")
"""Resources that determine a pod's quality of service: a pod with only devices is BestEffort."""


@dataclass(frozen=True)
class Scope:
    """One requirement of a quota; a pod must meet all of them."""

    name: str
    operator: str = "Exists"
    values: tuple[str, ...] = ()

    def matches_pod(self, pod: Manifest) -> bool:
        """Return whether a pod with this spec meets this requirement."""
        if self.name == "PriorityClass":
            return self._matches_class(str(pod.get("priorityClassName") or ""))
        found = {
            "Terminating": _has_deadline(pod),
            "NotTerminating": not _has_deadline(pod),
            "BestEffort": _is_best_effort(pod),
            "NotBestEffort": not _is_best_effort(pod),
            "CrossNamespacePodAffinity": _looks_across(pod),
        }
        return found.get(self.name, False)

    def _matches_class(self, value: str) -> bool:
        """Match like a label selector on a pod whose only label is its class: a pod without a class is in no list."""
        holds = {
            "In": value in self.values and bool(value),
            "NotIn": value not in self.values,
            "Exists": bool(value),
            "DoesNotExist": not value,
        }
        return holds.get(self.operator, False)


def scopes_of(spec: Manifest) -> tuple[Scope, ...]:
    """Return the scopes of a ResourceQuota's spec."""
    listed = [Scope(str(name)) for name in spec.get("scopes") or ()]
    selected = [
        Scope(str(one.get("scopeName")), str(one.get("operator")), tuple(map(str, one.get("values") or ())))
        for one in (spec.get("scopeSelector") or {}).get("matchExpressions") or ()
    ]
    return (*listed, *selected)


def counts_pod(scopes: Iterable[Scope], pod: Manifest) -> bool:
    """Return whether a quota with these scopes counts a pod with this spec."""
    return all(scope.matches_pod(pod) for scope in scopes)


def _has_deadline(pod: Manifest) -> bool:
    return (pod.get("activeDeadlineSeconds") or -1) >= 0


def _is_best_effort(pod: Manifest) -> bool:
    parts = [pod, *(pod.get("initContainers") or ()), *(pod.get("containers") or ())]
    blocks = [(part.get("resources") or {}).get(kind) or {} for part in parts for kind in ("requests", "limits")]
    return not any(parse_quantity(block.get(name, 0)) > 0 for block in blocks for name in _QOS_RESOURCES)


def _looks_across(pod: Manifest) -> bool:
    affinity = pod.get("affinity") or {}
    for kind in ("podAffinity", "podAntiAffinity"):
        block = affinity.get(kind) or {}
        terms = list(block.get("requiredDuringSchedulingIgnoredDuringExecution") or ())
        weighted = block.get("preferredDuringSchedulingIgnoredDuringExecution") or ()
        terms += [one.get("podAffinityTerm") or {} for one in weighted]
        if any(term.get("namespaces") or term.get("namespaceSelector") is not None for term in terms):
            return True
    return False


_BARE = ("cpu", "memory", "ephemeral-storage")
"""Resources whose requests a quota also counts under their bare name."""
_CLOSE = 1e-6


@dataclass
class Quota:
    """One ResourceQuota of a namespace."""

    name: str
    hard: Amounts
    used: dict[str, float] = field(default_factory=dict)
    scopes: tuple[Scope, ...] = ()

    def asked_of(self, gang: Iterable[PodSet]) -> dict[str, float]:
        """Return the amounts of the pods of a gang that this quota counts."""
        return asked_of(pods for pods in gang if counts_pod(self.scopes, pods.spec))

    def explain_excess(self, asked: Amounts, *, empty: bool = False) -> str:
        """Return a message about the first exceeded amount, or an empty string if all amounts fit.

        Args:
            asked: amounts by the quota's resource names.
            empty: whether to ignore current use.
        """
        for name, amount in asked.items():
            used = 0.0 if empty else self.used.get(name, 0.0)
            if name in self.hard and amount > 0 and used + amount > self.hard[name] + _CLOSE:
                kind = name.rpartition(".")[2] if name.split(".")[0] in ("requests", "limits") else name
                shown = [show_amount(kind, each) for each in (amount, self.used.get(name, 0.0), self.hard[name])]
                return f"quota {self.name}: {name}: requested {shown[0]}, used {shown[1]} of {shown[2]}"
        return ""


class Quotas:
    """Quotas by namespace during an admission pass."""

    def __init__(self, quotas: Mapping[str, Sequence[Quota]]) -> None:
        self._quotas = {
            namespace: [replace(each, used=dict(each.used)) for each in found] for namespace, found in quotas.items()
        }
        self._known: dict[tuple[str, str], dict[str, float]] = {}

    def charge_gang(self, namespace: str, gang: Iterable[PodSet]) -> None:
        """Charge pods that will be created."""
        pods = tuple(gang)
        for quota in self._quotas.get(namespace) or ():
            asked = quota.asked_of(pods)
            for name in quota.hard.keys() & asked.keys():
                quota.used[name] = quota.used.get(name, 0.0) + asked[name]

    def charge_existing(self, run: Applicant) -> None:
        """Charge existing pods of a run: the quota's reported use may be older than these pods."""
        specs = {pods.role: pods.spec for pods in run.gang}
        for quota in self._quotas.get(run.namespace) or ():
            known = self._known.setdefault((run.namespace, quota.name), {})
            counted = [pod for pod in run.pods if counts_pod(quota.scopes, specs.get(pod.role, {}))]
            for name, amount in asked_of(PodSet(pod.role, 1, pod.requests) for pod in counted).items():
                known[name] = known.get(name, 0.0) + amount
            for name in quota.hard.keys() & known.keys():
                quota.used[name] = max(quota.used.get(name, 0.0), known[name])

    def explain_lack(self, run: Applicant, *, empty: bool = False) -> str:
        """Return a message about the first quota without room for a run, or an empty string."""
        quotas = self._quotas.get(run.namespace) or ()
        return next(
            (text for quota in quotas if (text := quota.explain_excess(quota.asked_of(run.gang), empty=empty))), ""
        )

    def allows_growth(self, run: Applicant, larger: Applicant) -> bool:
        """Return whether the quotas allow a run with pods to change to a larger size."""
        for quota in self._quotas.get(run.namespace) or ():
            had = quota.asked_of(run.gang)
            more = {name: amount - had.get(name, 0.0) for name, amount in quota.asked_of(larger.gang).items()}
            if quota.explain_excess(more):
                return False
        return True


def missing_pods(run: Applicant) -> tuple[PodSet, ...]:
    """Return the pods of an admitted run that do not exist yet, which no quota counts."""
    result = []
    for pods in run.gang:
        there = sum(1 for pod in run.pods if pod.role == pods.role and not pod.ending and not pod.spot)
        if there < pods.count:
            result.append(PodSet(pods.role, pods.count - there, pods.requests, pods.spec))
    return tuple(result)


def asked_of(gang: Iterable[PodSet]) -> dict[str, float]:
    """Return the amounts of a gang by a quota's resource names."""
    asked: dict[str, float] = {}

    def add(name: str, amount: float) -> None:
        asked[name] = asked.get(name, 0.0) + amount

    for pods in gang:
        add("pods", pods.count)
        add("count/pods", pods.count)
        for name, amount in pods.requests.items():
            add(f"requests.{name}", amount * pods.count)
            if name in _BARE:
                add(name, amount * pods.count)
        for name, amount in _pod_limits(pods.spec).items():
            add(f"limits.{name}", amount * pods.count)
    return asked


def _pod_limits(spec: Manifest) -> dict[str, float]:
    """Return the limits of a pod: the sum over its containers and sidecars, without ordinary init containers."""
    limits: dict[str, float] = {}
    always = [c for c in spec.get("initContainers") or () if c.get("restartPolicy") == "Always"]
    for container in (*always, *(spec.get("containers") or ())):
        for name, amount in ((container.get("resources") or {}).get("limits") or {}).items():
            limits[name] = limits.get(name, 0.0) + parse_quantity(amount)
    return limits


def read_quota(manifest: Manifest) -> Quota | None:
    """Return a ResourceQuota, or None if its controller has not processed it yet."""
    spec, status = manifest.get("spec") or {}, manifest.get("status") or {}
    if not status.get("hard"):
        return None
    used = {name: parse_quantity(amount) for name, amount in (status.get("used") or {}).items()}
    hard = {name: parse_quantity(amount) for name, amount in (spec.get("hard") or {}).items()}
    return Quota(str(manifest["metadata"]["name"]), hard, used, scopes_of(spec))
