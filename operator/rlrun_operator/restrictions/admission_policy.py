"""The chart's ValidatingAdmissionPolicy: the table of allowed fields as CEL, in a Helm template. Pure.

The API server enforces the same rules as `refusals`. An expression that reads a value of an unexpected type ends in an error, and the API
server then refuses the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from rlrun.api.kubernetes_types import RESERVED_ENV, RESERVED_ENV_PREFIX
from rlrun.config.base import quote_cel
from rlrun_operator.names import GROUP, PLURAL, ROLES, VERSION, Names
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
from rlrun_operator.restrictions.refusals import RESERVED_LABELS
from rlrun_operator.restrictions.run_policy import RUN_KEY, ListName

Kind = Literal["form", "list", "isolation"]


@dataclass(frozen=True)
class Clause:
    """One condition on a manifest.

    Attributes:
        path: field that it checks; `ROLE` stands for each role.
        cel: expression that is true if the field is allowed.
        words: description of the allowed values.
        kind: `form` applies only if `policy.podTemplate` is Restricted, `isolation` only if `policy.environmentIsolation` is Container.
    """

    path: str
    cel: str
    words: str
    kind: Kind = "form"

    @property
    def message(self) -> str:
        """Message for the user who applies the manifest."""
        return f"{self.path} is not allowed by this installation: {self.words}"


def run_clauses() -> list[Clause]:
    """Return all conditions on a run; they use the variables of `cel_variables`."""
    found = [
        replace(c, cel=f"variables.blocks.all(b, {c.cel})")
        for c in _rule_clauses(allowed_fields.ROLE, "b['block']", "spec.ROLE")
    ]
    found += _rule_clauses(allowed_fields.REST, "object.spec", "spec")
    return [replace(clause, cel=f"variables.unchanged || {clause.cel}") for clause in found]


def cel_variables() -> dict[str, str]:
    """Return the CEL of the computed variables. The policy's lists are further variables, under their own names."""
    roles, fields = _name_list(ROLES), _name_list(allowed_fields.ROLE.fields)
    same = f"{roles}.all(r, {fields}.all(f, object.spec[?r][?f] == oldObject.spec[?r][?f]))"
    rest = " && ".join(f"object.spec[?'{name}'] == oldObject.spec[?'{name}']" for name in allowed_fields.REST.fields)
    blocks = f"{roles}.filter(r, r in object.spec).map(r, {{'role': dyn(r), 'block': dyn(object.spec[r])}})"
    return {"unchanged": f"oldObject != null && {same} && {rest}", "blocks": blocks}


def operators_own(namespace: str, account: str) -> Clause:
    """Return the condition that no run uses the operator's account.

    Args:
        namespace: CEL of the operator's namespace.
        account: CEL of the name of its ServiceAccount.
    """
    template = "b['block'][?'podTemplate'][?'spec']"
    used = " && ".join(
        f"{template}[?'{key}'].orValue('') != {account}" for key in ("serviceAccountName", "serviceAccount")
    )
    named = f"object.metadata.name + '{Names('').account}' != {account}"
    cel = f"object.metadata.namespace != {namespace} || ({named} && variables.blocks.all(b, {used}))"
    return Clause("spec.ROLE.podTemplate.spec.serviceAccountName", cel, "it is the operator's own account", "list")


def _rule_clauses(rule: Rule, at: str, path: str, depth: int = 0) -> Iterator[Clause]:
    """Yield conditions on the value `at` (CEL); each one applies only if the value is present."""
    match rule:
        case Anything():
            return
        case Fields():
            yield from _field_clauses(rule, at, path, depth)
        case Each() | Containers():
            element = f"v{depth}"
            for clause in _rule_clauses(rule.element, element, f"{path}[]", depth + 1):
                yield replace(clause, cel=f"{at}.all({element}, {clause.cel})")
            if isinstance(rule, Containers):
                yield _stated_clause(rule, at, path, element)
        case Listed():
            words = f"it has to be in policy.{rule.list} of the operator's chart"
            yield Clause(path, _list_clause(rule.list, at), words, "list")
        case Keys(kind="annotations"):
            words = "its keys have to be in policy.annotations of the operator's chart"
            yield Clause(path, f"{at}.all(k, {_list_clause('annotations', 'k')})", words, "list")
            yield Clause(path, f"{at}.all(k, {at}[k] != null)", "null would remove the operator's own value")
        case Keys():
            mine = f"!k.matches(r'^({RESERVED_LABELS})$') && {at}[k] != null"
            yield Clause(path, f"{at}.all(k, {mine})", "the operator and Kubernetes select pods by such labels")
        case Isolation():
            words = "it has to be Container, or left out (policy.environmentIsolation of the operator's chart)"
            yield Clause(path, f"{at} == 'Container'", words, "isolation")
        case _:
            yield Clause(path, *_leaf_clause(rule, at))


def _field_clauses(rule: Fields, at: str, path: str, depth: int) -> Iterator[Clause]:
    if rule.closed:
        key, names = f"k{depth}", sorted(rule.fields)
        known = f"{at}.all({key}, {key} in {_name_list(names)} && {at}[{key}] != null)"
        yield Clause(path, known, f"allowed fields, none of them null: {', '.join(names)}")
    for name, inner in rule.fields.items():
        there = f"{at}['{name}']"
        for clause in _rule_clauses(inner, there, f"{path}.{name}", depth):
            yield replace(clause, cel=f"(!('{name}' in {at}) || {there} == null || {clause.cel})")


def _stated_clause(rule: Containers, at: str, path: str, element: str) -> Clause:
    own = f"{element}[?'name'].orValue('') == b['role'] || " if rule.own else ""
    security = f"{element}[?'securityContext']"
    stated = f"{security}[?'allowPrivilegeEscalation'].orValue(true) == false && {security}[?'capabilities'][?'drop'].hasValue()"
    words = "each container except the operator's own sets securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}"
    return Clause(f"{path}[]", f"{at}.all({element}, {own}({stated}))", words)


def _leaf_clause(rule: Rule, at: str) -> tuple[str, str]:
    """Return CEL and description of a rule about one value."""
    match rule:
        case Only(value=bool() as value):
            return f"{at} == {str(value).lower()}", f"it has to be {str(value).lower()}"
        case Only(value=value):
            return f"{at} == {quote_cel(str(value))}", f"it has to be {value}"
        case Holds():
            return f"{quote_cel(rule.value)} in {at}", f"it has to contain {rule.value}"
        case NotRoot():
            return f"(type({at}) == int && {at} >= 1)", "it has to be a number from 1"
        case VariableName():
            free = f"(!({at} in {_name_list(RESERVED_ENV)}) && !{at}.startsWith({quote_cel(RESERVED_ENV_PREFIX)}))"
            return free, "RLRun sets this variable itself"
        case _:
            raise TypeError(f"{rule} is not about one value")


def _list_clause(name: ListName, at: str) -> str:
    matches = f"{at} == p || (p.endsWith('*') && {at}.startsWith(p.substring(0, p.size() - 1)))"
    found = f"variables.{name}.exists(p, {matches})"
    return f"(!{at}.matches(r'^({RUN_KEY})$') && {found})" if name == "secrets" else found


def _name_list(names: Iterable[str]) -> str:
    return f"[{', '.join(quote_cel(name) for name in names)}]"


_HEAD = """\
{{- /* Generated by `python -m tools.operator_docs --write`; edit rlrun_operator/restrictions instead. */ -}}
{{- if (.Values.admissionPolicy | default dict).enabled }}
{{- $name := printf "%s.%s" .Release.Namespace (include "rlrun.name" .) }}
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata:
  name: {{ $name }}
  labels: {{- include "rlrun.labels" . | nindent 4 }}
spec:
  failurePolicy: Fail
  matchConstraints:
    resourceRules:
    - {apiGroups: [@GROUP], apiVersions: [@VERSION], operations: [CREATE, UPDATE], resources: [@PLURAL]}
  variables:
"""
_BINDING = """\
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ $name }}
  labels: {{- include "rlrun.labels" . | nindent 4 }}
spec:
  policyName: {{ $name }}
  validationActions: [Deny]
  {{- with include "rlrun.namespaces" . | fromJsonArray }}
  matchResources:
    namespaceSelector:
      matchExpressions:
      - {key: kubernetes.io/metadata.name, operator: In, values: {{ toJson . }}}
  {{- end }}
{{- end }}
"""
_NAMESPACE, _ACCOUNT = "NAMESPACE", "ACCOUNT"


def render_template() -> str:
    """Return the complete Helm template."""
    head = _HEAD
    for mark, value in (("@GROUP", GROUP), ("@VERSION", VERSION), ("@PLURAL", PLURAL)):
        head = head.replace(mark, value)
    lists = [
        f"  - name: {name}\n    expression: {{{{ .Values.policy.{name} | toJson | quote }}}}\n"
        for name in get_args(ListName)
    ]
    computed = [f"  - name: {name}\n    expression: {json.dumps(cel)}\n" for name, cel in cel_variables().items()]
    own = _policy_validations([operators_own(_NAMESPACE, _ACCOUNT)])
    own = own.replace(_NAMESPACE, "'{{ .Release.Namespace }}'").replace(
        _ACCOUNT, "'{{ include \"rlrun.serviceAccount\" . }}'"
    )
    every = run_clauses()
    always = _policy_validations(clause for clause in every if clause.kind == "list")
    isolated = _policy_validations(clause for clause in every if clause.kind == "isolation")
    restricted = _policy_validations(clause for clause in every if clause.kind == "form")
    return "".join(
        (
            head,
            *lists,
            *computed,
            "  validations:\n",
            own,
            always,
            '  {{- if eq .Values.policy.podTemplate "Restricted" }}\n',
            restricted,
            "  {{- end }}\n",
            '  {{- if eq (.Values.policy.environmentIsolation | default "Any") "Container" }}\n',
            isolated,
            "  {{- end }}\n",
            _BINDING,
        )
    )


def _policy_validations(found: Iterable[Clause]) -> str:
    return "".join(
        f"  - expression: {json.dumps(clause.cel)}\n    message: {json.dumps(clause.message)}\n    reason: Forbidden\n"
        for clause in found
    )
