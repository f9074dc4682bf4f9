"""Checks of parts of Kubernetes objects that a specification contains without a schema: pod templates and egress rules.

The API server rejects an invalid part only when the operator applies the pods, long after `rlrun validate`. These checks find wrong names
and types; the full validation is the API server's. Directives of a strategic merge patch (`$patch`) are not checked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rlrun.api.resource import RLRunSpec
from rlrun.config.loading.fixes.written import to_yaml
from rlrun.config.loading.yaml_text import Key
from rlrun.config.suggest import did_you_mean
from rlrun.local.user_code import Finding

_ROLES = ("trainer", "inference", "orchestrator")
_TEMPLATE = ("apiVersion", "kind", "metadata", "spec")
_LISTS_OF_POD = (
    *("containers", "initContainers", "volumes", "tolerations", "imagePullSecrets", "hostAliases"),
    "topologySpreadConstraints",
)
_LISTS_OF_CONTAINER = ("env", "envFrom", "volumeMounts", "ports")
_RULE, _PORT = ("to", "ports"), ("port", "protocol", "endPort")
_PEER = ("podSelector", "namespaceSelector", "ipBlock")


def check_kubernetes_parts(spec: RLRunSpec) -> Iterator[Finding]:
    """Yield problems of pod templates and egress rules."""
    for role in _ROLES:
        template: Mapping[str, Any] = getattr(spec, role).pod_template
        for message in _of_template(template, role):
            yield Finding((role, "pod_template"), message)
    for i, rule in enumerate(spec.network_policy.extra_egress):
        key: Key = ("network_policy", "extra_egress", i)
        yield from (Finding(key, message) for message in _of_egress(rule))


def _of_template(template: Mapping[str, Any], role: str) -> Iterator[str]:
    for name, value in template.items():
        if name not in _TEMPLATE and not name.startswith("$"):
            inside = to_yaml({"spec": {name: value}})
            yield f"unknown field {name}: a pod template has metadata and spec; write podTemplate: {inside[:160]}"
    pod = template.get("spec")
    if pod is None:
        return
    if not isinstance(pod, Mapping):
        yield f"spec: got {to_yaml(pod)[:80]}, expected a mapping"
        return
    yield from _wrong_lists(pod, _LISTS_OF_POD, "spec")
    for name in ("containers", "initContainers"):
        containers = pod.get(name)
        for i, container in enumerate(containers if isinstance(containers, list) else ()):
            if isinstance(container, Mapping):
                yield from _of_container(container, f"spec.{name}[{i}]", role if name == "containers" else None)


def _of_container(container: Mapping[str, Any], path: str, role: str | None) -> Iterator[str]:
    """Yield problems of a container. Of `containers`, only the role's own container needs no image."""
    name = container.get("name")
    if not isinstance(name, str):
        yield f"{path}: name is required" + (
            f"; the container of this role is named {role}" if role is not None else ""
        )
    elif role is not None and name != role and "image" not in container and "$patch" not in container:
        yield f"{path}: container {name} has no image; set image, or write name: {role} to change the role's own container"
    yield from _wrong_lists(container, _LISTS_OF_CONTAINER, path)


def _wrong_lists(block: Mapping[str, Any], names: Collection[str], path: str) -> Iterator[str]:
    """Yield problems of fields that must be lists of mappings."""
    for name in names:
        value = block.get(name)
        if value is not None and not isinstance(value, list):
            yield f"{path}.{name}: got {to_yaml(value)[:80]}, expected a list; write a dash before each item"
        for i, item in enumerate(value if isinstance(value, list) else ()):
            if not isinstance(item, Mapping):
                yield f"{path}.{name}[{i}]: got {to_yaml(item)[:80]}, expected a mapping"


def _of_egress(rule: Mapping[str, Any]) -> Iterator[str]:
    yield from _unknown_fields(rule, _RULE, "a rule")
    for name, known in (("ports", _PORT), ("to", _PEER)):
        value = rule.get(name)
        if value is not None and not isinstance(value, list):
            yield f"{name}: got {to_yaml(value)[:80]}, expected a list; write a dash before each item"
        for i, item in enumerate(value if isinstance(value, list) else ()):
            if isinstance(item, Mapping):
                yield from _unknown_fields(item, known, f"{name}[{i}]")
            else:
                such = (
                    f"; write {name}: [{{port: {to_yaml(item)}}}]" if name == "ports" and isinstance(item, int) else ""
                )
                yield f"{name}[{i}]: got {to_yaml(item)[:80]}, expected a mapping with {', '.join(known)}{such}"


def _unknown_fields(block: Mapping[str, Any], known: Collection[str], what: str) -> Iterator[str]:
    for name in block:
        if name not in known:
            yield f"unknown field {name} of {what}{did_you_mean(name, known)}; known: {', '.join(known)}"
