"""`--help` of a configuration model: every option with type, bounds, default and description, in the groups of the model."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rlrun.config.loading.schema import Shape, describe_expected, field_shapes, spell_name
from rlrun.config.meaning import field_meaning

_WIDTH = 100
_INDENT = 6


def help_text(model: type[BaseModel], *, prog: str, states: Mapping[str, str] | None = None) -> str:
    """Return the help page.

    Args:
        model: model whose fields are the options.
        prog: name of the program.
        states: text that replaces `required` or the default, for top-level fields.
    """
    head = [
        f"usage: {prog} [@ FILE ...] [--option VALUE ...] [--dry-run] [--help]",
        "",
        *textwrap.wrap(model.__doc__ or "", _WIDTH),
        "",
        "Files are TOML, YAML or JSON. Later files override earlier files, options override files, and all of them override",
        "variables such as RLRUN_MODEL__NAME. Names may be written batch-size, batch_size or batchSize.",
        "",
        "  --dry-run   print the resolved configuration as JSON and stop",
        "  --help      print this page and stop",
    ]
    return "\n".join([*head, *_help_group(model, "", "options", states or {})])


def _help_group(model: type[BaseModel], prefix: str, title: str, states: Mapping[str, str]) -> Iterator[str]:
    yield ""
    yield f"{title}:"
    nested: list[tuple[str, str, type[BaseModel]]] = []
    for name, shape in field_shapes(model).items():
        info, path = model.model_fields[name], f"{prefix}{spell_name(model, name, 'kebab')}"
        inner, below = (shape.parts[0], f"{path}.N") if shape.kind == "list" else (shape, path)
        if inner.model is not None:
            nested.append((below, name, inner.model))
        else:
            yield from _help_option(path, shape, info, (field_meaning(model, name), states.get(name)))
    for path, name, inner_model in nested:
        info = model.model_fields[name]
        text = field_meaning(model, name).split("\n")[0]
        state = "required" if info.is_required() else "default: none" if default_of(info) is None else ""
        state = states.get(name, state)
        title = f"--{path}{f' ({state})' if state else ''}: {text}".rstrip(":")
        yield from _help_group(inner_model, f"{path}.", title, {})


def _help_option(path: str, shape: Shape, info: FieldInfo, words: tuple[str, str | None]) -> Iterator[str]:
    description, state = words
    flag = f"--{path} / --no-{path}" if shape.kind == "bool" else f"--{path} VALUE"
    state = state or ("required" if info.is_required() else f"default: {shown_default(info)}")
    what = "" if shape.kind == "bool" else f"{describe_expected(shape)}; "
    yield f"  {flag}"
    text = f"{description} [{what}{state}]"
    yield from textwrap.wrap(text.strip(), _WIDTH, initial_indent=" " * _INDENT, subsequent_indent=" " * _INDENT)


def default_of(info: FieldInfo) -> object:
    """Return a field's default as plain data; None for a required field."""
    value = info.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return None
    return value.model_dump(by_alias=True) if isinstance(value, BaseModel) else value


def shown_default(info: FieldInfo) -> str:
    """Return a field's default as JSON, or `none` for null."""
    value = default_of(info)
    return "none" if value is None else json.dumps(value)
