"""Check of a run against the installation's policy: external addresses, and all fields that affect pods. Pure.

External addresses that a run names must be within the policy's egress blocks. The checks accept any JSON.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from rlrun.api.kubernetes_types import RESERVED_ENV, RESERVED_ENV_PREFIX
from rlrun_operator.names import ROLES, Names
from rlrun_operator.restrictions import allowed_fields
from rlrun_operator.restrictions.allowed_fields import (
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

_FIX = "name an address within one of them, or ask the administrator of the operator to allow it"


def refused_egress(policy: RunPolicy, spec: Mapping[str, object]) -> Iterator[str]:
    """Yield a message for each forbidden address of a specification, with its field and a fix.

    Host names are not checked: the network rules for them open only the allowed addresses.

    Args:
        policy: policy with its address blocks.
        spec: specification from the API server.
    """
    if not policy.limits_egress:
        return
    blocks = ", ".join(policy.egress) or "none"
    network = spec.get("networkPolicy")
    if isinstance(network, Mapping):
        if network.get("mode") == "None":
            yield f"networkPolicy.mode (None) opens all addresses, and policy.egress allows {blocks}; remove it"
        for path, cidr in _address_blocks(network.get("extraEgress")):
            if not policy.allows_block(cidr):
                yield f"networkPolicy.{path} ({cidr}) is not within policy.egress ({blocks}); {_FIX}"
    for path, text in _list_texts(spec, ""):
        address = _url_address(text)
        if address is not None and not policy.allows_block(address):
            yield f"{path} ({address}) is not within policy.egress ({blocks}); {_FIX}"


def _address_blocks(rules: object) -> Iterator[tuple[str, str]]:
    for i, rule in enumerate(rules if isinstance(rules, list) else ()):
        peers = rule.get("to") if isinstance(rule, Mapping) else None
        for j, peer in enumerate(peers if isinstance(peers, list) else ()):
            block = peer.get("ipBlock") if isinstance(peer, Mapping) else None
            if isinstance(block, Mapping):
                yield f"extraEgress[{i}].to[{j}].ipBlock.cidr", str(block.get("cidr"))


def _list_texts(value: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _list_texts(one, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for i, one in enumerate(value):
            yield from _list_texts(one, f"{path}[{i}]")


def _url_address(text: str) -> str | None:
    """Return the address in a URL, or None for a host name, a local address or another text."""
    if "://" not in text:
        return None
    try:
        found = ipaddress.ip_address(urlsplit(text.strip()).hostname or "")
    except ValueError:
        return None
    return None if found.is_loopback or found.is_unspecified else str(found)


RESERVED_LABELS = r"(.*\.)?(rlrun\.io|kubernetes\.io|k8s\.io)/.*"
"""Label keys by which the operator and Kubernetes select pods."""
_RESERVED_LABEL = re.compile(RESERVED_LABELS, re.DOTALL)
SHOWN = 60
"""Maximum characters of a value in a message."""
_NO_TEMPLATE = "is not allowed by this installation (policy.podTemplate: Restricted)"


def find_refusals(installation: Installation, namespace: str, name: str, spec: Mapping[str, object]) -> list[str]:
    """Return a message for each violation of the policy, with field, value and fix.

    Args:
        installation: policy, and identity of the operator.
        namespace: namespace of the run.
        name: name of the run.
        spec: specification from the API server, valid by the schema.
    """
    policy = installation.policy
    found: list[str] = []
    for role in ROLES:
        block = spec.get(role)
        if isinstance(block, Mapping):
            found += _Place(policy, role, role).check_value(allowed_fields.ROLE, block)
    found += _Place(policy, "", "").check_value(allowed_fields.REST, spec)
    return [*found, *refused_egress(policy, spec), *_operators_own(installation, namespace, name, spec)]


def refused_claim(policy: RunPolicy, path: str, claim: str) -> list[str]:
    """Return the refusals for a claim that a run gets from elsewhere than its own fields."""
    return list(_Place(policy, path, "").check_value(Listed("claims"), claim))


def _operators_own(installation: Installation, namespace: str, name: str, spec: Mapping[str, object]) -> Iterator[str]:
    """Yield refusals of the operator's own account, which has the rights of all runs in every served namespace; no policy allows it."""
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
    """Position in the specification."""

    policy: RunPolicy
    path: str
    role: str
    exact: bool = True
    """Whether rules other than the policy's lists apply: not in an unrestricted `podTemplate`."""

    def check_value(self, rule: Rule, value: object) -> Iterator[str]:
        """Yield messages about the value at this position."""
        match rule:
            case Anything():
                return
            case Fields():
                yield from self._check_fields(rule, value)
            case Each() | Containers():
                yield from self._check_elements(rule, value)
            case Listed():
                yield from self._check_listed(rule, value)
            case Keys():
                yield from self._check_keys(rule, value)
            case Isolation():
                yield from self._check_isolation(value)
            case _:
                if self.exact and (fix := _describe_fault(rule, value)):
                    yield self._refusal_message(value, fix)

    def _check_fields(self, rule: Fields, value: object) -> Iterator[str]:
        if not isinstance(value, Mapping):
            if self.exact:
                yield self._refusal_message(value, "write a map of fields")
            return
        for key, inner in value.items():
            there = self._with_path(f"{self.path}.{key}" if self.path else str(key))
            if inner is None:
                if rule.closed and self.exact:
                    yield there._refusal_message(None, "null would remove the operator's own value; remove the line")
            elif key in rule.fields:
                if rule.fields[key] is allowed_fields.POD_TEMPLATE:
                    there = replace(there, exact=self.policy.pod_template == "Restricted")
                yield from there.check_value(rule.fields[key], inner)
            elif rule.closed and self.exact:
                yield there._refusal_message(inner, f"remove it; allowed here: {', '.join(sorted(rule.fields))}")

    def _check_elements(self, rule: Each | Containers, value: object) -> Iterator[str]:
        if not isinstance(value, list):
            if self.exact:
                yield self._refusal_message(value, "write a list")
            return
        for index, element in enumerate(value):
            there = self._with_path(f"{self.path}[{index}]")
            yield from there.check_value(rule.element, element)
            if not isinstance(rule, Containers) or not self.exact or not isinstance(element, Mapping):
                continue
            if not (rule.own and element.get("name") == self.role) and not _states_limits(element):
                fix = "set securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}"
                yield there._refusal_message(element.get("name"), fix)

    def _check_listed(self, rule: Listed, value: object) -> Iterator[str]:
        if isinstance(value, str) and self.policy.allows_value(rule.list, value):
            return
        names = ", ".join(self.policy.patterns_of(rule.list)) or "none"
        fix = "name one of them, or ask the administrator of the operator to allow it"
        yield f"{self.path} ({_show_value(value)}) is not allowed by this installation (policy.{rule.list}: {names}); {fix}"

    def _check_keys(self, rule: Keys, value: object) -> Iterator[str]:
        if not isinstance(value, Mapping):
            if self.exact:
                yield self._refusal_message(value, "write a map of strings")
            return
        for key, inner in value.items():
            there = self._with_path(f"{self.path}[{key}]")
            if rule.kind == "annotations":
                if not self.policy.allows_value("annotations", key):
                    yield from there._check_listed(Listed("annotations"), key)
            elif self.exact and _RESERVED_LABEL.fullmatch(key):
                yield there._refusal_message(inner, "remove it: the operator and Kubernetes select pods by such labels")
            if inner is None and self.exact:
                yield there._refusal_message(None, "null would remove the operator's own value; remove the line")

    def _check_isolation(self, value: object) -> Iterator[str]:
        """Check the isolation of an environment; the default is the container (`EnvironmentConfig.shares_container`)."""
        required = self.policy.environment_isolation
        if required != "Any" and value != required:
            fix = (
                f"set it to {required} or remove it: the code then runs next to the orchestrator, without the run's key"
            )
            yield (
                f"{self.path} ({_show_value(value)}) is not allowed by this installation "
                f"(policy.environmentIsolation: {required}); {fix}"
            )

    def _with_path(self, path: str) -> _Place:
        return replace(self, path=path)

    def _refusal_message(self, value: object, fix: str) -> str:
        return f"{self.path} ({_show_value(value)}) {_NO_TEMPLATE}; {fix}"


def _describe_fault(rule: Rule, value: object) -> str | None:
    """Return the fix for a wrong value, or None if it is right."""
    match rule:
        case Only():
            right = type(value) is type(rule.value) and value == rule.value
            return None if right else f"set it to {_show_value(rule.value)}, or remove it"
        case Holds():
            right = isinstance(value, list) and rule.value in value
            return None if right else f"add {rule.value} to the list, or remove it"
        case NotRoot():
            return None if type(value) is int and value >= 1 else "set a number from 1, or remove it"
        case VariableName():
            reserved = isinstance(value, str) and (value in RESERVED_ENV or value.startswith(RESERVED_ENV_PREFIX))
            return "remove it: RLRun sets it itself" if reserved or not isinstance(value, str) else None
        case _:
            return None


def _states_limits(container: Mapping[str, object]) -> bool:
    """Return whether a user's container has the fields that Pod Security `restricted` requires in each container."""
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
