"""Judgement of a run by the installation's policy. Pure, and total: any JSON is taken."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rlrun.api.kubernetes import RESERVED_ENV, RESERVED_ENV_PREFIX
from rlrun_operator.names import ROLES, Names
from rlrun_operator.restrictions import allowed
from rlrun_operator.restrictions.egress import refused_egress
from rlrun_operator.restrictions.rules import (
    Anything,
    Containers,
    Each,
    Fields,
    Holds,
    Isolation,
    Keys,
    Listed,
    NotRoot,
    Only,
    Rule,
    VariableName,
)
from rlrun_operator.restrictions.run_policy import Installation, RunPolicy

RESERVED_LABELS = r"(.*\.)?(rlrun\.io|kubernetes\.io|k8s\.io)/.*"
"""Keys of labels by which the operator and Kubernetes find pods."""
_RESERVED_LABEL = re.compile(RESERVED_LABELS, re.DOTALL)
SHOWN = 60
"""Characters of a value in a message."""
_NO_TEMPLATE = "is not allowed by this installation (policy.podTemplate: Restricted)"


def find_refusals(installation: Installation, namespace: str, name: str, spec: Mapping[str, object]) -> list[str]:
    """Every way in which a run breaks the policy; each names field, value and fix.

    Args:
        installation: the policy, and the operator's identity.
        namespace: of the run.
        name: of the run.
        spec: its specification as the API server has it, valid by the schema.
    """
    policy = installation.policy
    found: list[str] = []
    for role in ROLES:
        block = spec.get(role)
        if isinstance(block, Mapping):
            found += _Place(policy, role, role).judge(allowed.ROLE, block)
    found += _Place(policy, "", "").judge(allowed.REST, spec)
    return [*found, *refused_egress(policy, spec), *_operators_own(installation, namespace, name, spec)]


def refused_claim(policy: RunPolicy, path: str, claim: str) -> list[str]:
    """Like `find_refusals`, of a claim that a run gets by other ways than its own fields."""
    return list(_Place(policy, path, "").judge(Listed("claims"), claim))


def _operators_own(installation: Installation, namespace: str, name: str, spec: Mapping[str, object]) -> Iterator[str]:
    """No policy allows the operator's own account, which may do in every served namespace what runs need."""
    if namespace != installation.namespace or not installation.account:
        return
    if Names(name).account == installation.account:
        yield f"metadata.name ({name}): the run's account would be the operator's own, {installation.account}; rename the run"
    for role in ROLES:
        pod: object = spec
        for key in (role, "podTemplate", "spec"):
            pod = pod.get(key) if isinstance(pod, Mapping) else None
        for key in ("serviceAccountName", "serviceAccount"):
            if isinstance(pod, Mapping) and pod.get(key) == installation.account:
                path = f"{role}.podTemplate.spec.{key}"
                yield f"{path} ({installation.account}) is the operator's own account, which no run may have; remove it"


@dataclass(frozen=True)
class _Place:
    """A part of the specification."""

    policy: RunPolicy
    path: str
    role: str
    exact: bool = True
    """True if other rules than the lists count: not in a `podTemplate` that may be anything."""

    def judge(self, rule: Rule, value: object) -> Iterator[str]:
        """Faults of the value here, in words."""
        match rule:
            case Anything():
                return
            case Fields():
                yield from self._fields(rule, value)
            case Each() | Containers():
                yield from self._elements(rule, value)
            case Listed():
                yield from self._listed(rule, value)
            case Keys():
                yield from self._keys(rule, value)
            case Isolation():
                yield from self._isolation(value)
            case _:
                if self.exact and (fix := _describe_fault(rule, value)):
                    yield self._no(value, fix)

    def _fields(self, rule: Fields, value: object) -> Iterator[str]:
        if not isinstance(value, Mapping):
            if self.exact:
                yield self._no(value, "write a map of fields")
            return
        for key, inner in value.items():
            there = self._in(f"{self.path}.{key}" if self.path else str(key))
            if inner is None:
                if rule.closed and self.exact:
                    yield there._no(None, "null would remove what the operator sets; remove the line")
            elif key in rule.fields:
                if rule.fields[key] is allowed.POD_TEMPLATE:
                    there = replace(there, exact=self.policy.pod_template == "Restricted")
                yield from there.judge(rule.fields[key], inner)
            elif rule.closed and self.exact:
                yield there._no(inner, f"remove it; allowed here: {', '.join(sorted(rule.fields))}")

    def _elements(self, rule: Each | Containers, value: object) -> Iterator[str]:
        if not isinstance(value, list):
            if self.exact:
                yield self._no(value, "write a list")
            return
        for index, element in enumerate(value):
            there = self._in(f"{self.path}[{index}]")
            yield from there.judge(rule.element, element)
            if not isinstance(rule, Containers) or not self.exact or not isinstance(element, Mapping):
                continue
            if not (rule.own and element.get("name") == self.role) and not _states_limits(element):
                fix = "set securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}"
                yield there._no(element.get("name"), fix)

    def _listed(self, rule: Listed, value: object) -> Iterator[str]:
        if isinstance(value, str) and self.policy.allows(rule.list, value):
            return
        names = ", ".join(self.policy.patterns(rule.list)) or "none"
        fix = "name one of them, or ask the administrator of the operator for it"
        yield f"{self.path} ({_show_value(value)}) is not allowed by this installation (policy.{rule.list}: {names}); {fix}"

    def _keys(self, rule: Keys, value: object) -> Iterator[str]:
        if not isinstance(value, Mapping):
            if self.exact:
                yield self._no(value, "write a map of strings")
            return
        for key, inner in value.items():
            there = self._in(f"{self.path}[{key}]")
            if rule.kind == "annotations":
                if not self.policy.allows("annotations", key):
                    yield from there._listed(Listed("annotations"), key)
            elif self.exact and _RESERVED_LABEL.fullmatch(key):
                yield there._no(inner, "remove it: the operator and Kubernetes find pods by such labels")
            if inner is None and self.exact:
                yield there._no(None, "null would remove what the operator sets; remove the line")

    def _isolation(self, value: object) -> Iterator[str]:
        """An environment that names no place has the container (`EnvironmentConfig.shares_container`)."""
        required = self.policy.environment_isolation
        if required != "Any" and value != required:
            fix = (
                f"set it to {required} or remove it: the code then runs next to the orchestrator, without the run's key"
            )
            yield (
                f"{self.path} ({_show_value(value)}) is not allowed by this installation "
                f"(policy.environmentIsolation: {required}); {fix}"
            )

    def _in(self, path: str) -> _Place:
        return replace(self, path=path)

    def _no(self, value: object, fix: str) -> str:
        return f"{self.path} ({_show_value(value)}) {_NO_TEMPLATE}; {fix}"


def _describe_fault(rule: Rule, value: object) -> str | None:
    """Correction of a value, in words; None: nothing is wrong."""
    match rule:
        case Only():
            right = type(value) is type(rule.value) and value == rule.value
            return None if right else f"set it to {_show_value(rule.value)}, or remove it"
        case Holds():
            right = isinstance(value, list) and rule.value in value
            return None if right else f"put {rule.value} into the list, or remove it"
        case NotRoot():
            return None if type(value) is int and value >= 1 else "set a number from 1, or remove it"
        case VariableName():
            reserved = isinstance(value, str) and (value in RESERVED_ENV or value.startswith(RESERVED_ENV_PREFIX))
            return "remove it: RLRun sets it itself" if reserved or not isinstance(value, str) else None
        case _:
            return None


def _states_limits(container: Mapping[str, object]) -> bool:
    """True if a container of the user's says what Pod Security `restricted` wants each container to say."""
    security = container.get("securityContext")
    if not isinstance(security, Mapping):
        return False
    capabilities = security.get("capabilities")
    return (
        security.get("allowPrivilegeEscalation") is False
        and isinstance(capabilities, Mapping)
        and "drop" in capabilities
    )


def _show_value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
