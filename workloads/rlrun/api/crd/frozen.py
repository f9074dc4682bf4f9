"""Mutable and immutable fields of a started run, as CEL rules of the whole resource.

The rules read the status: an update of the spec sees the stored status. There are no such rules in Python, because only the API server
has the old object. An unset field equals its default, so writing or removing a default is not a change.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlrun.api.crd.unset import always_there, canonical_fields
from rlrun.api.resource import IDENTITY_FIELDS, LIVE_FIELDS, RLRunSpec
from rlrun.api.storage import ClaimTemplate
from rlrun.config.loading.schema import field_shapes, snake_name, spell_name
from rlrun.config.rule import Rule, quote_cel

_BEGUN = "self.?status.?attempt.orValue(0)>0"
_UNSTARTED = "self.?status.?unstarted.orValue([]).size()>0"
"""CEL condition that some role has not started with the current specification, so that no step can be lost."""
_UNBOUND = f"{_UNSTARTED}&&self.?status.?storage.?volumeName.orValue('')==''"
"""CEL condition that there is no volume yet; a claim without a volume contains nothing."""
_SUSPENDED = "oldSelf.spec.?suspend.orValue(false)&&self.status.?phase.orValue('')=='Suspended'"
_SINCE = "since attempt {self.status.attempt} started"
_UNREADABLE = "!q.all(s,isQuantity(s))"
"""CEL condition that a size of a pair is not a quantity. Another rule refuses such a size, and a status may lack it."""
_SCALARS = ("int", "choice")
_STORAGE = "storage"
_SUSPEND, _EDIT = "set spec.suspend to true", "wait for phase Suspended, then edit and set it to false"
_BY_PHASE = {
    "Failed": f"the run has failed: {_SUSPEND}, annotate it with rlrun.io/restart-requested-at and the current time, {_EDIT}",
    "Complete": f"the run is complete: {_SUSPEND}, raise spec.maxSteps, {_EDIT}",
}
_PHASE = "self.?status.?phase.orValue('')"
_WAY = (
    f"{_PHASE}=='Complete'&&self.spec.?task.orValue('')=='Eval'?'the run is complete: create it under another name':"
    + "".join(f"{_PHASE}=='{phase}'?{quote_cel(way)}:" for phase, way in _BY_PHASE.items())
    + quote_cel(f"{_SUSPEND}, {_EDIT}")
)
"""How to edit frozen fields. An ended run can only be suspended after a change that restarts it."""


def frozen_rules() -> list[Rule]:
    """Return the rules of a change.

    `LIVE_FIELDS` may change at any time, but `maxSteps` and the volume's size only grow. `IDENTITY_FIELDS` never change. All other fields
    may change while the run is suspended. Until every role has started, all fields except the identity may change; `storage` and its size
    may change until the claim has a volume.
    """
    rest = _fields_below({*LIVE_FIELDS, *IDENTITY_FIELDS})
    identity = {block: [name for name in names if _is_identity(block, name)] for block, names in _all_fields().items()}
    apart = identity | {"": [name for name in identity[""] if name != _STORAGE]}
    return [
        Rule(
            f"!({_BEGUN})||{_UNSTARTED}||{_SUSPENDED}||{_unchanged_condition(rest)}",
            f"frozen {_SINCE}: {{{_changed_paths(rest)}}}; {{{_WAY}}}",
            ".spec",
        ),
        Rule(
            f"!({_BEGUN})||(({_UNBOUND})?{_unchanged_condition(apart)}:{_unchanged_condition(identity)})",
            f"fixed {_SINCE}: {{{_changed_paths(identity)}.filter(f,f!={quote_cel(_STORAGE)}||!({_UNBOUND}))}}; "
            "changing it needs a new run: "
            "create it under another name",
            ".spec",
        ),
        Rule(
            f"!({_BEGUN})||{_max_steps_expression('self')}>={_max_steps_expression('oldSelf')}",
            f"maxSteps ({{{_max_steps_expression('self')}}}) may only grow {_SINCE}; it is {{{_max_steps_expression('oldSelf')}}}",
            ".spec.maxSteps",
        ),
        Rule(
            f"!({_BEGUN})||({_UNBOUND})||[[{_list_size('self')},{_FLOOR}]].all(q,{_UNREADABLE}||!quantity(q[0]).isLessThan(quantity(q[1])))",
            f"size ({{{_list_size('self')}}}) must be at least {{{_FLOOR}}} {_SINCE}: a claim cannot shrink; write {{{_FLOOR}}} or more",
            ".spec.storage.claimTemplate.size",
        ),
    ]


def _all_fields() -> dict[str, list[str]]:
    """Return the names of fields by block. The key "" has the fields of the specification that are not always-present blocks."""
    result: dict[str, list[str]] = {"": []}
    for name, info in RLRunSpec.model_fields.items():
        shape, alias = field_shapes(RLRunSpec)[name], info.alias or name
        if shape.model is not None and always_there(info):
            result[alias] = [spell_name(shape.model, part, "camel") for part in field_shapes(shape.model)]
        else:
            result[""].append(alias)
    return result


def _is_identity(block: str, name: str) -> bool:
    return bool({block, _field_path(block, name)} & set(IDENTITY_FIELDS))


def _fields_below(left_out: set[str]) -> dict[str, list[str]]:
    """Return `_all_fields` without some fields and blocks."""
    return {
        block: [name for name in names if _field_path(block, name) not in left_out]
        for block, names in _all_fields().items()
        if block not in left_out
    }


def _field_path(block: str, name: str) -> str:
    return f"{block}.{name}".lstrip(".")


def _max_steps_expression(root: str) -> str:
    ((_, steps),) = canonical_fields(f"{root}.spec.", RLRunSpec, ["max_steps"])
    return steps


def _list_size(root: str) -> str:
    ((_, size),) = canonical_fields(f"{root}.spec.?storage.?claimTemplate.", ClaimTemplate, ["size"])
    return size


_CLAIMED = "self.?status.?storage.?size.orValue('')"
_FLOOR = f"[[{_list_size('oldSelf')},{_CLAIMED}]].map(q,{_UNREADABLE}||!quantity(q[1]).isLessThan(quantity(q[0]))?q[0]:q[1])[0]"
"""Smallest size: the specified size, or less if the claim never requested that size because its growth was refused."""


def _field_values(compared: dict[str, list[str]]) -> dict[str, str]:
    """Return the CEL expression of each field, by its path, in the specification of the resource `o`."""
    found: dict[str, str] = {}
    for block, names in compared.items():
        model = field_shapes(RLRunSpec)[snake_name(block)].model if block else RLRunSpec
        assert model is not None, block
        live = frozenset(path.removeprefix(f"{block}.") for path in LIVE_FIELDS)
        for name, value in canonical_fields(
            f"o.spec.{f'?{block}.' if block else ''}", model, map(snake_name, names), left_out=live
        ):
            found[_field_path(block, name)] = value
    return found


def _unchanged_condition(compared: dict[str, list[str]]) -> str:
    """Return the CEL condition that the fields in `compared` have not changed."""
    values = ",".join(f"dyn({value})" for value in _field_values(compared).values())
    return f"[[self,oldSelf].map(o,[{values}])].all(v,v[0]==v[1])"


def _changed_paths(compared: dict[str, list[str]]) -> str:
    """Return the CEL list of changed paths. Numbers and choices at the top of the specification include both values."""
    shapes = {info.alias or name: field_shapes(RLRunSpec)[name] for name, info in RLRunSpec.model_fields.items()}
    valued = [name for name in compared[""] if shapes[name].kind in _SCALARS and not shapes[name].nullable]
    pairs = ",".join(f"[dyn({quote_cel(path)}),dyn({value})]" for path, value in _field_values(compared).items())
    described = f"p[0] in {_list_cel(valued)}?p[0]+' (%s, was %s)'.format([p[1],v[1].filter(q,q[0]==p[0])[0][1]]):p[0]"
    return f"[[self,oldSelf].map(o,[{pairs}])].map(v,v[0].filter(p,!(p in v[1])).map(p,{described}))[0]"


def _list_cel(names: Iterable[str]) -> str:
    return f"[{','.join(quote_cel(name) for name in names)}]"


TRANSITION_RULES = tuple(frozen_rules())
"""Rules of a change, over `self` and `oldSelf`, which are the whole resources."""
