"""Rules over a stored specification, which contains only the fields that a client wrote.

The CRD has no defaults, so a rule may read `self.trainer.replicas` of an object without `trainer`. Rules are written as if all fields
were present. This module replaces each read of a field by an optional read with the model's default: `self.?trainer.?replicas.orValue(1)`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rlrun.config.loading.schema import Shape, field_shapes
from rlrun.config.rule import Rule, quote_cel

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
