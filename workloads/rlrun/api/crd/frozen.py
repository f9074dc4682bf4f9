"""Mutable and immutable fields of a run that has begun, as CEL rules of the whole resource.

They read the status: an update of the spec sees the status as it is stored. Python has no such rules, as
only the API server knows the old object. A field that is unset is compared as its default: to write it, or to leave it out, is no change.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlrun.api.crd.unset import always_there, canonical
from rlrun.api.resource import IDENTITY_FIELDS, LIVE_FIELDS, RLRunSpec
from rlrun.api.storage import ClaimTemplate
from rlrun.config.loading.schema import fields, snake, spelled
from rlrun.config.rule import Rule, quoted

_BEGUN = "self.?status.?attempt.orValue(0)>0"
_UNSTARTED = "self.?status.?unstarted.orValue([]).size()>0"
"""CEL condition that a role has not started with the present specification, so that no step can be lost."""
_UNBOUND = f"{_UNSTARTED}&&self.?status.?storage.?volumeName.orValue('')==''"
"""CEL condition that there is no volume yet. A claim without one holds nothing."""
_SUSPENDED = "oldSelf.spec.?suspend.orValue(false)&&self.status.?phase.orValue('')=='Suspended'"
_SINCE = "since attempt {self.status.attempt} began"
_UNREADABLE = "!q.all(s,isQuantity(s))"
"""CEL condition that one of a pair of sizes is no quantity: another rule refuses such a size, and a status may lack it."""
_SCALARS = ("int", "choice")
_STORAGE = "storage"
_SUSPEND, _EDIT = "set spec.suspend to true", "wait for phase Suspended, then edit and set it to false"
_BY_PHASE = {
    "Failed": f"the run has failed: {_SUSPEND}, annotate it with rlrun.io/restart-requested-at and the time of now, {_EDIT}",
    "Complete": f"the run is complete: {_SUSPEND}, raise spec.maxSteps, {_EDIT}",
}
_PHASE = "self.?status.?phase.orValue('')"
_WAY = (
    f"{_PHASE}=='Complete'&&self.spec.?task.orValue('')=='Eval'?'the run is complete: create it under another name':"
    + "".join(f"{_PHASE}=='{phase}'?{quoted(way)}:" for phase, way in _BY_PHASE.items())
    + quoted(f"{_SUSPEND}, {_EDIT}")
)
"""Way to an edit of what is frozen: an ended run is suspended once something makes it go on."""


def frozen_rules() -> list[Rule]:
    """`LIVE_FIELDS` may change at any time, `maxSteps` and the size upwards, `IDENTITY_FIELDS` never, and all else while suspended.

    Until every role has started, all but the identity may change at once; `storage` and its size, until the claim has a volume.
    """
    rest = _below({*LIVE_FIELDS, *IDENTITY_FIELDS})
    identity = {block: [name for name in names if _is_identity(block, name)] for block, names in _all().items()}
    apart = identity | {"": [name for name in identity[""] if name != _STORAGE]}
    return [
        Rule(
            f"!({_BEGUN})||{_UNSTARTED}||{_SUSPENDED}||{_same(rest)}",
            f"frozen {_SINCE}: {{{_changed(rest)}}}; {{{_WAY}}}",
            ".spec",
        ),
        Rule(
            f"!({_BEGUN})||(({_UNBOUND})?{_same(apart)}:{_same(identity)})",
            f"fixed {_SINCE}: {{{_changed(identity)}.filter(f,f!={quoted(_STORAGE)}||!({_UNBOUND}))}}; another value makes another run: "
            "create it under another name",
            ".spec",
        ),
        Rule(
            f"!({_BEGUN})||{_steps('self')}>={_steps('oldSelf')}",
            f"maxSteps ({{{_steps('self')}}}) may only grow {_SINCE}; it is {{{_steps('oldSelf')}}}",
            ".spec.maxSteps",
        ),
        Rule(
            f"!({_BEGUN})||({_UNBOUND})||[[{_size('self')},{_FLOOR}]].all(q,{_UNREADABLE}||!quantity(q[0]).isLessThan(quantity(q[1])))",
            f"size ({{{_size('self')}}}) must be at least {{{_FLOOR}}} {_SINCE}: a claim cannot shrink; write {{{_FLOOR}}} or more",
            ".spec.storage.claimTemplate.size",
        ),
    ]


def _all() -> dict[str, list[str]]:
    """Names of fields by block; "" holds those of the specification itself that are no block that is always there."""
    result: dict[str, list[str]] = {"": []}
    for name, info in RLRunSpec.model_fields.items():
        shape, alias = fields(RLRunSpec)[name], info.alias or name
        if shape.model is not None and always_there(info):
            result[alias] = [spelled(shape.model, part, "camel") for part in fields(shape.model)]
        else:
            result[""].append(alias)
    return result


def _is_identity(block: str, name: str) -> bool:
    return bool({block, _path(block, name)} & set(IDENTITY_FIELDS))


def _below(left_out: set[str]) -> dict[str, list[str]]:
    """`_all` without some fields and blocks."""
    return {
        block: [name for name in names if _path(block, name) not in left_out]
        for block, names in _all().items()
        if block not in left_out
    }


def _path(block: str, name: str) -> str:
    return f"{block}.{name}".lstrip(".")


def _steps(root: str) -> str:
    ((_, steps),) = canonical(f"{root}.spec.", RLRunSpec, ["max_steps"])
    return steps


def _size(root: str) -> str:
    ((_, size),) = canonical(f"{root}.spec.?storage.?claimTemplate.", ClaimTemplate, ["size"])
    return size


_CLAIMED = "self.?status.?storage.?size.orValue('')"
_FLOOR = (
    f"[[{_size('oldSelf')},{_CLAIMED}]].map(q,{_UNREADABLE}||!quantity(q[1]).isLessThan(quantity(q[0]))?q[0]:q[1])[0]"
)
"""Least size: the specified one, or less where the claim has never asked for so much, as its growth was refused."""


def _values(compared: dict[str, list[str]]) -> dict[str, str]:
    """CEL expression of each field, by its path, in the specification of the resource `o`."""
    found: dict[str, str] = {}
    for block, names in compared.items():
        model = fields(RLRunSpec)[snake(block)].model if block else RLRunSpec
        assert model is not None, block
        live = frozenset(path.removeprefix(f"{block}.") for path in LIVE_FIELDS)
        for name, value in canonical(
            f"o.spec.{f'?{block}.' if block else ''}", model, map(snake, names), left_out=live
        ):
            found[_path(block, name)] = value
    return found


def _same(compared: dict[str, list[str]]) -> str:
    """CEL condition that nothing of `compared` has changed."""
    values = ",".join(f"dyn({value})" for value in _values(compared).values())
    return f"[[self,oldSelf].map(o,[{values}])].all(v,v[0]==v[1])"


def _changed(compared: dict[str, list[str]]) -> str:
    """CEL list of the paths of what has changed, numbers and choices of the specification itself with both values."""
    shapes = {info.alias or name: fields(RLRunSpec)[name] for name, info in RLRunSpec.model_fields.items()}
    valued = [name for name in compared[""] if shapes[name].kind in _SCALARS and not shapes[name].nullable]
    pairs = ",".join(f"[dyn({quoted(path)}),dyn({value})]" for path, value in _values(compared).items())
    told = f"p[0] in {_listed(valued)}?p[0]+' (%s, was %s)'.format([p[1],v[1].filter(q,q[0]==p[0])[0][1]]):p[0]"
    return f"[[self,oldSelf].map(o,[{pairs}])].map(v,v[0].filter(p,!(p in v[1])).map(p,{told}))[0]"


def _listed(names: Iterable[str]) -> str:
    return f"[{','.join(quoted(name) for name in names)}]"


TRANSITION_RULES = tuple(frozen_rules())
"""Rules of a change, over `self` and `oldSelf`, the whole resources."""
