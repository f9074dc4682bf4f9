"""Fields of a configuration model as plain values: kind, bounds, spellings and descriptions.

The loaders, the error messages, `--help` and the reference pages all use this module.

Descriptions are the docstrings below the fields. They are read from the source on demand: pydantic can read them when it creates a model,
but that was a third of the import time of all models, and most processes show no descriptions.
"""

from __future__ import annotations

import ast
import functools
import inspect
import keyword
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

import annotated_types as at
from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo

from rlrun.config.suggest import did_you_mean

Kind = Literal["model", "list", "mapping", "union", "choice", "bool", "int", "float", "str", "any"]
Style = Literal["camel", "snake", "kebab"]
_SCALARS: dict[object, Kind] = {bool: "bool", int: "int", float: "float", str: "str"}


@dataclass(frozen=True)
class Shape:
    """One annotation without `Annotated`, `Optional` and other wrappers."""

    kind: Kind
    nullable: bool = False
    model: type[BaseModel] | None = None
    parts: tuple[Shape, ...] = ()
    """Item of a list or mapping; members of a union."""
    choices: tuple[object, ...] = ()
    bounds: tuple[tuple[str, float], ...] = ()
    """(gt | ge | lt | le | multiple_of | min_length | max_length, value)."""


def shape_of(annotation: object, metadata: Iterable[object] = ()) -> Shape:
    """Return the shape of an annotation with its `Annotated` metadata."""
    bounds = tuple(_number_bounds(metadata))
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return shape_of(args[0], (*args[1:], *metadata))
    if origin in (typing.Union, types.UnionType):
        members = tuple(shape_of(arg) for arg in args if arg is not type(None))
        nullable = type(None) in args
        if len(members) == 1:
            only = members[0]
            return Shape(only.kind, nullable, only.model, only.parts, only.choices, only.bounds + bounds)
        return Shape("union", nullable, parts=members, bounds=bounds)
    if origin is Literal:
        return Shape("choice", choices=args)
    if origin is list:
        return Shape("list", parts=(shape_of(args[0]),), bounds=bounds)
    if origin is dict:
        return Shape("mapping", parts=(shape_of(args[1]),), bounds=bounds)
    if annotation in _SCALARS:
        return Shape(_SCALARS[annotation], bounds=bounds)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return Shape("model", model=annotation)
    return Shape("any", nullable=annotation is Any or annotation is JsonValue)


@cache
def field_shapes(model: type[BaseModel]) -> dict[str, Shape]:
    """Return the shape of every field, by its Python name."""
    return {name: shape_of(info.annotation, info.metadata) for name, info in model.model_fields.items()}


def child_shape(shape: Shape, part: str | int) -> Shape:
    """Return the shape one level deeper: of a field, an item, or a mapping's value."""
    if shape.model is not None and part in (known := field_shapes(shape.model)):
        return known[str(part)]
    return shape.parts[0] if shape.kind in ("list", "mapping") else Shape("any", nullable=True)


def snake_name(key: str) -> str:
    """Return the Python name for a key: `batchSize`, `batch-size` and `batch_size` all become `batch_size`.

    A keyword of Python gets an underscore: `class` becomes `class_`.
    """
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).replace("-", "_").lower()
    return f"{name}_" if keyword.iskeyword(name) else name


def spell_name(model: type[BaseModel], name: str, style: Style) -> str:
    """Return a field's name in one of the three spellings."""
    if style == "camel":
        return model.model_fields[name].alias or name
    name = name.removesuffix("_")
    return name.replace("_", "-") if style == "kebab" else name


def as_written(value: object, shape: Shape) -> Any:
    """Return a value with Python names in the manifest's spelling. Keys of a free mapping do not change."""
    if isinstance(value, dict) and shape.model is not None:
        return {
            spell_name(shape.model, name, "camel"): as_written(inner, child_shape(shape, name))
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [as_written(item, child_shape(shape, i)) for i, item in enumerate(value)]
    return value


def find_field(model: type[BaseModel], key: str, *, camel_only: bool = False) -> str | None:
    """Return the Python name of the field for `key`, or None."""
    name = snake_name(key)
    if name not in model.model_fields:
        return None
    return name if not camel_only or key == spell_name(model, name, "camel") else None


def place_of(loc: tuple[int | str, ...], model: type[BaseModel]) -> tuple[tuple[int | str, ...], Shape]:
    """Return pydantic's location as a path of Python names, without the parts that pydantic adds for members of a union."""
    key: tuple[int | str, ...] = ()
    shape = Shape("model", model=model)
    for part in loc:
        if shape.kind == "model" and shape.model is not None:
            name = find_field(shape.model, str(part))
            if name is None:
                break
            key, shape = (*key, name), child_shape(shape, name)
        elif shape.kind in ("list", "mapping"):
            key, shape = (*key, part), child_shape(shape, part)
        else:
            break
    return key, shape


def suggest_key(model: type[BaseModel], key: str, root: type[BaseModel], style: Style) -> str:
    """Suggest a replacement for an unknown `key` of `model`: a close name, the same name elsewhere below `root`, or all names."""
    names = {spell_name(model, name, style) for name in model.model_fields}
    mine = {snake_name(name): name for name in names}
    if snake_name(key) in mine:
        return f" (did you mean {mine[snake_name(key)]}?)"
    if close := did_you_mean(key, names) or did_you_mean(snake_name(key), names):
        return close
    others = [spell_name(root, name, style) for name in root.model_fields if name != snake_name(key)]
    if model is not root and (close := did_you_mean(key, others)):
        return close
    elsewhere = [
        ".".join(path)
        for path, *_ in walk_model(root, style)
        if snake_name(path[-1]) == snake_name(key) and path != (key,)
    ]
    if elsewhere:
        return f" (did you mean {' or '.join(elsewhere[:2])}?)"
    return f"; known: {list_few(names)}"


NAMES_MAX = 10
"""Most names in one message."""


def list_few(names: Iterable[str]) -> str:
    """List at most ten of the names, sorted, with the number of the others."""
    return few_in_order(sorted(names))


def few_in_order(names: Iterable[str]) -> str:
    """List at most ten of the names, in the given order, with the number of the others."""
    known = list(dict.fromkeys(names))
    more = len(known) - NAMES_MAX
    listed = ", ".join(known[:NAMES_MAX]) or "none"
    return f"{listed} and {more} more" if more > 0 else listed


def walk_model(model: type[BaseModel], style: Style) -> Iterator[tuple[tuple[str, ...], type[BaseModel], str]]:
    """Yield every field below `model` with path, owner and name, parents first. Items of lists have the path `name[]`."""
    for name, shape in field_shapes(model).items():
        own = spell_name(model, name, style)
        yield (own,), model, name
        inner = shape.parts[0] if shape.kind == "list" else shape
        if inner.model is not None:
            label = f"{own}[]" if shape.kind == "list" else own
            for path, owner, inner_name in walk_model(inner.model, style):
                yield (label, *path), owner, inner_name


def describe_expected(shape: Shape) -> str:
    """Describe a valid value of this shape, as the end of `expected ...`."""
    return _expected_text(shape) + (", or null" if shape.nullable and shape.kind != "any" else "")


def _expected_text(shape: Shape) -> str:
    bounds = dict(shape.bounds)
    if shape.kind == "choice":
        return _either_text([f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in shape.choices])
    if shape.kind == "union":
        return _either_text([_expected_text(part) for part in shape.parts])
    if shape.kind == "list":
        few = f" with {_range_text(bounds)} items" if bounds else ""
        return f"a list{few}"
    if shape.kind == "str":
        return "a string" + (f" of {_range_text(bounds)} characters" if bounds else "")
    if shape.kind in ("int", "float"):
        number = "a whole number" if shape.kind == "int" else "a number"
        multiple = f", a multiple of {bounds['multiple_of']}" if "multiple_of" in bounds else ""
        limits = limits_of(shape)
        return f"{number}{' ' if limits else ''}{limits}{multiple}"
    return {"model": "a mapping", "mapping": "a mapping", "bool": "true or false", "any": "plain data"}[shape.kind]


def limits_of(shape: Shape) -> str:
    """Describe the bounds of a number; empty without bounds."""
    bounds = {key: _number_text(value) for key, value in shape.bounds}
    if "ge" in bounds and "le" in bounds:
        return f"from {bounds['ge']} to {bounds['le']}"
    words = {"gt": "greater than", "ge": "of at least", "lt": "less than", "le": "at most"}
    return " and ".join(f"{words[key]} {bounds[key]}" for key in words if key in bounds)


def size_of(shape: Shape) -> str:
    """Describe the bounds of a string's or list's length; empty without bounds."""
    bounds = {key: value for key, value in shape.bounds if key in ("min_length", "max_length")}
    unit = "characters" if shape.kind == "str" else "items"
    return f"{_range_text(bounds)} {unit}" if bounds else ""


def type_name(shape: Shape) -> str:
    """Return the name of the type for the reference pages."""
    if shape.kind == "choice":
        return " \\| ".join(f"`{choice}`" for choice in shape.choices)
    if shape.kind == "union":
        return " or ".join(type_name(part) for part in shape.parts)
    if shape.kind == "list":
        return f"list of {type_name(shape.parts[0])}"
    if shape.kind == "mapping":
        return f"map of {type_name(shape.parts[0])}"
    return {"bool": "boolean", "int": "integer", "float": "number", "str": "string", "any": "any", "model": "object"}[
        shape.kind
    ]


def _range_text(bounds: Mapping[str, float]) -> str:
    low, high = bounds.get("min_length", 0), bounds.get("max_length")
    if high is None:
        return f"at least {low}"
    return f"{low} to {high}" if low else f"at most {high}"


def _number_text(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _either_text(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _number_bounds(metadata: Iterable[object]) -> Iterator[tuple[str, float]]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _number_bounds(item.metadata)
        for kind, key in (
            (at.Gt, "gt"), (at.Ge, "ge"), (at.Lt, "lt"), (at.Le, "le"),
            (at.MultipleOf, "multiple_of"), (at.MinLen, "min_length"), (at.MaxLen, "max_length"),
        ):  # fmt: skip
            if isinstance(item, kind):
                yield key, getattr(item, key)


def field_meaning(model: type[BaseModel], name: str) -> str:
    """Return the description of a field, or an empty string.

    Args:
        model: model that has the field, directly or from a base.
        name: Python name of the field.
    """
    if description := model.model_fields[name].description:
        return description
    owner = next((base for base in model.__mro__ if name in vars(base).get("__annotations__", ())), model)
    return _of_module(owner.__module__).get((owner.__qualname__, name), "")


@functools.cache
def _of_module(module: str) -> dict[tuple[str, str], str]:
    """Return the docstrings of a module's fields, by class and field."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):  # created without a file
        return {}
    found: dict[tuple[str, str], str] = {}
    todo: list[tuple[str, ast.stmt]] = [("", node) for node in tree.body]
    for prefix, node in todo:
        if not isinstance(node, ast.ClassDef):
            continue
        name = f"{prefix}{node.name}"
        todo += [(f"{name}.", inner) for inner in node.body]
        for field, below in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and (text := _plain_text(below)):
                found[name, field.target.id] = text
    return found


def _plain_text(node: ast.stmt) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return inspect.cleandoc(node.value.value)
    return ""
