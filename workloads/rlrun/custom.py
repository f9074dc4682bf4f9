"""Lookup of functions by name: built-in functions, and users' own by import path."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlrun.config.algorithm.names import (
    Kind,
    Option,
    Options,
    complete_options,
    find_entry,
    is_import_path,
    unknown_option,
)

SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
"""Python's own variable, which the pods of a run set: it keeps the working directory off the import path."""


@dataclass(frozen=True)
class Algorithm:
    """Built-in function and its options (name -> default, bounds, summary)."""

    function: Callable[..., object]
    options: Mapping[str, Option]


def builtins(kind: Kind, functions: Mapping[str, Callable[..., object]]) -> dict[str, Algorithm]:
    """Combine functions with their entries in the table of names."""
    return {name: Algorithm(function, find_entry(kind, name).options) for name, function in functions.items()}


def bind(
    kind: Kind, name: str, table: Mapping[str, Algorithm], options: Options
) -> tuple[Callable[..., object], Options]:
    """Return the function called `name`, and the complete options for its calls.

    Raises:
        ValueError: unknown name or option, value out of range, or an import path without a function.
    """
    complete = complete_options(kind, name, options)
    if not is_import_path(name):
        return table[name].function, complete
    function = imported(kind, name)
    keywords, takes_any = _keywords(function)
    for option in complete:
        if option not in keywords and not takes_any:
            raise unknown_option(kind, name, option, keywords)
    for option, required in keywords.items():
        if required and option not in complete:
            raise ValueError(f"{kind} {name}: option {option} must be given, it has no default")
    return function, complete


def add_code_folder() -> None:
    """Append the working directory to the import path, for a user's own modules on one machine.

    It comes last, so a file there hides no installed module. In a pod, where `PYTHONSAFEPATH` is set, a user's modules are installed in the
    image or named by `PYTHONPATH`.
    """
    folder = str(Path.cwd())
    if not os.environ.get(SAFE_PATH_VARIABLE) and folder not in sys.path:
        sys.path.append(folder)


@functools.cache
def imported(kind: str, path: str) -> Callable[..., Any]:
    """Return the function at `package.module:function`.

    Args:
        kind: kind of the function in messages, such as `loss`.
        path: import path of the function.

    Raises:
        ValueError: there is no such function; the cause is an ImportError if a module is missing.
    """
    module_name, function_name = path.split(":")
    try:
        add_code_folder()
        module = importlib.import_module(module_name)
    except Exception as error:  # user code may raise anything, which the message then reports
        raise ValueError(
            f"{kind} {path}: cannot import {module_name} ({type(error).__name__}: {error}); "
            "is it installed in this image or on PYTHONPATH?"
        ) from error
    function = getattr(module, function_name, None)
    if function is None:
        raise ValueError(f"{kind} {path}: module {module_name} has no {function_name}")
    if not callable(function):
        raise ValueError(f"{kind} {path}: {function_name} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def _keywords(function: Callable[..., object]) -> tuple[dict[str, bool], bool]:
    """Return the options of a function (name -> has no default), without its first parameter; and whether it has `**options`."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    keywords = {p.name: p.default is inspect.Parameter.empty for p in parameters if p.kind in by_keyword}
    return keywords, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
