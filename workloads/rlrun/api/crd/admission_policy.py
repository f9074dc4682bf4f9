"""Rules between fields as a ValidatingAdmissionPolicy, and objects as YAML text for files and for `rlrun crd`.

The API server evaluates the policy only when a specification is written. As `x-kubernetes-validations` of the CRD the rules would also be
evaluated over the whole object at every write of the status, which would be most of the load of a run on the API server. Unlike a CRD's
rules, a policy can also read free-form fields. It reports all broken rules at once.

Pure: models in, plain data out. The variable `self` of a rule is bound by macros: `optional.optMap(self, ...)` for a block and
`[item].map(self, ...)` for an item of a list, because macros do not provide the index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import yaml

from rlrun.api.crd.definition import GROUP, KEYS_KEY, PLURAL, RULES_KEY, VERSION, spec_schema
from rlrun.api.crd.frozen_fields import TRANSITION_RULES
from rlrun.api.resource import RLRun
from rlrun.config.base import LEVELS_MAX, Rule, compact_cel, quote_cel
from rlrun.runtime.json_types import Json


class _Dumper(yaml.SafeDumper):
    """Dumper without anchors: equal values are written out every time."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def as_yaml(*documents: Mapping[str, object]) -> str:
    """Return the documents in order as YAML, separated by `---`."""
    return "---\n".join(_yaml_text(document) for document in documents)


def _yaml_text(document: Mapping[str, object]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


NAME = f"{PLURAL}.{GROUP}"
SPEC_LEVELS_MAX = LEVELS_MAX + 4
"""Deepest nesting of lists and mappings in a specification; `spec.environments[0].args` is four levels deep."""
MESSAGES_MAX = 10
"""Most broken rules in one answer. The API server's own limit is 5 kiB; each message is truncated at `MESSAGE_MAX`."""
MESSAGE_MAX = 480
_SPEC = "object.spec"
_ROOT = quote_cel("")


def validating_policy() -> list[Json]:
    """Return the ValidatingAdmissionPolicy and its binding, which applies to all namespaces."""
    api = {"apiVersion": "admissionregistration.k8s.io/v1"}
    policy: Json = {
        **api,
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": NAME},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {
                "resourceRules": [
                    {
                        "apiGroups": [GROUP],
                        "apiVersions": [VERSION],
                        "operations": ["CREATE", "UPDATE"],
                        "resources": [PLURAL],
                    }
                ]
            },
            # Without it, a rule of a newer release would prevent that a run of an older release is labeled or loses a finalizer.
            "matchConditions": [
                {"name": "spec-written", "expression": "request.operation == 'CREATE' || object.spec != oldObject.spec"}
            ],
            "variables": [{"name": name, "expression": cel} for name, cel in _message_variables()],
            "validations": [
                {
                    "expression": "size(variables.problems) == 0",
                    "messageExpression": _first_problems(),
                    "message": "spec breaks a rule; `rlrun validate` names it",
                }
            ],
        },
    }
    binding: Json = {
        **api,
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": NAME},
        "spec": {"policyName": NAME, "validationActions": ["Deny"]},
    }
    return [policy, binding]


def _message_variables() -> list[tuple[str, str]]:
    """Return the name and CEL expression of each variable: lists of messages, and their concatenation."""
    schema = spec_schema(ruled=True)
    found = [("indices", f"[{','.join(str(i) for i in range(_longest_list(schema)))}]"), ("deep", _depth_problem())]
    parts = [("ofName", f"[object].map(self,{_broken_rules(RLRun.CEL_RULES, _ROOT)})[0]")]
    parts.append(("ofSpec", f"[{_SPEC}].map(self,{_broken_rules(schema[RULES_KEY], quote_cel('spec'))})[0]"))
    for name, inner in schema["properties"].items():
        if below := _problems_below(inner, quote_cel(f"spec.{name}"), 0):
            parts.append((name, f"{_SPEC}.?{name}.optMap(self,{below}).orValue([])"))
    changed = _broken_rules(TRANSITION_RULES, _ROOT)
    parts.append(
        ("ofChange", f"request.operation=='CREATE'?[]:[object].map(self,[oldObject].map(oldSelf,{changed})[0])[0]")
    )
    every = "+".join(f"variables.{name}" for name, _ in [("deep", ""), *parts])
    return [*found, *parts, ("problems", every)]


def _longest_list(schema: Json) -> int:
    """Return the most items that a list in the schema may have."""
    inner = [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]
    return max([int(schema.get("maxItems", 0)), *(_longest_list(each) for each in inner if isinstance(each, dict))])


def _problems_below(schema: Json, path: str, lists: int) -> str:
    """Return the CEL list of problems in the value `self` of this schema; empty if the schema has no rules.

    Args:
        path: path of the value, as a CEL expression.
        lists: number of lists around the value.
    """
    parts = [_broken_rules(schema[RULES_KEY], path)] if schema.get(RULES_KEY) else []
    for name, inner in schema.get("properties", {}).items():
        if below := _problems_below(inner, _extend_path(path, f".{name}"), lists):
            parts.append(f"self.?{name}.optMap(self,{below}).orValue([])")
    # Nested lists need different index variables, because an inner macro would hide the outer variable.
    index = f"i{lists}"
    if "items" in schema and (
        below := _problems_below(schema["items"], _extend_path(path, "[", f"string({index})", "]"), lists + 1)
    ):
        item = f"[self[{index}]].map(self,({below}).join('; '))[0]"
        parts.append(f"variables.indices.filter({index},{index}<size(self)).map({index},{item}).filter(s,s!='')")
    if KEYS_KEY in schema:
        key = _broken_rules(schema[KEYS_KEY][RULES_KEY], _extend_path(path, ".", "k"))
        parts.append(f"self.map(k,[k].map(self,({key}).join('; '))[0]).filter(s,s!='')")
    values = schema.get("additionalProperties")
    if isinstance(values, dict) and (below := _problems_below(values, _extend_path(path, ".", "k"), lists)):
        parts.append(f"self.map(k,[self[k]].map(self,({below}).join('; '))[0]).filter(s,s!='')")
    return "+".join(parts)


def _extend_path(path: str, text: str, *more: str) -> str:
    """Append to a path. `more` alternates between an expression and a text."""
    return "+".join([path, quote_cel(text), *(part if i % 2 == 0 else quote_cel(part) for i, part in enumerate(more))])


def _broken_rules(rules: Iterable[Rule], path: str) -> str:
    """Return the CEL list of the messages of the rules that `self` breaks."""
    each = []
    for rule in rules:
        field = rule.field or ""
        prefix = [] if path == _ROOT else [path]
        if field or prefix:
            prefix.append(quote_cel(f"{field if prefix else field.lstrip('.')}: "))
        each.append(f"({compact_cel(rule.holds)})?'':{'+'.join([*prefix, rule.message_cel()])}")
    return f"[{','.join(each)}].filter(s,s!='')"


def _first_problems() -> str:
    """Return the CEL string of the first problems, on one line: the API server drops a message with a line break."""
    cut = f"size(p)>{MESSAGE_MAX}?p.substring(0,{MESSAGE_MAX})+'…':p"
    first = f"variables.indices.filter(i,i<{MESSAGES_MAX}&&i<size(variables.problems)).map(i,variables.problems[i])"
    more = (
        f"size(variables.problems)>{MESSAGES_MAX}?['and %d more'.format([size(variables.problems)-{MESSAGES_MAX}])]:[]"
    )
    return f"({first}.map(p,{cut})+({more})).join('; ').replace('\\n',' ').replace('\\r',' ')"


def _depth_problem() -> str:
    """Return the CEL list with one message for a specification that is nested too deeply. CEL has no recursion, so it is unrolled."""
    names = [f"v{i}" for i in range(SPEC_LEVELS_MAX)]
    inner = f"{_child_schemas(names[-1])}.all(v,type(v)!=map&&type(v)!=list)"
    for outer, name in zip(reversed(names[:-1]), reversed(names[1:]), strict=True):
        inner = f"{_child_schemas(outer)}.all({name},{inner})"
    message = f"spec: more than {SPEC_LEVELS_MAX} nested lists and mappings: flatten the value, or put it into a file"
    return f"[{_SPEC}].all({names[0]},{inner})?[]:[{quote_cel(message)}]"


def _child_schemas(name: str) -> str:
    return f"(type({name})==map?{name}.map(k,{name}[k]):type({name})==list?{name}:[])"
