"""Rules of kube-linter and kubescape that apply to rendered objects, written from their documentation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

Object = dict[str, Any]
WORKLOADS = ("Deployment", "StatefulSet", "Pod")
HOST_FOLDERS = ("hostPath",)


def pod_specs(objects: Iterable[Object]) -> Iterator[tuple[str, Object]]:
    """Kind and pod spec of every workload."""
    for each in objects:
        if each["kind"] in WORKLOADS:
            yield each["kind"], each["spec"] if each["kind"] == "Pod" else each["spec"]["template"]["spec"]


def iterate_containers(objects: Iterable[Object]) -> Iterator[tuple[Object, Object]]:
    """Pod spec and container of every container, including init containers."""
    for _, spec in pod_specs(objects):
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            yield spec, container


def _each_container(breaks: Callable[[Object, Object], Any]) -> Callable[[list[Object]], list[str]]:
    return lambda objects: [c["name"] for spec, c in iterate_containers(objects) if breaks(spec, c)]


def _each_pod(breaks: Callable[[Object], Any]) -> Callable[[list[Object]], list[str]]:
    return lambda objects: [kind for kind, spec in pod_specs(objects) if breaks(spec)]


def _each_rule(breaks: Callable[[Object], Any]) -> Callable[[list[Object]], list[str]]:
    def judge(objects: list[Object]) -> list[str]:
        roles = [each for each in objects if each["kind"] in ("Role", "ClusterRole")]
        return [role["metadata"]["name"] for role in roles for rule in role["rules"] if breaks(rule)]

    return judge


def _security(spec: Object, container: Object) -> Object:
    return {**(spec.get("securityContext") or {}), **(container.get("securityContext") or {})}


def _resource(container: Object, kind: str, name: str) -> Any:
    return ((container.get("resources") or {}).get(kind) or {}).get(name)


def _serves(container: Object) -> bool:
    """Return whether a container runs as long as its pod and serves requests."""
    return "ports" in container


def _isolated(objects: list[Object]) -> list[str]:
    policies = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    both = [p for p in policies if p["policyTypes"] == ["Ingress", "Egress"]]
    return [] if both else ["no NetworkPolicy of both directions"]


def _with_probe(name: str) -> Callable[[list[Object]], list[str]]:
    return _each_container(lambda spec, c: _serves(c) and name not in c)


def _latest(image: str) -> bool:
    tag = image.rsplit("/", 1)[-1].partition("@")[0].partition(":")[2]
    return "@" not in image and tag in ("", "latest")


def _plain_secret(container: Object) -> bool:
    suspicious = [
        v for v in container.get("env", ()) if any(w in v["name"] for w in ("KEY", "SECRET", "PASSWORD", "TOKEN"))
    ]
    return any("value" in variable for variable in suspicious)


def _twice(container: Object) -> bool:
    names = [variable["name"] for variable in container.get("env", ())]
    return len(names) != len(set(names))


RULES: dict[str, Callable[[list[Object]], list[str]]] = {
    "C-0013 non-root containers": _each_container(lambda s, c: not _security(s, c).get("runAsNonRoot")),
    "C-0016 privilege escalation": _each_container(
        lambda s, c: _security(s, c).get("allowPrivilegeEscalation") is not False
    ),
    "C-0017 immutable root file system": _each_container(
        lambda s, c: not _security(s, c).get("readOnlyRootFilesystem")
    ),
    "C-0046 drop-net-raw-capability": _each_container(
        lambda s, c: _security(s, c).get("capabilities") != {"drop": ["ALL"]}
    ),
    "C-0055 seccomp": _each_container(lambda s, c: (_security(s, c).get("seccompProfile") or {}).get("type") is None),
    "C-0057 privileged container": _each_container(lambda s, c: _security(s, c).get("privileged")),
    "C-0038 host-pid, host-ipc": _each_pod(lambda s: s.get("hostPID") or s.get("hostIPC")),
    "C-0041 host-network": _each_pod(lambda s: s.get("hostNetwork")),
    "C-0044 host ports": _each_container(lambda s, c: any("hostPort" in port for port in c.get("ports", ()))),
    "C-0048 hostPath": _each_pod(lambda s: any(set(v) & set(HOST_FOLDERS) for v in s.get("volumes", ()))),
    "C-0034 automatic mapping of the account": _each_pod(lambda s: s.get("automountServiceAccountToken") is not False),
    "C-0030, C-0260 ingress and egress blocked": _isolated,
    "C-0018 readiness probe": _with_probe("readinessProbe"),
    "C-0056 liveness probe": _with_probe("livenessProbe"),
    "C-0270 cpu limits": _each_container(lambda s, c: not _resource(c, "limits", "cpu")),
    "C-0271 memory limits": _each_container(lambda s, c: not _resource(c, "limits", "memory")),
    "unset-cpu-requirements": _each_container(lambda s, c: not _resource(c, "requests", "cpu")),
    "unset-memory-requirements": _each_container(lambda s, c: not _resource(c, "requests", "memory")),
    "latest-tag": _each_container(lambda s, c: _latest(c["image"])),
    "C-0012 env-var-secret": _each_container(lambda s, c: _plain_secret(c)),
    "read-secret-from-env-var": _each_container(
        lambda s, c: any("secretKeyRef" in (v.get("valueFrom") or {}) for v in c.get("env", ()))
    ),
    "duplicate-env-var": _each_container(lambda s, c: _twice(c)),
    "C-0015 list secrets": _each_rule(
        lambda r: "secrets" in r["resources"] and set(r["verbs"]) & {"get", "list", "watch"}
    ),
    "C-0031 delete capabilities": _each_rule(lambda r: {"delete", "deletecollection"} & set(r["verbs"])),
    "C-0188 create pods": _each_rule(lambda r: "pods" in r["resources"] and "create" in r["verbs"]),
    "C-0002 exec into container": _each_rule(
        lambda r: {"pods/exec", "pods/attach", "pods/portforward"} & set(r["resources"])
    ),
    "C-0187 wildcards in roles": _each_rule(lambda r: "*" in (*r["verbs"], *r["resources"], *r["apiGroups"])),
    "C-0191 bind, escalate, impersonate": _each_rule(lambda r: {"bind", "escalate", "impersonate"} & set(r["verbs"])),
    "unlimited emptyDir": _each_pod(
        lambda s: any(
            "emptyDir" in v and v["emptyDir"].get("medium") != "Memory" and "sizeLimit" not in v["emptyDir"]
            for v in s.get("volumes", ())
        )
    ),
}
"""Function per rule name that returns the violating objects or containers."""


def broken(objects: list[Object]) -> dict[str, list[str]]:
    """Violated rules, each with the violating objects."""
    found = {name: rule(objects) for name, rule in RULES.items()}
    return {name: who for name, who in found.items() if who}
