"""CEL rules over a stored specification without defaults, and the rules for mutable and immutable fields.

A stored specification contains only the fields that a client wrote. The CRD has no defaults, so a rule may read `self.trainer.replicas` of
an object without `trainer`. Rules are written as if all fields were present. `reading_defaults` replaces each read of a field by an
optional read with the model's default: `self.?trainer.?replicas.orValue(1)`.

The rules for mutable and immutable fields of a started run are rules of the whole resource. They read the status: an update of the spec
sees the stored status. There are no such rules in Python, because only the API server has the old object. An unset field equals its
default, so writing or removing a default is not a change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rlrun.api.resource import IDENTITY_FIELDS, LIVE_FIELDS, RLRunSpec
from rlrun.api.run_fields import ClaimTemplate
from rlrun.config.base import Rule, quote_cel
from rlrun.config.loading.schema import Shape, field_shapes, snake_name, spell_name

_TEXT = r"'(?:\\.|[^'\\])*'"
_PATH = r"(?<![\w.?])(?P<root>[A-Za-z_]\w*)(?P<path>(?:\.[a-zA-Z]\w*)+)(?!\w)"
_READ = re.compile(
    rf"(?P<text>{_TEXT})|has\({_PATH}\)|{_PATH.replace('root', 'of').replace('path', 'below')}(?P<call>\()?"
)
_MACRO = re.compile(rf"{_PATH}\.(?:all|exists|exists_one|filter|map)\((?P<name>\w+),")
Roots = Mapping[str, type[BaseModel]]


@dataclass(frozen=True)
class _Step:
    """One field of a path."""

    owner: type[BaseModel]
    name: str
    info: FieldInfo
    shape: Shape


def reading_defaults(rule: Rule, roots: Roots) -> Rule:
    """Return the rule for a specification without its defaults.

    Args:
        rule: rule that assumes that every field with a default is present.
        roots: model of each variable of the rule, including `self`.
    """
    message = "".join(f"{{{_optional_read(part, roots)}}}" if i % 2 else part for i, part in enumerate(rule.parts))
    return replace(rule, holds=_optional_read(rule.holds, roots), message=message)


def always_there(info: FieldInfo) -> bool:
    """Return whether an unset block equals an empty block: it is required, or its default consists only of its fields' defaults."""
    return info.is_required() or (isinstance(info.default, BaseModel) and not info.default.model_fields_set)


def canonical_fields(
    root: str,
    model: type[BaseModel],
    names: Iterable[str] | None = None,
    *,
    depth: int = 0,
    left_out: frozenset[str] = frozenset(),
) -> Iterator[tuple[str, str]]:
    """Yield name and CEL expression of each field of a block. Blocks with the same meaning have equal expressions.

    Args:
        root: prefix of the block as an optional expression that ends in `.`, such as `o.spec.?trainer.`.
        model: model of the block.
        names: Python names of the fields. Default: all fields.
        depth: number of blocks and lists around the block.
        left_out: paths of fields to skip, such as `claimTemplate.size`.
    """
    for name in names if names is not None else field_shapes(model):
        info, shape = model.model_fields[name], field_shapes(model)[name]
        alias = info.alias or name
        if alias not in left_out:
            inside = frozenset(path.partition(".")[2] for path in left_out if path.startswith(f"{alias}."))
            yield alias, _canonical_value(f"{root}?{alias}", info, shape, depth, inside)


def _canonical_value(read: str, info: FieldInfo, shape: Shape, depth: int, left_out: frozenset[str]) -> str:
    """Return the CEL expression of the field that the optional expression `read` reads."""
    inner, each = (shape.parts[0], f"i{depth}") if shape.kind == "list" else (shape, f"b{depth}")
    if inner.model is None:
        default = default_of(info)
        return read if default is None else f"{read}.orValue({cel_literal(default)})"
    if shape.kind == "list":
        return f"{read}.orValue([]).map({each},{_block_fields(f'{each}.', inner.model, depth + 1, left_out)})"
    if always_there(info) and not info.is_required():
        return _block_fields(f"{read}.", inner.model, depth, left_out)
    if isinstance(info.default, BaseModel):
        given = info.default.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        read = f"{read}.or(optional.of({cel_literal(given)}))"
    return f"{read}.optMap({each},{_block_fields(f'{each}.', inner.model, depth + 1, left_out)})"


def _block_fields(root: str, model: type[BaseModel], depth: int, left_out: frozenset[str]) -> str:
    return f"[{','.join(f'dyn({cel})' for _, cel in canonical_fields(root, model, depth=depth, left_out=left_out))}]"


def default_of(info: FieldInfo) -> object:
    """Return a field's default as plain data, or None if an unset field has its own meaning or the field is a block."""
    if info.is_required():
        return None
    value = info.get_default(call_default_factory=True, validated_data={})
    return None if value is PydanticUndefined or isinstance(value, BaseModel) else value


def cel_literal(value: object) -> str:
    """Return plain data as a CEL literal."""
    if isinstance(value, str):
        return quote_cel(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(cel_literal(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{cel_literal(name)}:{cel_literal(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise TypeError(f"cannot write {value!r} as a CEL literal")


def _optional_read(expression: str, roots: Roots) -> str:
    """Return an expression with its fields read as optional fields."""
    # Macros bind the items of a list to a variable; its model is needed for reads inside the macro.
    known = dict(roots)
    for macro in _MACRO.finditer(expression):
        item = _path_steps(known, macro["root"], macro["path"].split(".")[1:])[0]
        if item and (model := item[-1].shape.parts[0].model if item[-1].shape.kind == "list" else None):
            known[macro["name"]] = model

    def rewritten(found: re.Match[str]) -> str:
        if found["text"] or (found["root"] or found["of"]) not in known:
            return found[0]
        if found["root"]:
            steps, _ = _path_steps(known, found["root"], found["path"].split(".")[1:])
            return f"{_optional_expression(found['root'], steps)}.hasValue()" if len(steps) > 1 else found[0]
        steps, rest = _path_steps(known, found["of"], found["below"].split(".")[1:])
        end = "".join(f".{name}" for name in rest) + (found["call"] or "")
        return (_value_expression(found["of"], steps) if steps else found["of"]) + end

    return _READ.sub(rewritten, expression)


def _path_steps(known: Roots, root: str, names: list[str]) -> tuple[list[_Step], list[str]]:
    """Return the leading fields of a path, and the rest: methods or keys of mappings."""
    steps: list[_Step] = []
    model = known.get(root)
    for i, alias in enumerate(names):
        found = None if model is None else _field_expression(model, alias)
        if found is None:
            return steps, names[i:]
        steps.append(found)
        model = found.shape.model
    return steps, []


def _field_expression(model: type[BaseModel], alias: str) -> _Step | None:
    for name, info in model.model_fields.items():
        if (info.alias or name) == alias:
            return _Step(model, alias, info, field_shapes(model)[name])
    return None


def _value_expression(root: str, steps: list[_Step]) -> str:
    default = default_of(steps[-1].info)
    if default is not None:
        return f"{_optional_expression(root, steps)}.orValue({cel_literal(default)})"
    if all(step.info.is_required() for step in steps[:-1]):
        return ".".join([root, *(step.name for step in steps)])
    return f"{_optional_expression(root, steps)}.value()"


def _optional_expression(root: str, steps: list[_Step]) -> str:
    return root + "".join(f".{step.name}" if step.info.is_required() else f".?{step.name}" for step in steps)


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
