"""Descriptions of fields: the docstrings below them, read from the source on demand.

pydantic can read them when it creates a model, but that was a third of the import time of all models, and most processes show no
descriptions.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys

from pydantic import BaseModel


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
